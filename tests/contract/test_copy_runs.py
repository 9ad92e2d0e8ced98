"""The copies that a part becomes: every byte exactly once, in as few runs as its layout allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.mover.cuda.runs import Runs, null_ranges, runs_of
from kvd.mover.layout import WORD, FragmentSpec, GroupMap, LocatedPart
from kvd_proto.layout import NULL_ENGINE_BLOCK

REGION_BASES = (0x7F00_0000_0000, 0x7F80_0000_0000, 0xFFFF_8000_0000_0000)
MIB = 1 << 20


def host_base(extent: int) -> int:
    return 0x7000_0000_0000 + extent * (1 << 30)


def group_of(*fragments: FragmentSpec, num_blocks: int = 64, blocks_per_block: int = 1) -> GroupMap:
    part_bytes = blocks_per_block * sum(fragment.bytes for fragment in fragments)
    return GroupMap(num_blocks, blocks_per_block, part_bytes, fragments)


def part_of(
    group: GroupMap, engine_blocks: list[int], slots: list[int], extents: list[int] | None = None
) -> LocatedPart:
    """A part whose slots are counted from their extents' beginnings."""
    return LocatedPart(
        0,
        np.array(extents or [0] * len(slots), dtype=np.uint32),
        np.array(slots, dtype=np.uint64) * np.uint64(group.part_bytes),
        np.array(engine_blocks, dtype=np.uint32).reshape(len(slots), group.blocks_per_block),
    )


def runs_for(group: GroupMap, part: LocatedPart) -> Runs:
    return runs_of(part, group, host_base, REGION_BASES)


def words_by_loop(group: GroupMap, part: LocatedPart) -> Counter[tuple[int, int]]:
    """Host and device address of every word that a copy of the part moves, fragment by fragment."""
    words: Counter[tuple[int, int]] = Counter()
    for row, engine_blocks in enumerate(part.engine_blocks.tolist()):
        host = host_base(int(part.extents[row])) + int(part.offsets[row])
        for block in engine_blocks:
            for fragment in group.fragments:
                device = REGION_BASES[fragment.region] + fragment.base + block * fragment.stride
                if block != NULL_ENGINE_BLOCK:
                    words.update((host + at, device + at) for at in range(0, fragment.bytes, WORD))
                host += fragment.bytes
    return words


def words_of(runs: Runs) -> Counter[tuple[int, int]]:
    """Likewise for runs, stretch by stretch."""
    words: Counter[tuple[int, int]] = Counter()
    rows = zip(
        runs.host.tolist(),
        runs.device.tolist(),
        runs.host_pitch.tolist(),
        runs.device_pitch.tolist(),
        runs.width.tolist(),
        runs.height.tolist(),
        strict=True,
    )
    for host, device, host_pitch, device_pitch, width, height in rows:
        for row in range(height):
            words.update(
                (host + row * host_pitch + at, device + row * device_pitch + at)
                for at in range(0, width, WORD)
            )
    return words


# -- whatever the layout --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    group: GroupMap
    part: LocatedPart


@st.composite
def fragment_lists(draw: st.DrawFn) -> list[FragmentSpec]:
    """Fragments in even steps, as engines lay them, with anything between the steps."""
    fragments: list[FragmentSpec] = []
    for _ in range(draw(st.integers(1, 3))):
        region = draw(st.integers(0, 2))
        width = draw(st.integers(1, 3))
        inner, outer = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        inner_step = width + draw(st.integers(0, 2))
        outer_step = inner * inner_step + draw(st.sampled_from([0, 0, 5]))
        stride = draw(st.sampled_from([width, width + 3, outer * outer_step]))
        base = draw(st.integers(0, 100))
        fragments += [
            FragmentSpec(
                region,
                WORD * (base + far * outer_step + near * inner_step),
                WORD * stride,
                WORD * width,
            )
            for far in range(outer)
            for near in range(inner)
        ]
    return fragments


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Blocks in stretches of adjacent ids and slots, some null."""
    per_slot = draw(st.integers(1, 3))
    group = group_of(*draw(fragment_lists()), blocks_per_block=per_slot)
    engine_blocks: list[int] = []
    extents: list[int] = []
    slots: list[int] = []
    for number in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 4))
        first = draw(st.integers(0, 40))
        ids = [first + at for at in range(count * per_slot)]
        for at in draw(st.sets(st.integers(0, len(ids) - 1), max_size=2)):
            ids[at] = NULL_ENGINE_BLOCK
        engine_blocks += ids
        extents += [draw(st.integers(0, 2))] * count
        slots += [10 * number + at for at in range(count)]
    return Case(group, part_of(group, engine_blocks, slots, extents))


@given(case=cases())
def test_runs_copy_every_byte_exactly_once_and_nothing_else(case: Case) -> None:
    runs = runs_for(case.group, case.part)
    words = words_by_loop(case.group, case.part)
    assert words_of(runs) == words
    assert runs.nbytes == WORD * words.total()


@given(case=cases())
def test_expanded_runs_are_the_same_copies(case: Case) -> None:
    host, device, width = runs_for(case.group, case.part).expand()
    assert words_of(Runs(host, device, width, width, width, np.ones_like(width))) == words_by_loop(
        case.group, case.part
    )


@given(case=cases(), most_words=st.integers(1, 40))
def test_pieces_are_the_same_copies_and_keep_their_bound(case: Case, most_words: int) -> None:
    runs = runs_for(case.group, case.part)
    pieces = list(runs.pieces(most_words * WORD + 3))
    assert sum(map(words_of, pieces), Counter()) == words_of(runs)
    assert all(0 < piece.nbytes <= most_words * WORD for piece in pieces)


@given(case=cases())
def test_a_single_stretch_has_its_width_for_pitch(case: Case) -> None:
    runs = runs_for(case.group, case.part)
    single = runs.height == 1
    assert (runs.host_pitch[single] == runs.width[single]).all()
    assert (runs.device_pitch[single] == runs.width[single]).all()


@given(case=cases())
def test_null_ranges_are_the_places_of_null_blocks_and_nothing_else(case: Case) -> None:
    block_bytes = case.group.engine_block_bytes
    expected: Counter[tuple[int, int]] = Counter()
    for row, engine_blocks in enumerate(case.part.engine_blocks.tolist()):
        for number, block in enumerate(engine_blocks):
            if block == NULL_ENGINE_BLOCK:
                first = int(case.part.offsets[row]) + number * block_bytes
                extent = int(case.part.extents[row])
                expected.update((extent, first + at) for at in range(0, block_bytes, WORD))
    found: Counter[tuple[int, int]] = Counter()
    for extent, offset, size in null_ranges(case.part, case.group):
        found.update((extent, offset + at) for at in range(0, size, WORD))
    assert found == expected


# -- layouts of engines ---------------------------------------------------------------------

PER_LAYER_BYTES = 4096


def per_layer(layers: int, num_blocks: int = 64) -> GroupMap:
    """A region per layer, that holds all keys and then all values."""
    half = num_blocks * PER_LAYER_BYTES
    return group_of(
        *(
            FragmentSpec(layer, kv * half, PER_LAYER_BYTES, PER_LAYER_BYTES)
            for layer in range(layers)
            for kv in range(2)
        ),
        num_blocks=num_blocks,
    )


def heights_and_widths(runs: Runs) -> list[tuple[int, int]]:
    return sorted(zip(runs.height.tolist(), runs.width.tolist(), strict=True))


def test_a_scattered_block_of_a_per_layer_layout_is_one_run_a_layer_for_keys_and_values() -> None:
    group = per_layer(layers=3)
    runs = runs_for(group, part_of(group, [7, 3], [0, 1]))
    assert heights_and_widths(runs) == [(2, PER_LAYER_BYTES)] * 6


def test_adjacent_blocks_of_a_per_layer_layout_are_one_run_a_half_layer() -> None:
    group = per_layer(layers=3)
    runs = runs_for(group, part_of(group, [5, 6, 7, 8], [2, 3, 4, 5]))
    assert heights_and_widths(runs) == [(4, PER_LAYER_BYTES)] * 6
    assert set(runs.host_pitch.tolist()) == {group.engine_block_bytes}
    assert set(runs.device_pitch.tolist()) == {PER_LAYER_BYTES}


def test_short_and_long_stretches_of_blocks_each_get_their_fewest_runs() -> None:
    group = group_of(*(FragmentSpec(0, 64 * at, 1024, 8) for at in range(4)))
    runs = runs_for(group, part_of(group, [9, 20, 21, 22, 23, 24], [0, 1, 2, 3, 4, 5]))
    assert heights_and_widths(runs) == [(4, 8), (5, 8), (5, 8), (5, 8), (5, 8)]


def test_adjacent_cross_layer_blocks_are_one_stretch() -> None:
    group = group_of(FragmentSpec(0, 0, MIB, MIB))
    runs = runs_for(group, part_of(group, [4, 5, 6], [1, 2, 3]))
    assert heights_and_widths(runs) == [(1, 3 * MIB)]


def test_blocks_padded_evenly_within_and_between_are_one_run() -> None:
    group = group_of(*(FragmentSpec(0, 128 * layer, 512, 64) for layer in range(4)))
    runs = runs_for(group, part_of(group, [4, 5, 6], [1, 2, 3]))
    assert heights_and_widths(runs) == [(12, 64)]


def test_blocks_are_not_joined_across_extents() -> None:
    group = group_of(FragmentSpec(0, 0, 4096, 4096))
    runs = runs_for(group, part_of(group, [4, 5], [1, 2], extents=[0, 1]))
    assert heights_and_widths(runs) == [(1, 4096)] * 2


def test_stretches_of_two_extents_stay_two_where_their_mappings_touch() -> None:
    group = group_of(FragmentSpec(0, 0, 4096, 4096))
    part = part_of(group, [4, 5], [0, 0], extents=[0, 1])
    runs = runs_of(part, group, lambda extent: 0x10000 + 4096 * extent, [0x900000])
    host, _, width = runs.expand()
    assert (host.tolist(), width.tolist()) == ([0x10000, 0x11000], [4096, 4096])


def test_a_large_part_of_scattered_blocks_has_as_many_stretches_as_fragments() -> None:
    fragments = [FragmentSpec(layer % 3, 10_000_000 * layer, 8192, 4096) for layer in range(64)]
    group = group_of(*fragments, num_blocks=4096)
    blocks = np.random.default_rng(5).permutation(2048) * 2
    part = part_of(group, blocks.tolist(), list(range(2048)))
    runs = runs_for(group, part)
    assert len(runs.expand()[0]) == 2048 * 64
    assert runs.nbytes == 2048 * group.part_bytes
    assert len(np.unique(runs.host)) == len(runs)


def test_no_blocks_are_no_runs() -> None:
    group = per_layer(layers=2)
    part = part_of(group, [], [])
    runs = runs_for(group, part)
    assert len(runs) == 0
    assert runs.nbytes == 0
    assert [len(column) for column in runs.expand()] == [0, 0, 0]
    assert list(runs.pieces(MIB)) == []
    assert null_ranges(part, group) == []


def test_nothing_but_null_blocks_is_no_runs() -> None:
    group = per_layer(layers=2)
    part = part_of(group, [NULL_ENGINE_BLOCK] * 2, [0, 1])
    assert len(runs_for(group, part)) == 0
    assert null_ranges(part, group) == [(0, 0, 2 * group.part_bytes)]


# -- pieces ---------------------------------------------------------------------------------


def run(width: int, height: int, pitch: int) -> Runs:
    values = (0x1000_0000, 0x7F00_0000_0000, width if height == 1 else pitch, pitch, width, height)
    return Runs(*(np.array([value], dtype=np.uint64) for value in values))


@pytest.mark.parametrize(
    ("whole", "most", "sizes"),
    [
        (run(100 * MIB, 1, 100 * MIB), 32 * MIB, [32 * MIB, 32 * MIB, 32 * MIB, 4 * MIB]),
        (run(MIB, 10, 3 * MIB), 4 * MIB, [4 * MIB, 4 * MIB, 2 * MIB]),
        (run(3 * MIB, 2, 5 * MIB), 2 * MIB, [2 * MIB, MIB, 2 * MIB, MIB]),
        (run(MIB, 10, 3 * MIB), 10 * MIB, [10 * MIB]),
    ],
)
def test_a_run_is_cut_between_stretches_where_that_is_enough(
    whole: Runs, most: int, sizes: list[int]
) -> None:
    assert [piece.nbytes for piece in whole.pieces(most)] == sizes
