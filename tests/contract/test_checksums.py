"""Checksums of slots' bytes: what they see, and that any way to compute them says the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import native
from kvd.core.keys import U64
from kvd.mover import checksums as module
from kvd.mover.checksums import (
    LINE_WORDS,
    PIECE_BYTES,
    checksums,
    checksums_of,
    copy_and_sum,
    part_checksums,
)
from kvd.mover.copy_engine import CopyStopped
from kvd.mover.layout import LocatedPart
from kvd_proto.tags import mix

EXTENT_BYTES = 1 << 18
ALL_BITS = (1 << 64) - 1
widths = st.sampled_from(
    [1, 2, 63, LINE_WORDS - 1, LINE_WORDS, LINE_WORDS + 1, 3 * LINE_WORDS, 3 * LINE_WORDS + 5]
)


def noise(*shape: int, seed: int = 1) -> U64:
    return np.random.default_rng(seed).integers(0, 1 << 63, shape, dtype=np.uint64)


def by_definition(words: list[int]) -> int:
    """The checksum of one part, word by word in plain numbers."""
    word_keys = module._WORD_KEYS.tolist()
    line_keys = module._line_keys(len(words) // LINE_WORDS + 1).tolist()
    total = int(mix(np.array([len(words)], dtype=np.uint64))[0])
    for place, word in enumerate(words):
        line, within = divmod(place, LINE_WORDS)
        total += word * word_keys[within] * line_keys[line]
    return total & ALL_BITS


@settings(max_examples=40, deadline=None)
@given(widths, st.integers(1, 4), st.integers(0, 1 << 32))
def test_checksums_are_what_their_definition_says(width: int, count: int, seed: int) -> None:
    parts = noise(count, width, seed=seed)
    assert checksums(parts).tolist() == [by_definition(part) for part in parts.tolist()]


@settings(max_examples=200, deadline=None)
@given(widths, st.integers(0, 1 << 62), st.integers(1, ALL_BITS))
def test_any_change_within_one_word_is_seen(width: int, place: int, change: int) -> None:
    part = noise(1, width)
    before = checksums(part)[0]
    part[0, place % width] ^= np.uint64(change)
    assert checksums(part)[0] != before


def test_words_in_other_places_and_more_zeros_are_other_checksums() -> None:
    part = noise(1, 3 * LINE_WORDS)
    found = {int(checksums(part)[0])}
    for swapped in ((0, 1), (5, LINE_WORDS + 5), (7, 2 * LINE_WORDS + 9)):
        other = part.copy()
        other[0, list(swapped)] = other[0, list(swapped[::-1])]
        found.add(int(checksums(other)[0]))
    for shift in (1, LINE_WORDS):
        found.add(int(checksums(np.roll(part, shift, axis=1))[0]))
    empty = [int(checksums(np.zeros((1, n), dtype=np.uint64))[0]) for n in (1, 2, LINE_WORDS, 5000)]
    assert len(found | set(empty)) == 6 + 4


def test_keys_of_long_parts_begin_like_those_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    part = noise(2, 20 * LINE_WORDS + 3)
    known = checksums(part)
    monkeypatch.setattr(module, "_LINE_KEYS", [module._LINE_KEYS[0][:4]])
    assert checksums(part).tolist() == known.tolist()


def scattered(part_bytes: int, places: list[tuple[int, int]]) -> LocatedPart:
    return LocatedPart(
        0,
        np.array([extent for extent, _ in places], dtype=np.uint32),
        np.array([slot * part_bytes for _, slot in places], dtype=np.uint64),
        np.zeros((len(places), 1), dtype=np.uint32),
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([8, 512, 8192, 8200, 40_000]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=12),
    st.booleans(),
)
def test_slots_are_summed_alike_wherever_they_lie(
    part_bytes: int, places: list[tuple[int, int]], ordered: bool
) -> None:
    part = scattered(part_bytes, sorted(places) if ordered else places)
    memory = {extent: noise(EXTENT_BYTES // 8, seed=extent).view(np.uint8) for extent in range(3)}
    whole = part_checksums(part, part_bytes, memory.__getitem__, lambda: True)
    for number, (extent, offset) in enumerate(zip(part.extents, part.offsets, strict=True)):
        alone = memory[int(extent)][int(offset) : int(offset) + part_bytes].view(np.uint64)
        assert whole[number] == checksums(alone[None])[0]
    cut = [
        part_checksums(piece, part_bytes, memory.__getitem__, lambda: True)
        for _, piece in part.pieces(PIECE_BYTES // part_bytes)
    ]
    assert np.concatenate([whole[:0], *cut]).tolist() == whole.tolist()


def test_summing_stops_when_told_to() -> None:
    memory = {0: noise(EXTENT_BYTES // 8).view(np.uint8)}
    asked = iter([True, False])
    part = scattered(4096, [(0, 5), (0, 1), (0, 9)])
    with pytest.raises(CopyStopped):
        part_checksums(part, 4096, memory.__getitem__, lambda: next(asked))


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize(
    "sizes", [(1024,) * 3, (64 << 10,) * 5, ((64 << 10) + 8,) * 2, (8, 4096, 16), (8,), (12_288,)]
)
@pytest.mark.parametrize("at", [0, 24, 4096])
def test_what_is_copied_and_summed_in_one_pass_is_what_both_would_be(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], at: int, *, has_library: bool
) -> None:
    if not has_library:
        monkeypatch.setattr(native, "library", lambda: None)
    room = at + sum(sizes)
    lying = memoryview(bytearray(draw_again(room)))
    came = memoryview(bytearray(room + 8))
    begins = [at + sum(sizes[:n]) for n in range(len(sizes))]
    sources = [lying[b : b + size] for b, size in zip(begins, sizes, strict=True)]
    targets = [came[b + 8 : b + 8 + size] for b, size in zip(begins, sizes, strict=True)][::-1]
    if len(set(sizes)) > 1:
        targets.reverse()
    found = copy_and_sum(sources, targets)
    assert found.tolist() == checksums_of(sources).tolist()
    assert [bytes(each) for each in targets] == [bytes(each) for each in sources]
    assert bytes(came[: at + 8]) == bytes(at + 8)
    assert lying == draw_again(room)


def draw_again(size: int) -> bytes:
    return np.random.default_rng(1).bytes(size)


def test_parts_that_the_library_refuses_are_copied_and_summed_up_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise native.BadStretch

    monkeypatch.setattr(native.Stretches, "run", refuse)
    source, target = (memoryview(bytearray(each)) for each in (b"x" * 8192, bytes(8192)))
    found = copy_and_sum([source], [target])
    assert found.tolist() == checksums_of([source]).tolist()
    assert target == source
