"""What every CopyEngine promises, of the one for GPUs: every byte compared on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd import native
from kvd.core.errors import InvalidArgument, LayoutMismatch
from kvd.core.events import JobKind
from kvd.mover.copy_engine import CopyStopped
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart
from kvd_proto.layout import NULL_ENGINE_BLOCK
from tests.contract.test_copy_engine_contract import part, spread_group
from tests.gpu.cuda_bench import EXTENT_BYTES, EXTENTS, Workshop, bench_of, workshop_of
from tests.gpu.driver import Driver, Exporter

NULL = NULL_ENGINE_BLOCK
BLOCKS = 12


@pytest.fixture
def workshop(driver: Driver, exporter: Exporter) -> Iterator[Workshop]:
    with workshop_of(driver, exporter) as shop:
        yield shop


def layers_apart() -> tuple[list[int], tuple[GroupMap, ...]]:
    """vLLM's: a tensor per layer, all its K before all its V, each tensor a memory."""
    fragments = tuple(
        FragmentSpec(layer, half * BLOCKS * 256, 256, 256)
        for layer in range(3)
        for half in range(2)
    )
    return [2 * BLOCKS * 256] * 3, (GroupMap(BLOCKS, 1, 6 * 256, fragments),)


def blocks_across_layers() -> tuple[list[int], tuple[GroupMap, ...]]:
    """One tensor, each block in one piece of it."""
    return [BLOCKS * 4096], (GroupMap(BLOCKS, 1, 4096, (FragmentSpec(0, 0, 4096, 4096),)),)


def latent() -> tuple[list[int], tuple[GroupMap, ...]]:
    """MLA's: one latent vector a token, its width no power of two."""
    size = 576 * 2
    fragments = tuple(FragmentSpec(layer, 0, size, size) for layer in range(2))
    return [BLOCKS * size] * 2, (GroupMap(BLOCKS, 1, 2 * size, fragments),)


def two_groups() -> tuple[list[int], tuple[GroupMap, ...]]:
    """Groups of different block bytes, and of different numbers of engine blocks to one."""
    full = GroupMap(
        BLOCKS, 2, 2 * 640, (FragmentSpec(0, 0, 512, 512), FragmentSpec(1, 0, 128, 128))
    )
    window = GroupMap(BLOCKS, 4, 4 * 96, (FragmentSpec(2, 64, 96, 96),))
    return [BLOCKS * 512, BLOCKS * 128, 64 + BLOCKS * 96], (window, full)


def odd_strides() -> tuple[list[int], tuple[GroupMap, ...]]:
    """Padding between blocks, and two tensors interleaved."""
    fragments = (
        FragmentSpec(0, 8, 1000, 488),
        FragmentSpec(0, 504, 1000, 496),
        FragmentSpec(1, 40, 264, 136),
    )
    return [BLOCKS * 1000 + 16, BLOCKS * 264 + 40], (GroupMap(BLOCKS, 1, 1120, fragments),)


Layout = Callable[[], tuple[list[int], tuple[GroupMap, ...]]]
LAYOUTS: list[Layout] = [layers_apart, blocks_across_layers, latent, two_groups, odd_strides]
BOTH = pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])
PATHS = pytest.mark.parametrize("warm", [True, False], ids=["pinned", "staged"])


def scattered(group: GroupMap, number: int) -> LocatedPart:
    """Some of the group's blocks: neighbours, others, out of order, and one part of nulls."""
    per = group.blocks_per_block
    ids = [3, 4, 5, 9, 1, 0, BLOCKS - 1, NULL, 7, 8, 2, 6]
    rows = [ids[at : at + per] for at in range(0, len(ids), per)]
    slots = [2, 3, 4, 11, 0, 7, 8, 12, 13, 5, 9, 1][: len(rows)]
    places = [(2 if n < 3 else n % EXTENTS, s * group.part_bytes) for n, s in enumerate(slots)]
    return part(number, places, rows)


@PATHS
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.__name__ for layout in LAYOUTS])
@pytest.mark.parametrize("by", ["library", "numpy"])
def test_blocks_land_in_their_places_and_nowhere_else(
    workshop: Workshop,
    layout: Layout,
    kind: JobKind,
    warm: bool,
    by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by == "numpy":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_not())
    region_bytes, groups = layout()
    with bench_of(workshop, workshop.config(region_bytes, groups)) as bench:
        if warm:
            bench.warm()
        for number, group in enumerate(groups):
            bench.copy(kind, scattered(group, number))
            bench.check()
        gpu = bench.engine.facts.gpu
        assert gpu is not None
        assert (gpu.staged_bytes == 0) == warm
        assert gpu.registered_bytes == (EXTENTS * EXTENT_BYTES if warm else 0)


@PATHS
@BOTH
def test_exported_physical_memory_is_copied_as_well(
    workshop: Workshop, kind: JobKind, warm: bool
) -> None:
    region_bytes, groups = layers_apart()
    with bench_of(workshop, workshop.vmm_config(region_bytes, groups)) as bench:
        if warm:
            bench.warm()
        assert bench.engine.facts.transport == "cuda-vmm"
        bench.copy(kind, scattered(groups[0], 0))
        bench.check()


@PATHS
@BOTH
def test_null_blocks_are_zeros_when_stored_and_untouched_when_loaded(
    workshop: Workshop, kind: JobKind, warm: bool
) -> None:
    group = spread_group(fragments=2, words=2, blocks=9, per_block=4)
    blocks = [[NULL, NULL, 3, 4], [5, NULL, NULL, 8], [NULL] * 4, [6, 7, 0, NULL]]
    moved = part(0, [(0, 0), (0, 128), (0, 256), (1, 512)], blocks)
    with bench_of(workshop, workshop.config([2 * 9 * 16], (group,))) as bench:
        if warm:
            bench.warm()
        # So that buffers on the way hold something else than zeros.
        bench.copy(kind, part(0, [(2, 128 * n) for n in range(2)], [[0, 1, 2, 3], [5, 6, 7, 8]]))
        bench.copy(kind, moved)
        bench.check()


@BOTH
def test_a_staging_buffer_of_one_slot_is_filled_again_only_when_its_bytes_are_through(
    workshop: Workshop, kind: JobKind, driver: Driver
) -> None:
    region_bytes, groups = layers_apart()
    workshop.gpu = replace(workshop.gpu, staging_bytes=8)  # a slot is the least there is
    with bench_of(workshop, workshop.config(region_bytes, groups)) as bench:
        if driver.is_fake:
            driver.inject("latency", microseconds=5000)
        bench.copy(kind, scattered(groups[0], 0).rows(slice(0, 6)))
        bench.check()


@PATHS
def test_an_empty_part_moves_nothing(workshop: Workshop, warm: bool) -> None:
    group = spread_group(fragments=1, words=1, blocks=2)
    with bench_of(workshop, workshop.config([16], (group,))) as bench:
        if warm:
            bench.warm()
        for kind in JobKind:
            bench.copy(kind, part(0, [], []).rows(slice(0, 0)))
        bench.check()


@BOTH
def test_copies_cut_into_many_small_pieces_are_whole(
    workshop: Workshop, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.mover.cuda import engine

    monkeypatch.setattr(engine, "MAX_PIECE_BYTES", 200)
    monkeypatch.setattr(engine, "_MAX_SLAB_BYTES", 4000)
    region_bytes, groups = layers_apart()
    with bench_of(workshop, workshop.config(region_bytes, groups)) as bench:
        bench.copy(kind, scattered(groups[0], 0))
        bench.warm()
        bench.copy(kind, scattered(groups[0], 0))
        bench.check()


def test_what_one_rank_stored_every_rank_loads_into_its_own_memory(
    workshop: Workshop, driver: Driver
) -> None:
    region_bytes, groups = latent()
    stored = part(0, [(0, 0), (1, 4608), (2, 2304)], [[4], [5], [1]])
    loaded = part(0, [(0, 0), (1, 4608), (2, 2304)], [[0], [11], [7]])
    with bench_of(workshop, workshop.config(region_bytes, groups)) as writer:
        writer.warm()
        writer.copy(JobKind.STORE, stored)
        pool = [workshop.extent(n).copy() for n in range(EXTENTS)]
    for _ in range(2):
        reader = Exporter(driver)
        with (
            workshop_of(driver, reader) as shop,
            bench_of(shop, shop.config(region_bytes, groups)) as bench,
        ):
            bench.warm()
            for number, bytes_stored in enumerate(pool):
                shop.extent(number)[:] = bench.pool[number][:] = bytes_stored
            bench.copy(JobKind.LOAD, loaded)
            bench.check()
        reader.close()


@st.composite
def _copies(draw: st.DrawFn) -> tuple[list[int], GroupMap, LocatedPart]:
    blocks = draw(st.integers(1, 10))
    per_block = draw(st.integers(1, 3))
    regions = [0] * draw(st.integers(1, 2))
    fragments = []
    for words in draw(st.lists(st.integers(1, 5), min_size=1, max_size=6)):
        region = draw(st.integers(0, len(regions) - 1))
        stride = 8 * (words + draw(st.integers(0, 2)))
        base = regions[region] + 8 * draw(st.integers(0, 1))
        fragments.append(FragmentSpec(region, base, stride, 8 * words))
        regions[region] = base + stride * blocks
    size = sum(f.bytes for f in fragments) * per_block
    group = GroupMap(blocks, per_block, size, tuple(fragments))
    count = draw(st.integers(1, 6))
    slots = st.tuples(st.integers(0, EXTENTS - 1), st.integers(0, 9))
    taken = draw(st.lists(slots, min_size=count, max_size=count, unique=True))
    # A load must not write one engine block twice: which bytes win would be chance.
    ids = draw(st.permutations([*range(blocks), *[NULL] * (count * per_block)]))
    rows = [list(ids[n * per_block : (n + 1) * per_block]) for n in range(count)]
    places = [(extent, slot * size) for extent, slot in taken]
    return [max(8, region) for region in regions], group, part(0, places, rows)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(_copies(), st.booleans())
def test_any_layout_and_any_blocks_move_exactly_their_bytes_both_ways(
    workshop: Workshop, copy: tuple[list[int], GroupMap, LocatedPart], warm: bool
) -> None:
    region_bytes, group, moved = copy
    with bench_of(workshop, workshop.config(region_bytes, (group,))) as bench:
        if warm:
            bench.warm()
        bench.copy(JobKind.STORE, moved)
        bench.copy(JobKind.LOAD, moved)
        bench.check()
    workshop.release()


@PATHS
def test_a_copy_stops_between_pieces_and_leaves_whole_ones(
    workshop: Workshop, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.mover.cuda import engine

    monkeypatch.setattr(engine, "MAX_PIECE_BYTES", 4096)
    region_bytes, groups = blocks_across_layers()
    workshop.gpu = replace(workshop.gpu, staging_bytes=4096)
    places = [(0, 4096 * n) for n in (1, 5, 9)]
    asked = iter([True, True, True, False])  # with its turn, and before each piece
    with bench_of(workshop, workshop.config(region_bytes, groups)) as bench:
        if warm:
            bench.warm()
        moved = part(0, places, [[2], [4], [6]])
        with pytest.raises(CopyStopped):
            bench.engine.copy(JobKind.STORE, moved, lambda: next(asked))
        bench.expect(JobKind.STORE, moved.rows(slice(0, 2)))
        bench.check()
        bench.copy(JobKind.STORE, moved)
        bench.check()


@PATHS
def test_a_copy_of_many_small_fragments_is_planned_in_parts_and_stops_between_them(
    workshop: Workshop, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.mover.cuda import engine

    region_bytes, groups = layers_apart()
    monkeypatch.setattr(engine, "MAX_SLAB_STRETCHES", 2 * len(groups[0].fragments))
    places = [(0, groups[0].part_bytes * n) for n in (1, 5, 9)]
    asked = iter([True, True, False])  # with its turn, and before each part
    with bench_of(workshop, workshop.config(region_bytes, groups)) as bench:
        if warm:
            bench.warm()
        moved = part(0, places, [[2], [4], [6]])
        with pytest.raises(CopyStopped):
            bench.engine.copy(JobKind.STORE, moved, lambda: next(asked))
        bench.expect(JobKind.STORE, moved.rows(slice(0, 2)))
        bench.check()
        bench.copy(JobKind.STORE, moved)
        bench.check()


def test_an_extent_keeps_its_bytes_over_closing_and_opening(workshop: Workshop) -> None:
    region_bytes, groups = blocks_across_layers()
    with bench_of(workshop, workshop.config(region_bytes, groups)) as bench:
        bench.warm()
        bench.copy(JobKind.STORE, part(0, [(1, 4096)], [[2]]))
        bench.engine.close_extent(1)
        bench.engine.open_extent(1)
        bench.copy(JobKind.LOAD, part(0, [(1, 4096)], [[5]]))
        bench.engine.warm_extent(1, lambda: True)
        bench.copy(JobKind.LOAD, part(0, [(1, 4096)], [[7]]))
        bench.check()


def test_an_open_extents_bytes_are_those_that_copies_read_and_write(workshop: Workshop) -> None:
    region_bytes, groups = blocks_across_layers()
    with bench_of(workshop, workshop.config(region_bytes, groups)) as bench:
        bench.engine.close_extent(2)
        shown = bench.engine.open_extent(2)
        assert len(shown) == EXTENT_BYTES
        bench.warm()
        bench.copy(JobKind.STORE, part(0, [(2, 8192)], [[3]]))
        assert shown[8192:12288].tobytes() == bench.device[0][512 + 3 * 4096 :][:4096].tobytes()
        shown[8192:12288] = bench.pool[2][8192:12288] = 7
        bench.copy(JobKind.LOAD, part(0, [(2, 8192)], [[0]]))
        bench.check()
        del shown


@pytest.mark.parametrize(
    ("fragment", "field"),
    [
        (FragmentSpec(1, 0, 16, 16), "groups[0].fragments[0].memory"),
        (FragmentSpec(0, 4, 16, 16), "groups[0].fragments[0].base"),
        (FragmentSpec(0, 0, 8, 16), "groups[0].fragments[0].stride"),
        (FragmentSpec(0, 8, 16, 16), "groups[0].fragments[0].base"),
    ],
)
def test_a_fragment_outside_its_memory_is_refused_by_name(
    workshop: Workshop, fragment: FragmentSpec, field: str
) -> None:
    config = workshop.config([64], (GroupMap(4, 1, 16, (fragment,)),))
    with pytest.raises(InvalidArgument) as refusal, bench_of(workshop, config):
        pass
    assert refusal.value.field == field


def test_fragments_that_dont_add_up_to_a_part_are_a_layout_mismatch(workshop: Workshop) -> None:
    config = workshop.config([64], (GroupMap(4, 2, 40, (FragmentSpec(0, 0, 16, 16),)),))
    with pytest.raises(LayoutMismatch, match="add up to 32 bytes"), bench_of(workshop, config):
        pass
