"""What every CopyEngine promises, checked on whole memories: every byte that a copy must not
touch is a canary."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd import native
from kvd.core.errors import InvalidArgument, LayoutMismatch
from kvd.core.events import JobKind
from kvd.core.keys import MoverId
from kvd.mover import ranges, streams
from kvd.mover.checksums import part_checksums
from kvd.mover.copy_engine import CopyEngine, CopyStopped
from kvd.mover.host_shm import HostSharedMemory
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart, MoverConfig, Region
from kvd.processes.mappings import ExtentFiles
from kvd_proto.layout import NULL_ENGINE_BLOCK
from tests.fakes.copy_engine import FakeCopyEngine

EXTENT_BYTES = 16384
EXTENTS = 3
Bytes = npt.NDArray[np.uint8]


class Bench(Protocol):
    """An engine under test, and a way to its memories past it."""

    @property
    def engine(self) -> CopyEngine: ...
    def memory(self, region: int) -> Bytes: ...
    def extent(self, number: int) -> Bytes: ...


class FakeBench:
    def __init__(self, config: MoverConfig) -> None:
        self.fake = FakeCopyEngine(config)
        self.engine: CopyEngine = self.fake

    def memory(self, region: int) -> Bytes:
        return np.frombuffer(self.fake.memories[region], dtype=np.uint8)

    def extent(self, number: int) -> Bytes:
        return np.frombuffer(self.fake.extents[number], dtype=np.uint8)


class HostBench:
    library: native.Library | None = None

    def __init__(self, config: MoverConfig) -> None:
        self.config = config
        self.engine = HostSharedMemory(config, self.library)

    def memory(self, region: int) -> Bytes:
        where = self.config.regions[region]
        return _WholeFile(f"/proc/self/fd/{where.fd}", where.offset, where.bytes).view

    def extent(self, number: int) -> Bytes:
        files = self.config.extents
        return _WholeFile(str(files.path(number)), 0, files.extent_bytes).view


class NativeBench(HostBench):
    library = native.library()


class _WholeFile:
    def __init__(self, path: str, offset: int, size: int) -> None:
        self.view: Bytes = np.memmap(path, dtype=np.uint8, mode="r+", offset=offset, shape=(size,))


@dataclass
class Workshop:
    """Builds configurations over files that are removed afterwards."""

    directory: Path
    bench: type[FakeBench | HostBench]
    fds: list[int]

    @property
    def extents(self) -> ExtentFiles:
        return ExtentFiles(self.directory / "extents", 0, EXTENT_BYTES)

    def config(self, region_bytes: list[int], groups: tuple[GroupMap, ...]) -> MoverConfig:
        regions = []
        for number, size in enumerate(region_bytes):
            fd = os.memfd_create(f"engine-{number}")
            self.fds.append(fd)
            offset = 8 * number  # regions need not begin on a page
            os.ftruncate(fd, offset + size)
            regions.append(Region(fd, offset, size))
        return MoverConfig(MoverId(1), tuple(regions), groups, self.extents)

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


@pytest.fixture(params=[FakeBench, HostBench, NativeBench], ids=["fake", "host", "native"])
def workshop(request: pytest.FixtureRequest) -> Iterator[Workshop]:
    if request.param is NativeBench and NativeBench.library is None:
        pytest.skip(f"no native library: {native.why_not()}")
    directory = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm"))
    (directory / "extents").mkdir()
    shop = Workshop(directory, request.param, [])
    for number in range(EXTENTS):
        with shop.extents.path(number).open("wb") as file:
            file.truncate(EXTENT_BYTES)
    yield shop
    shop.close_fds()
    shutil.rmtree(directory)


def spread_group(fragments: int, words: int, blocks: int, per_block: int = 1) -> GroupMap:
    """Fragments that each lie in a tensor of their own, all in region 0, as layers do."""
    size = words * 8
    specs = tuple(FragmentSpec(0, f * blocks * size, size, size) for f in range(fragments))
    return GroupMap(blocks, per_block, fragments * size * per_block, specs)


def part(group: int, places: list[tuple[int, int]], blocks: list[list[int]]) -> LocatedPart:
    return LocatedPart(
        group,
        np.array([p[0] for p in places], dtype=np.uint32),
        np.array([p[1] for p in places], dtype=np.uint64),
        np.array(blocks, dtype=np.uint32),
    )


def expected(
    kind: JobKind, config: MoverConfig, moved: LocatedPart, state: tuple[list[Bytes], list[Bytes]]
) -> int:
    """Apply the copy to plain copies of all memory, fragment by fragment; bytes moved."""
    memories, extents = state
    group = config.groups[moved.group]
    total = 0
    for row, extent in enumerate(moved.extents.tolist()):
        at = int(moved.offsets[row])
        for block in moved.engine_blocks[row].tolist():
            for f in group.fragments:
                slot = extents[extent][at : at + f.bytes]
                at += f.bytes
                if block == NULL_ENGINE_BLOCK:
                    if kind is JobKind.STORE:
                        slot[:] = 0
                    continue
                start = f.base + block * f.stride
                piece = memories[f.region][start : start + f.bytes]
                if kind is JobKind.STORE:
                    slot[:] = piece
                else:
                    piece[:] = slot
                total += f.bytes
    return total


def check_copy(
    workshop: Workshop,
    config: MoverConfig,
    kind: JobKind,
    moved: LocatedPart,
    *,
    summing: bool = True,
) -> None:
    """Fill everything with noise, copy, and compare every byte on both sides.

    summing: by what sums up as it copies, where the engine can; then the sums, too.
    """
    bench: Bench = workshop.bench(config)
    for extent in range(EXTENTS):
        bench.engine.open_extent(extent)
    noise = np.random.default_rng(7)
    views = (
        [bench.memory(r) for r in range(len(config.regions))],
        [bench.extent(e) for e in range(EXTENTS)],
    )
    for view in (*views[0], *views[1]):
        view[:] = noise.integers(1, 256, len(view), dtype=np.uint8)
    model = ([v.copy() for v in views[0]], [v.copy() for v in views[1]])
    total = expected(kind, config, moved, model)
    if isinstance(bench, NativeBench) and summing:
        copied, sums = bench.engine.copy_and_sum(kind, moved, lambda: True)
        size = config.groups[moved.group].part_bytes
        slots = part_checksums(moved, size, lambda number: model[1][number], lambda: True)
        assert sums.tolist() == slots.tolist()
    else:
        copied = bench.engine.copy(kind, moved, lambda: True)
    assert copied == total
    for side, (real, plain) in zip("ep", zip(views, model, strict=True), strict=True):
        for number, (seen, wanted) in enumerate(zip(real, plain, strict=True)):
            assert np.array_equal(seen, wanted), f"{'engine' if side == 'e' else 'pool'} {number}"
    del views
    bench.engine.close()


BOTH = pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])


@BOTH
def test_scattered_blocks_land_in_their_places_and_nowhere_else(
    workshop: Workshop, kind: JobKind
) -> None:
    group = spread_group(fragments=6, words=4, blocks=12)
    config = workshop.config([6 * 12 * 32], (group,))
    places = [(0, 0), (2, 192 * 7), (1, 192 * 3), (0, 192 * 40)]
    check_copy(workshop, config, kind, part(0, places, [[11], [0], [5], [7]]))


@BOTH
def test_neighbours_on_both_sides_merge_without_a_byte_out_of_place(
    workshop: Workshop, kind: JobKind
) -> None:
    group = spread_group(fragments=3, words=2, blocks=16)
    config = workshop.config([3 * 16 * 16], (group,))
    places = [(1, 48 * n) for n in range(5)] + [(2, 48 * n) for n in range(5)]
    blocks = [[3], [4], [5], [6], [9], [10], [11], [12], [13], [15]]
    check_copy(workshop, config, kind, part(0, places, blocks))


@BOTH
def test_consecutive_ids_in_different_extents_stay_apart(workshop: Workshop, kind: JobKind) -> None:
    group = spread_group(fragments=2, words=2, blocks=8)
    config = workshop.config([2 * 8 * 16], (group,))
    check_copy(workshop, config, kind, part(0, [(0, 0), (1, 32), (2, 64)], [[3], [4], [5]]))


@BOTH
def test_a_long_run_is_cut_and_still_whole(
    workshop: Workshop, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = spread_group(fragments=2, words=2, blocks=12)
    config = workshop.config([2 * 12 * 16], (group,))
    places = [(1, 32 * n) for n in range(11)]
    for most in (100, 40, 32, 24, 16, 8):  # three blocks of 32 bytes, and down to a word
        monkeypatch.setattr(ranges, "MAX_RANGE_BYTES", most)
        monkeypatch.setattr(streams, "MAX_CALL_BYTES", most)
        check_copy(workshop, config, kind, part(0, places, [[n + 1] for n in range(11)]))


@BOTH
def test_null_blocks_are_zeros_when_stored_and_untouched_when_loaded(
    workshop: Workshop, kind: JobKind
) -> None:
    group = spread_group(fragments=2, words=2, blocks=9, per_block=4)
    config = workshop.config([2 * 9 * 16], (group,))
    null = NULL_ENGINE_BLOCK
    blocks = [[null, null, 3, 4], [5, null, null, 8], [null, null, null, null], [6, 7, 0, null]]
    places = [(0, 0), (0, 128), (0, 256), (1, 512)]
    check_copy(workshop, config, kind, part(0, places, blocks))


@BOTH
def test_an_empty_part_moves_nothing(workshop: Workshop, kind: JobKind) -> None:
    group = spread_group(fragments=1, words=1, blocks=2)
    config = workshop.config([16], (group,))
    empty = LocatedPart(
        0, np.zeros(0, np.uint32), np.zeros(0, np.uint64), np.zeros((0, 1), np.uint32)
    )
    check_copy(workshop, config, kind, empty)


@st.composite
def _copies(draw: st.DrawFn) -> tuple[list[int], GroupMap, LocatedPart]:
    blocks = draw(st.integers(1, 10))
    per_block = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    same = draw(st.booleans())
    regions = [0] * draw(st.integers(1, 2))
    fragments = []
    for number, drawn in enumerate(sizes):
        words = sizes[0] if same else drawn
        region = draw(st.integers(0, len(regions) - 1))
        gap = 8 * draw(st.integers(0, 1))
        stride = 8 * words + 8 * draw(st.integers(0, 2))
        if number and draw(st.booleans()):  # interleave with the one before, as K beside V
            stride = 8 * (words + sizes[0] + 4)
        base = regions[region] + gap
        fragments.append(FragmentSpec(region, base, stride, 8 * words))
        regions[region] = base + stride * blocks
    engine_block = sum(f.bytes for f in fragments)
    group = GroupMap(blocks, per_block, engine_block * per_block, tuple(fragments))
    slots = EXTENT_BYTES // group.part_bytes
    count = draw(st.integers(1, min(8, slots)))
    taken = draw(
        st.lists(
            st.tuples(st.integers(0, EXTENTS - 1), st.integers(0, min(slots, 12) - 1)),
            min_size=count,
            max_size=count,
            unique=True,
        )
    )
    # A load must not write one engine block twice: which bytes win would be chance.
    ids = draw(st.permutations([*range(blocks), *[NULL_ENGINE_BLOCK] * (count * per_block)]))
    rows = [list(ids[i * per_block : (i + 1) * per_block]) for i in range(count)]
    if draw(st.booleans()):
        rows = [sorted(row) for row in sorted(rows)]
        taken = sorted(taken)
    places = [(extent, slot * group.part_bytes) for extent, slot in taken]
    return [max(8, size) for size in regions], group, part(0, places, rows)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(_copies(), st.sampled_from(list(JobKind)), st.booleans())
def test_any_layout_and_any_blocks_move_exactly_their_bytes(
    workshop: Workshop,
    copy: tuple[list[int], GroupMap, LocatedPart],
    kind: JobKind,
    summing: bool,
) -> None:
    region_bytes, group, moved = copy
    try:
        config = workshop.config(region_bytes, (group,))
        check_copy(workshop, config, kind, moved, summing=summing)
    finally:
        workshop.close_fds()


def test_a_copy_stops_between_ranges_when_told_to(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_CALL_BYTES", 16)
    group = spread_group(fragments=1, words=2, blocks=8)
    config = workshop.config([8 * 16], (group,))
    bench: Bench = workshop.bench(config)
    bench.engine.open_extent(0)
    asked = iter([True, True, False])
    moved = part(0, [(0, 512), (0, 0), (0, 256)], [[1], [5], [3]])
    bench.memory(0)[:] = 9
    with pytest.raises(CopyStopped):
        bench.engine.copy(JobKind.STORE, moved, lambda: next(asked))
    assert bench.extent(0)[512:528].tolist() == [9] * 16
    assert bench.extent(0)[:16].tolist() == [9] * 16
    assert not bench.extent(0)[256:272].any()
    bench.engine.close()


def test_an_extent_keeps_its_bytes_over_closing_and_opening(workshop: Workshop) -> None:
    group = spread_group(fragments=2, words=2, blocks=4)
    config = workshop.config([128], (group,))
    bench: Bench = workshop.bench(config)
    bench.engine.open_extent(1)
    bench.memory(0)[:] = np.arange(128, dtype=np.uint8)
    bench.engine.copy(JobKind.STORE, part(0, [(1, 64)], [[2]]), lambda: True)
    bench.engine.close_extent(1)
    bench.engine.open_extent(1)
    bench.memory(0)[:] = 0
    bench.engine.copy(JobKind.LOAD, part(0, [(1, 64)], [[0]]), lambda: True)
    assert bench.memory(0)[:16].tolist() == list(range(32, 48))
    assert bench.memory(0)[64:80].tolist() == list(range(96, 112))
    bench.engine.close()


def test_an_open_extents_bytes_are_those_that_copies_read_and_write(workshop: Workshop) -> None:
    config = workshop.config([64], (spread_group(fragments=1, words=2, blocks=4),))
    bench: Bench = workshop.bench(config)
    shown = bench.engine.open_extent(2)
    assert len(shown) == EXTENT_BYTES
    bench.memory(0)[:] = np.arange(64, dtype=np.uint8)
    bench.engine.copy(JobKind.STORE, part(0, [(2, 32)], [[3]]), lambda: True)
    assert shown[32:48].tolist() == list(range(48, 64))
    shown[32:48] = 7
    bench.engine.copy(JobKind.LOAD, part(0, [(2, 32)], [[0]]), lambda: True)
    assert bench.memory(0)[:16].tolist() == [7] * 16
    del shown
    bench.engine.close_extent(2)
    bench.engine.close()


def test_warming_changes_no_byte_and_stops_when_told_to(workshop: Workshop) -> None:
    config = workshop.config([4096], (spread_group(fragments=1, words=512, blocks=1),))
    bench: Bench = workshop.bench(config)
    bench.engine.open_extent(0)
    bench.extent(0)[:] = 5
    bench.memory(0)[:] = 6
    bench.engine.warm_extent(0, lambda: True)
    bench.engine.warm_memory(lambda: True)
    bench.engine.warm_extent(0, lambda: False)
    bench.engine.warm_memory(lambda: False)
    assert (bench.extent(0) == 5).all()
    assert (bench.memory(0) == 6).all()
    bench.engine.close()


@pytest.mark.parametrize(
    ("fragment", "field"),
    [
        (FragmentSpec(1, 0, 16, 16), "groups[0].fragments[0].memory"),
        (FragmentSpec(0, 4, 16, 16), "groups[0].fragments[0].base"),
        (FragmentSpec(0, 0, 12, 8), "groups[0].fragments[0].stride"),
        (FragmentSpec(0, 0, 16, 0), "groups[0].fragments[0].bytes"),
        (FragmentSpec(0, 0, 8, 16), "groups[0].fragments[0].stride"),
        (FragmentSpec(0, 8, 16, 16), "groups[0].fragments[0].base"),
    ],
)
def test_a_fragment_outside_its_memory_is_refused_by_name(
    workshop: Workshop, fragment: FragmentSpec, field: str
) -> None:
    config = workshop.config([64], (GroupMap(4, 1, 16, (fragment,)),))
    with pytest.raises(InvalidArgument) as refusal:
        workshop.bench(config)
    assert refusal.value.field == field


def test_fragments_that_dont_add_up_to_a_part_are_a_layout_mismatch(workshop: Workshop) -> None:
    group = GroupMap(4, 2, 40, (FragmentSpec(0, 0, 16, 16),))
    with pytest.raises(LayoutMismatch, match="add up to 32 bytes, but a block's part is 40"):
        workshop.bench(workshop.config([64], (group,)))


def test_a_part_that_is_larger_than_an_extent_says_what_to_raise(workshop: Workshop) -> None:
    part = EXTENT_BYTES + 8
    group = GroupMap(1, 1, part, (FragmentSpec(0, 0, part, part),))
    said = f"does not fit an extent of {EXTENT_BYTES}: raise extent_bytes, to {2 * EXTENT_BYTES} or"
    with pytest.raises(LayoutMismatch, match=said):
        workshop.bench(workshop.config([part], (group,)))
