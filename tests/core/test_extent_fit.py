"""Room that blocks leave in their extents: told, and refused where another size would do."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core import events as ev
from kvd.core.blocks.extent_fit import fitting_size, size, wasted_share
from kvd.core.errors import ExtentWaste, KvdError, TooFewExtents
from kvd.core.keys import NamespaceId, ScopeId, SessionId, TenantId
from kvd.core.machine import MachineConfig
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd_proto.groups import GroupKind
from tests.core.bench import Bench

KIB, MIB = 1 << 10, 1 << 20
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": 1 << 30, "": 1}


def pool(extents: int, extent_bytes: int) -> Bench:
    return Bench(MachineConfig(extents=extents, extent_bytes=extent_bytes, tag_secret=bytes(16)))


def group(*parts: int) -> GroupSpec:
    return GroupSpec(GroupKind.FULL_ATTENTION, 1, parts)


def of(*groups: GroupSpec, name: str = "ns") -> NamespaceSpec:
    return NamespaceSpec(name, TenantId("tenant"), 32, groups)


def opened(bench: Bench, spec: NamespaceSpec) -> None:
    bench.feed(ev.SessionOpened(SessionId(1), spec, "", len(spec.groups[0].shard_bytes)))


def refusal(bench: Bench, spec: NamespaceSpec) -> str:
    """What a session is refused with; nothing where it is opened."""
    try:
        opened(bench, spec)
    except KvdError as refused:
        return str(refused)
    return ""


def read(said: str, setting: str, otherwise: int) -> int:
    """What a message asks a setting to be."""
    found = re.search(rf"{setting} (?:=|of at least) (\d+)([KMG]iB)?", said)
    return otherwise if found is None else int(found[1]) * UNITS[found[2] or ""]


def test_parts_that_leave_over_a_tenth_are_refused_with_figures_and_the_size_that_fits() -> None:
    bench = pool(64, MIB)
    with pytest.raises(ExtentWaste) as caught:
        opened(bench, of(group(64 * KIB), group(600 * KIB)))
    assert caught.value.field == "groups[1]"
    assert str(caught.value) == (
        "a block's part of 614400 bytes leaves 434176 bytes of each extent of 1MiB unused, 41.4%,"
        " more than a tenth: start the daemon with extent_bytes = 8MiB (--extent-bytes 8MiB)"
    )
    assert not bench.machine.namespaces()
    opened(pool(8, 8 * MIB), of(group(64 * KIB), group(600 * KIB)))


def test_a_pool_too_small_for_that_size_is_told_how_large_it_must_be() -> None:
    with pytest.raises(ExtentWaste, match=r"8MiB\) and pool_bytes of at least 16MiB$"):
        opened(pool(8, MIB), of(group(600 * KIB), group(600 * KIB)))


def test_a_tenth_is_taken_and_a_word_more_is_not() -> None:
    opened(pool(4, 40 * KIB), of(group(36 * KIB)))
    with pytest.raises(ExtentWaste):
        opened(pool(4, 40 * KIB), of(group(36 * KIB - 8)))


@pytest.mark.parametrize(
    ("spec", "share"),
    [
        (of(group(104)), 1 - 104 / 4096),
        (of(group(64 * KIB, 32 * KIB)), 0.25),
        (of(group(64 * KIB)), 0.0),
    ],
)
def test_what_no_size_of_extent_mends_is_served_and_told(spec: NamespaceSpec, share: float) -> None:
    bench = pool(4, MIB)
    opened(bench, spec)
    assert wasted_share(spec.groups[0], MIB) == pytest.approx(share)
    (told,) = bench.machine.statistics().namespaces
    assert told.wasted_shares == pytest.approx((share,))


def test_what_a_pool_holds_already_goes_on_being_served() -> None:
    bench = pool(2, MIB)
    spec = of(group(600 * KIB), group(64 * KIB), group(64 * KIB))
    scopes = tuple(ev.RecoveredScope(ScopeId(1 + group), "", "", group) for group in range(3))
    bench.feed(ev.ScopesRecovered(NamespaceId(1), spec, scopes))
    bench.feed(ev.PoolRecovered())
    opened(bench, spec)
    with pytest.raises(ExtentWaste):
        bench.feed(ev.SessionOpened(SessionId(2), of(group(600 * KIB), name="new"), "", 1))


def test_pool_without_a_row_for_each_group_refuses_and_names_the_size_that_makes_enough() -> None:
    three = of(*(group(64 * KIB, 64 * KIB) for _ in range(3)))
    opened(pool(6, MIB), three)
    with pytest.raises(TooFewExtents) as caught:
        opened(pool(5, MIB), three)
    assert caught.value.field == "groups"
    assert str(caught.value) == (
        "2 shards of 3 groups need 6 extents, the pool has 5 of 1MiB: start the daemon with"
        " extent_bytes = 512KiB (--extent-bytes 512KiB)"
    )
    with pytest.raises(TooFewExtents, match=r"with pool_bytes of at least 384KiB$"):
        opened(pool(5, 64 * KIB), three)
    with pytest.raises(
        TooFewExtents, match=r"with pool_bytes of at least 384KiB and extent_bytes = 64KiB$"
    ):
        opened(pool(1, 256 * KIB), three)


@pytest.mark.parametrize(
    ("count", "told"),
    [(3 << 30, "3GiB"), (3 << 29, "1536MiB"), (1 << 10, "1KiB"), (1536, "1536"), (0, "0")],
)
def test_sizes_are_told_as_settings_take_them(count: int, told: str) -> None:
    assert size(count) == told


SIZES = st.integers(1, 3 * MIB // 8).map(lambda words: words * 8)


@given(
    st.lists(SIZES, min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 1024).map(lambda pages: pages * 4096),
)
def test_what_a_refusal_asks_for_is_taken(
    parts: Sequence[int], shards: int, extents: int, extent_bytes: int
) -> None:
    spec = of(*(group(*[part] * shards) for part in parts))
    said = refusal(pool(extents, extent_bytes), spec)
    taken = read(said, "extent_bytes", extent_bytes)
    whole = read(said, "pool_bytes", extents * extent_bytes)
    if max(parts) > extent_bytes:
        assert "larger than an extent" in said
    else:
        assert refusal(pool(whole // taken, taken), spec) == ""


@given(st.lists(SIZES, min_size=1, max_size=4))
def test_the_size_that_fits_is_the_smallest_power_of_two(parts: Sequence[int]) -> None:
    groups = tuple(group(part) for part in parts)
    found = fitting_size(groups)
    assert found.bit_count() == 1
    larger = [part for part in parts if part >= 4096]
    for tried in (1 << bits for bits in range(12, found.bit_length())):
        lost = [1 - tried // part * part / tried for part in larger]
        assert all(share <= 0.1 for share in lost) == (tried == found)
