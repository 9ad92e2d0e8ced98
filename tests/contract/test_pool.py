"""A pool carries out its orders, and its next owner finds what was READY and nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvd.core.actions import (
    ForgetNamespace,
    ForgetScopes,
    OpenNamespace,
    OpenScope,
    PublishTags,
    ReleaseRow,
    RetractTags,
    WriteStamps,
    ZeroRow,
)
from kvd.core.events import PoolRecovered
from kvd.core.keys import NamespaceId, RowId, ScopeId
from kvd.core.model.slots import STAMP_SHIFT
from kvd.pool import Pool, PoolConfig, PoolError, recovery, registry, sealed_json
from kvd.pool import pool as pool_module
from kvd_proto.page import PageReader
from kvd_proto.tags import mix
from tests import leaks
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import EXTENT_BYTES, EXTENTS, SLOTS_PER_EXTENT, opened
from tests.waiting import wait_until


def test_a_new_pool_is_cold_empty_and_wholly_in_memory(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    seen: list[tuple[int, int]] = []
    pool = Pool.open(config, lambda done, total: seen.append((done, total)))
    try:
        assert pool.cold_reason == "no pool was here before"
        assert list(pool.recovered()) == [PoolRecovered()]
        assert (pool.extents, pool.extent_bytes) == (EXTENTS, EXTENT_BYTES)
        assert len(pool.tag_secret) == 16
        for extent in range(EXTENTS):
            assert pool.extent_files.path(extent).stat().st_blocks * 512 == EXTENT_BYTES
    finally:
        pool.close()
    total = EXTENTS * EXTENT_BYTES
    assert seen == [(n * EXTENT_BYTES, total) for n in range(1, EXTENTS + 1)]


def test_a_start_tells_how_far_it_has_come_with_what_was_there(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_BATCH_SLOTS", 1)
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        for extent in range(3):
            pool.grant_row(orders.row([extent]))
    seen: list[int] = []
    for _start in ("rows are read", "what nobody owns is zeroed"):
        pool = Pool.open(config, lambda done, total: seen.append(100 * done // total))
        seen.append(-1)
        list(pool.recovered())
        pool.close()
        (config.directory / "registry.jsonl").unlink()
    assert seen == [0, 33, 66, -1, 0, 33, 66, 33, 66, 100, -1]


def test_ready_blocks_come_back_and_freed_ones_do_not(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    hashes = orders.keys(10)
    first = 2 * SLOTS_PER_EXTENT
    slots = [first + i for i in (9, 3, 4, 0, 63, 20, 21, 22, 23, 24)]
    with opened(config) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([2]))
        pool.write_ready(orders.ready(slots, hashes))
        pool.write_free(orders.free(slots[5:]))
        secret, incarnation = pool.tag_secret, pool.incarnation
    with opened(config) as pool:
        assert pool.cold_reason == ""
        assert pool.tag_secret == secret
        assert pool.incarnation != incarnation
        events = list(pool.recovered())
        assert pool.namespace_fields(orders.NAMESPACE) == {"model": "tiny"}
    (scope,) = orders.scopes_of(events)
    assert (scope.scope, scope.epoch, scope.account) == (orders.SCOPE, "epoch 1", "salt")
    assert orders.specs_of(events) == [orders.spec()]
    found = orders.rows_of(events)[2]
    raw = hashes.to_bytes()
    wanted = {s - first: raw[i * 32 : i * 32 + 32] for i, s in enumerate(slots[:5])}
    assert orders.blocks_of(found) == wanted
    assert found.ordinals.tolist() == sorted(wanted)
    assert found.stamps.tolist() == [(first + o) * 10 for o in sorted(wanted)]
    assert found.scopes.tolist() == [orders.SCOPE] * 5
    assert not found.quarantined
    assert isinstance(events[-1], PoolRecovered)


def test_recovery_of_a_scope_for_each_slot_takes_a_moment(shared_directory: Path) -> None:
    """It took time that grew with the square of the scopes."""
    count = 16384
    config = orders.config(shared_directory, extents=1, extent_bytes=count * 4096)
    with opened(config) as pool:
        orders.introduce(pool)
        for number in range(2, count + 1):
            account = f"user {number}"
            pool.open_scope(OpenScope(ScopeId(number), orders.NAMESPACE, "epoch 1", account, 0))
        pool.grant_row(replace(orders.row([0]), slots=count))
        slots, scopes = np.arange(count), np.arange(1, count + 1, dtype=np.uint32)
        pool.write_ready(replace(orders.ready(slots.tolist(), orders.keys(count)), scopes=scopes))
    began = time.process_time()
    with opened(config) as pool:
        events = list(pool.recovered())
    assert time.process_time() - began < 5
    assert orders.rows_of(events)[0].scopes.tolist() == scopes.tolist()
    assert len(orders.scopes_of(events)) == count


def taken_by_page(pool: Pool) -> int:
    return os.fstat(pool.page_fd(orders.NAMESPACE)).st_blocks * 512


def test_index_page_of_what_is_read_back_has_its_size_before_the_first_tag(
    shared_directory: Path,
) -> None:
    count = 16384
    config = orders.config(shared_directory, extents=1, extent_bytes=count * 4096)
    opening = OpenNamespace(orders.NAMESPACE, orders.spec(), page_blocks=count)
    with opened(config) as pool:
        pool.open_namespace(opening, {})
        pool.open_scope(OpenScope(orders.SCOPE, orders.NAMESPACE, "epoch 1", "salt", 0))
        pool.grant_row(replace(orders.row([0]), slots=count))
        assert taken_by_page(pool) < 16 << 10
        pool.write_ready(orders.ready(range(count), orders.keys(count)))
    with opened(config) as pool:
        pool.open_namespace(opening, {})
        had = taken_by_page(pool)
        for first in range(1, count, 1024):
            tags = mix(np.arange(first, first + 1024, dtype=np.uint64))
            assert pool.publish(PublishTags(orders.NAMESPACE, tags)) == 0
        assert had >= taken_by_page(pool) > 16 << 10  # a thread gives back what it had at first


def test_a_rewritten_slot_has_a_later_generation(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        for seed in range(3):
            pool.write_ready(orders.ready([5], orders.keys(1, seed)))
            pool.write_free(orders.free([5]))
        pool.write_ready(orders.ready([5, 6], orders.keys(2, 9)))
    with opened(config) as pool:
        found = orders.rows_of(list(pool.recovered()))[0]
    assert orders.generations_of(shared_directory, [5, 6]) == [4, 1]
    assert found.keys.to_bytes() == orders.keys(2, 9).to_bytes()


def test_a_ready_record_is_never_written_over(shared_directory: Path) -> None:
    with opened(orders.config(shared_directory)) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([1], orders.keys(1)))
        with pytest.raises(AssertionError, match="READY"):
            pool.write_ready(orders.ready([1], orders.keys(1, 1)))


def test_a_slot_without_a_row_is_refused(shared_directory: Path) -> None:
    with opened(orders.config(shared_directory)) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0], parts=(8192,)))
        with pytest.raises(AssertionError, match="no row"):
            pool.write_free(orders.free([EXTENT_BYTES // 8192]))


@pytest.mark.parametrize("hash_bytes", [1, 8, 20, 32, 64])
def test_hashes_of_every_length_survive(shared_directory: Path, hash_bytes: int) -> None:
    config = orders.config(shared_directory)
    hashes = orders.keys(7, hash_bytes=hash_bytes)
    with opened(config) as pool:
        orders.introduce(pool, orders.spec(hash_bytes=hash_bytes))
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready(range(7), hashes))
    with opened(config) as pool:
        found = orders.rows_of(list(pool.recovered()))[0]
    assert found.keys.hash_bytes == hash_bytes
    assert found.keys.to_bytes() == hashes.to_bytes()


def test_parts_of_a_slot_lie_at_its_ordinal_in_each_shard(shared_directory: Path) -> None:
    parts = (4096, 8192, 16384)
    with opened(orders.config(shared_directory)) as pool:
        orders.introduce(pool, orders.spec(parts))
        pool.grant_row(orders.row([3, 0, 5], parts))
        slots = 3 * SLOTS_PER_EXTENT + np.array([0, 2, 15])
        for shard, extent in enumerate((3, 0, 5)):
            extents, offsets = pool.locate(slots, shard)
            assert extents.tolist() == [extent] * 3
            assert offsets.tolist() == [o * parts[shard] for o in (0, 2, 15)]


def test_an_empty_row_comes_back_with_its_namespace(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    parts = (4096, 8192)
    for _ in range(2):
        with opened(config) as pool:
            if pool.cold_reason:
                orders.introduce(pool, orders.spec(parts))
                pool.grant_row(orders.row([4, 1], parts))
            events = list(pool.recovered())
    assert len(orders.scopes_of(events)) == 1
    found = orders.rows_of(events)[4]
    assert found.extents == (4, 1)
    assert len(found.ordinals) == 0


def test_a_released_row_is_gone_and_zeroed(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([1]))
        pool.extent_files.path(1).write_bytes(b"x" * EXTENT_BYTES)
        pool.write_ready(orders.ready([SLOTS_PER_EXTENT], orders.keys(1)))
        with pytest.raises(AssertionError, match="READY"):
            pool.release_row(ReleaseRow(RowId(1)))
        pool.write_free(orders.free([SLOTS_PER_EXTENT]))
        pool.zero_row(ZeroRow(RowId(1)))
        assert not any(pool.extent_files.path(1).read_bytes())
        pool.release_row(ReleaseRow(RowId(1)))
        with pytest.raises(AssertionError, match="no row"):
            pool.locate(np.array([SLOTS_PER_EXTENT]), 0)
    with opened(config) as pool:
        assert orders.tells_of_nothing(list(pool.recovered()))


def test_a_scope_whose_number_has_risen_far_is_read_back_without_memory(
    shared_directory: Path,
) -> None:
    config, high = orders.config(shared_directory), 30_000_000
    with opened(config) as pool:
        orders.introduce(pool)
        pool.open_scope(OpenScope(ScopeId(high), orders.NAMESPACE, "epoch 1", "new", 0))
        pool.grant_row(orders.row([2]))
        first = 2 * SLOTS_PER_EXTENT
        pool.write_ready(orders.ready(range(first, first + 8), orders.keys(8), scope=high))
    tracemalloc.start()
    try:
        with opened(config) as pool:
            found = orders.rows_of(list(pool.recovered()))
        assert tracemalloc.get_traced_memory()[1] < high
    finally:
        tracemalloc.stop()
    assert found[2].scopes.tolist() == [high] * 8


def test_a_recovered_row_is_granted_again_and_goes_on(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([0, 1], orders.keys(2)))
    with opened(config) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        with pytest.raises(AssertionError, match="granted as"):
            pool.grant_row(orders.row([0], parts=(8192,)))
        pool.write_free(orders.free([0]))
        pool.write_ready(orders.ready([2], orders.keys(1, 7)))
    with opened(config) as pool:
        found = orders.rows_of(list(pool.recovered()))[0]
    assert found.ordinals.tolist() == [1, 2]


def test_scopes_that_no_block_names_are_forgotten(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SLACK_LINES", 10)
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool, namespace=1)
        orders.introduce(pool, namespace=2)
        for number in range(3, 50):
            pool.open_scope(OpenScope(ScopeId(number), NamespaceId(1), f"{number}", "", 0))
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([0], orders.keys(1), scope=1))
        pool.write_ready(orders.ready([1], orders.keys(1), scope=40))
        pool.write_ready(orders.ready([2], orders.keys(1), scope=41))
        pool.write_free(orders.free([2]))
    with opened(config) as pool:
        assert [s.scope for s in orders.scopes_of(list(pool.recovered()))] == [1, 40]
    assert len((config.directory / "registry.jsonl").read_bytes().splitlines()) == 3


def test_forgotten_scopes_stay_forgotten_and_the_registry_short(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SLACK_LINES", 10)
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        for number in range(2, 500):
            pool.open_scope(OpenScope(ScopeId(number), orders.NAMESPACE, f"{number}", "", 0))
            pool.forget_scopes(ForgetScopes((ScopeId(number),)))
            assert len((config.directory / "registry.jsonl").read_bytes().splitlines()) <= 16
        pool.open_scope(OpenScope(ScopeId(500), orders.NAMESPACE, "later", "", 0))
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([0], orders.keys(1), scope=500))
    with opened(config) as pool:
        assert [s.scope for s in orders.scopes_of(list(pool.recovered()))] == [500]


def test_forgotten_namespace_closes_its_page_and_comes_back_with_nothing(
    shared_directory: Path,
) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        orders.introduce(pool, namespace=2)
        reader = PageReader(pool.page_fd(orders.NAMESPACE))
        before = leaks.descriptors()
        pool.forget_namespace(ForgetNamespace(orders.NAMESPACE))
        assert reader.closed
        less = len(before) - 2  # the page's and its mapping's, which a thread closes
        wait_until(lambda: len(leaks.descriptors()) == less, "the page is closed")
        with pytest.raises(KeyError):
            pool.page_fd(orders.NAMESPACE)
        pool.grant_row(orders.row([0], namespace=2))
        reader.close()
    with opened(config) as pool:
        assert [s.namespace for s in orders.scopes_of(list(pool.recovered()))] == [2]


def test_what_is_an_engines_own_is_known_to_be_after_a_restart(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        private = replace(orders.spec(), unshared=True)
        orders.introduce(pool, private)
        pool.open_scope(OpenScope(ScopeId(2), orders.NAMESPACE, "own", "", 0, own=True))
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([0], orders.keys(1), scope=1))
        pool.write_ready(orders.ready([1], orders.keys(1), scope=2))
    with opened(config) as pool:
        events = list(pool.recovered())
    assert [(s.scope, s.own) for s in orders.scopes_of(events)] == [(1, False), (2, True)]
    assert orders.specs_of(events) == [private]


def test_registry_of_before_tells_private_namespaces_by_their_fields(
    shared_directory: Path,
) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        order = OpenNamespace(orders.NAMESPACE, orders.spec(), page_blocks=64)
        pool.open_namespace(order, {"unshared": "1000/engine/00ff"})
        pool.open_scope(OpenScope(orders.SCOPE, orders.NAMESPACE, "", "", 0))
        pool.grant_row(orders.row([0]))
    path = config.directory / "registry.jsonl"
    older = [sealed_json.unseal(line) or {} for line in path.read_bytes().splitlines()]
    kept = [{k: v for k, v in each.items() if k not in ("unshared", "own")} for each in older]
    path.write_bytes(b"".join(sealed_json.seal(each) for each in kept))
    with opened(config) as pool:
        events = list(pool.recovered())
    (scope,), (spec,) = orders.scopes_of(events), orders.specs_of(events)
    assert spec.unshared
    assert not scope.own


def test_clients_see_what_is_published_and_whether_there_is_room(shared_directory: Path) -> None:
    tags = mix(np.arange(1, 101, dtype=np.uint64))
    with opened(orders.config(shared_directory)) as pool:
        orders.introduce(pool)
        reader = PageReader(pool.page_fd(orders.NAMESPACE))
        assert pool.publish(PublishTags(orders.NAMESPACE, tags)) == 0
        assert reader.probe(tags).all()
        pool.retract(RetractTags(orders.NAMESPACE, tags[:50]))
        assert reader.probe(tags).tolist() == [False] * 50 + [True] * 50
        pool.set_room(orders.NAMESPACE, (17,))
        assert (reader.room(0), reader.room(1)) == (17, 0)
        hides = [reader.hides_some]
        for holds_some in (True, False):
            pool.set_below(holds_some=holds_some)
            hides.append(reader.hides_some)
            assert reader.room(0) == 17
            assert reader.probe(tags[50:]).all()
        assert hides == [False, True, False]
        closed_before = reader.closed
    assert (closed_before, reader.closed) == (False, True)
    reader.close()


def test_pages_are_mended_in_turns_where_they_have_room_again_and_only_then(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    many = mix(np.arange(1, 10_001, dtype=np.uint64))
    names = [NamespaceId(number) for number in (1, 2, 3)]
    with opened(orders.config(shared_directory)) as pool:
        for name in names:
            pool.open_namespace(OpenNamespace(name, orders.spec(), page_blocks=20_000), {})
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", refuse)
            for name in names:
                assert pool.publish(PublishTags(name, many)) > 9000
            assert pool.page_to_mend() is None
        for calls in itertools.count():  # a busy machine has less done by each
            pool.upkeep()
            if all(pool._pages[name].has_room_again for name in names):
                break
            assert calls < 10_000
        pool.forget_namespace(ForgetNamespace(names[0]))
        turns = [pool.page_to_mend() for _ in range(4)]
        assert sorted(filter(None, turns[:2])) == sorted(filter(None, turns[2:])) == names[1:]
        pool.retract(RetractTags(names[1], many))  # nothing of it is left to be mended
        assert [pool.page_to_mend() for _ in range(3)] == [names[2]] * 3
        assert list(pool._spilled_pages) == names[2:]


def test_the_reserve_is_had_back_some_time_after_there_is_memory_again(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(orders.config(shared_directory)) as opened_pool:
        assert opened_pool._reserve.whole
        opened_pool._reserve.let_go()
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", refuse)
            opened_pool.upkeep()
        for _ in range(pool_module.REFILL_PIECES):
            opened_pool.upkeep()
            assert not opened_pool._reserve.whole
        opened_pool.upkeep()
        assert opened_pool._reserve.whole


def test_opening_a_namespace_again_keeps_its_page_and_fields(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        fd = pool.page_fd(orders.NAMESPACE)
        pool.open_namespace(OpenNamespace(orders.NAMESPACE, orders.spec(), 512), {})
        assert pool.page_fd(orders.NAMESPACE) == fd
        assert pool.namespace_fields(orders.NAMESPACE) == {"model": "tiny"}
    assert len((config.directory / "registry.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pool_bytes": 4096}, "less than one extent"),
        ({"extent_bytes": 5000}, "multiple of 4096"),
        ({"extent_bytes": 0}, "multiple of 4096"),
        ({"threads": 0}, "threads"),
        ({"mover_kill_deadline_s": -1.0}, "mover_kill_deadline_s"),
        ({"pool_bytes": 1 << 40, "extent_bytes": 4096}, "raise extent_bytes"),
        ({"pool_bytes": 1 << 43, "extent_bytes": 64 << 20}, "less than 8 TiB"),
    ],
)
def test_an_impossible_configuration_is_refused(values: dict[str, int], said: str) -> None:
    possible = {"pool_bytes": 1 << 30, "extent_bytes": 1 << 20}
    with pytest.raises(PoolError, match=said):
        PoolConfig(Path("/nowhere"), **{**possible, **values})  # type: ignore[arg-type]


def test_when_a_block_was_last_used_is_read_back_and_does_not_make_it_doubtful(
    shared_directory: Path,
) -> None:
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([1, 2, 3, 4], orders.keys(4)))
        used = np.array([700, 5, 1 << STAMP_SHIFT], dtype=np.uint64)
        pool.write_stamps(WriteStamps(np.array([1, 2, 4]), used))
    with opened(config) as pool:
        row = orders.rows_of(list(pool.recovered()))[0]
        assert dict(zip(row.ordinals.tolist(), row.stamps.tolist(), strict=True)) == {
            1: 700, 2: 20, 3: 30, 4: (1 << STAMP_SHIFT) + 40,
        }  # fmt: skip
        assert pool.dropped_records == 0
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.write_free(orders.free([1]))
        pool.write_ready(orders.ready([1], orders.keys(1, 9)))
    with opened(config) as pool:
        assert orders.rows_of(list(pool.recovered()))[0].stamps.tolist()[:3] == [10, 20, 30]
