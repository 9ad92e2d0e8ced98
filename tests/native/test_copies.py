"""The native library beside numpy: every byte that it must not touch is a canary."""

from __future__ import annotations

import threading
import time
import timeit
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import native
from kvd.core.keys import U64
from kvd.mover import checksums
from kvd.mover.checksums import LINE_WORDS, by_numpy, empty_sums
from kvd.native import BadStretch, Kind, Library, Stretches

Bytes = npt.NDArray[np.uint8]
LIBRARY = native.library()
LEVELS = LIBRARY.levels() if LIBRARY is not None else ()
WAYS = [f"{level} {shape}" for level in LEVELS for shape in native.SHAPES]
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native library: {native.why_not()}")


def library(way: str) -> Library:
    assert LIBRARY is not None
    return LIBRARY.at(*way.split())


@dataclass(frozen=True)
class Layout:
    """Rows as (bytes, what lies between two blocks' stretches), blocks as engine ids."""

    unit: int
    rows: list[tuple[int, int]]
    blocks: list[int]
    skew: int
    gap: int
    seed: int

    @property
    def block_bytes(self) -> int:
        return sum(size for size, _ in self.rows) * self.unit


SIZES = st.one_of(st.integers(1, 40), st.integers(1, 1500), st.sampled_from([16, 1024, 4096, 5000]))
LAYOUTS = st.builds(
    Layout,
    st.sampled_from([1, 8]),
    st.lists(st.tuples(SIZES, st.integers(0, 20)), min_size=1, max_size=4),
    st.lists(st.integers(0, 19), min_size=1, max_size=20, unique=True),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 99),
)


class Bench:
    """Memories of noise: one for each row, and one extent in which slots lie, in any order."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        unit, noise = layout.unit, np.random.default_rng(layout.seed)
        strides = [(size + between) * unit for size, between in layout.rows]
        self.memories: list[Bytes] = [
            noise.integers(0, 256, layout.skew * unit + 20 * stride, dtype=np.uint8)
            for stride in strides
        ]
        step = layout.block_bytes + layout.gap * unit
        self.slots = noise.permutation(len(layout.blocks)) * step + layout.skew * unit
        size = len(layout.blocks) * step + layout.skew * unit
        self.extent: Bytes = noise.integers(0, 256, size, dtype=np.uint8)
        ends = np.cumsum([size * unit for size, _ in layout.rows])
        self.starts = [0, *ends.tolist()]
        self.rows = np.array(
            [
                [self._start(memory), room, stride, end - start, start]
                for memory, stride, start, end in zip(
                    self.memories, strides, self.starts, ends, strict=False
                )
                for room in (20 * stride,)
            ],
            dtype=np.uint64,
        )
        self.blocks = np.zeros((len(layout.blocks), 6), dtype=np.uint64)
        self.blocks[:, 0], self.blocks[:, 1] = self.extent.ctypes.data, size
        self.blocks[:, 2], self.blocks[:, 3] = self.slots, layout.blocks
        self.blocks[:, 5] = np.arange(len(layout.blocks))

    def _start(self, memory: Bytes) -> int:
        return memory.ctypes.data + self.layout.skew * self.layout.unit

    def expect(self, kind: Kind) -> tuple[list[Bytes], Bytes]:
        """What memories and extent hold afterwards."""
        memories, extent = [memory.copy() for memory in self.memories], self.extent.copy()
        for slot, block in zip(self.slots.tolist(), self.layout.blocks, strict=True):
            for row, memory in enumerate(memories):
                _, _, stride, size, at = self.rows[row].tolist()
                start = self.layout.skew * self.layout.unit + block * stride
                there, here = memory[start : start + size], extent[slot + at : slot + at + size]
                if kind is Kind.STORE:
                    here[:] = there
                elif kind is Kind.LOAD:
                    there[:] = here
        return memories, extent

    def sums(self) -> U64:
        """Of the slots as they are."""
        size = self.layout.block_bytes
        parts = [self.extent[slot : slot + size].view(np.uint64) for slot in self.slots.tolist()]
        return by_numpy(np.array(parts))

    def unchanged_but(self, expected: tuple[list[Bytes], Bytes]) -> None:
        memories, extent = expected
        assert np.array_equal(self.extent, extent)
        for found, wanted in zip(self.memories, memories, strict=True):
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(layout=LAYOUTS, kind=st.sampled_from([Kind.LOAD, Kind.STORE]))
def test_a_call_moves_its_bytes_and_no_other(way: str, layout: Layout, kind: Kind) -> None:
    bench = Bench(layout)
    expected = bench.expect(kind)
    Stretches(library(way), kind, bench.rows, bench.blocks).run(0, len(bench.blocks))
    bench.unchanged_but(expected)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(layout=LAYOUTS, kind=st.sampled_from(list(Kind)), cut=st.integers(0, 20))
def test_sums_of_what_is_copied_are_numpys_and_come_in_any_pieces(
    way: str, layout: Layout, kind: Kind, cut: int
) -> None:
    layout = Layout(8, layout.rows, layout.blocks, layout.skew, layout.gap, layout.seed)
    bench = Bench(layout)
    expected = bench.expect(kind)
    found = empty_sums(len(bench.blocks), layout.block_bytes // 8)
    work = Stretches(library(way), kind, bench.rows, bench.blocks, found)
    cut, rows = min(cut, len(bench.blocks)), cut % len(bench.rows)
    work.run(cut, len(bench.blocks))
    work.run(0, cut, slice(0, rows))
    work.run(0, cut, slice(rows, len(bench.rows)))
    bench.unchanged_but(expected)
    assert found.sums.tolist() == bench.sums().tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [1, 15, 16, 17, LINE_WORDS, 3 * LINE_WORDS + 5, 40 * LINE_WORDS])
def test_parts_of_all_ones_and_of_any_alignment_have_numpys_sums(way: str, width: int) -> None:
    memory = np.full(8 * (3 * width + 1), 0xFF, dtype=np.uint8)
    for skew in (0, 1, 7):
        starts = np.array([memory.ctypes.data + skew + 8 * width * n for n in range(3)])
        found = empty_sums(3, width)
        library(way).sum_up(starts.astype(np.uint64), 8 * width, found)
        assert set(found.sums.tolist()) == set(by_numpy(memory[: 8 * width].view("<u8")[None]))


def test_both_ways_to_sum_up_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(3).integers(0, 1 << 63, (64, 3000), dtype=np.uint64)
    cuts = [noise, noise[::2], noise[:, 5:1034], noise[:, ::2], noise[:0], noise[:, :7]]
    parts = [memoryview(row).cast("B") for row in noise]
    lists = [parts, parts[:1], [], [parts[0], parts[1][:80]], [parts[0].toreadonly()]]
    native_ones = [checksums.checksums(cut).tolist() for cut in cuts]
    native_lists = [checksums.checksums_of(some).tolist() for some in lists]
    monkeypatch.setattr(native, "library", lambda: None)
    assert [checksums.checksums(cut).tolist() for cut in cuts] == native_ones
    assert [checksums.checksums_of(some).tolist() for some in lists] == native_lists


MOST = (1 << 64) - 1
BENCH = Layout(8, [(100, 3), (40, 0)], [3, 19, 0], 1, 2, 1)
# What is changed, and what it is then refused for. The engine's block 19 is its memory's
# last, and the last slot ends where its extent does.
BAD = [
    (("rows", 0, "bytes", 0), "no bytes"),
    (("rows", 1, "bytes", MOST), "too many"),
    (("rows", 1, "at", MOST - 100), "too many"),
    (("rows", 0, "bytes", 804), "whole words"),
    (("rows", 0, "room", 20 * 103 * 8 - 3 * 8 - 1), "outside the engine's memory"),
    (("rows", 0, "stride", 103 * 8 + 8), "outside the engine's memory"),
    (("rows", 1, "stride", MOST // 16), "outside the engine's memory"),
    (("rows", 0, "memory", 0), "outside the engine's memory"),
    (("blocks", 0, "engine", 20), "outside the engine's memory"),
    (("blocks", 0, "engine", MOST), "outside the engine's memory"),
    (("blocks", 1, "extent", 0), "outside its extent"),
    (("blocks", 1, "room", 8), "outside its extent"),
    (("blocks", 1, "offset", MOST - 7), "outside its extent"),
    (("blocks", 1, "offset", 8 + 3 * 142 * 8), "outside its extent"),
    (("blocks", 2, "place", MOST - 7), "outside its extent"),
    (("blocks", 2, "sum", 3), "sum that is not there"),
    (("blocks", 2, "place", 4), "sum that is not there"),
    (("blocks", 2, "place", 8192 * 8 * 1024), "longer than the keys"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("change", "flaw"), BAD, ids=str)
def test_a_call_out_of_bounds_is_refused_before_any_byte_moves(
    way: str, change: tuple[str, int, str, int], flaw: str
) -> None:
    bench = Bench(BENCH)
    table, row, field, value = change
    names = native.ROW_FIELDS if table == "rows" else native.BLOCK_FIELDS
    (bench.rows if table == "rows" else bench.blocks)[row, names.index(field)] = value
    before = ([memory.copy() for memory in bench.memories], bench.extent.copy())
    found = empty_sums(3, 140)
    for kind in (Kind.STORE, Kind.LOAD):
        with pytest.raises(BadStretch, match=flaw):
            Stretches(library(way), kind, bench.rows, bench.blocks, found).run(0, 3)
    bench.unchanged_but(before)
    assert found.sums.tolist() == empty_sums(3, 140).sums.tolist()


def test_the_bounds_themselves_are_allowed() -> None:
    bench = Bench(BENCH)
    bench.rows[0, 1] = 20 * 103 * 8 - 3 * 8  # the last block's stretch ends it
    expected = bench.expect(Kind.STORE)
    work = Stretches(library(LEVELS[-1]), Kind.STORE, bench.rows, bench.blocks, empty_sums(3, 140))
    work.run(0, 3)
    bench.unchanged_but(expected)


def test_a_call_without_blocks_or_rows_does_nothing() -> None:
    bench = Bench(BENCH)
    before = ([memory.copy() for memory in bench.memories], bench.extent.copy())
    work = Stretches(library(LEVELS[-1]), Kind.STORE, bench.rows, bench.blocks)
    work.run(2, 2)
    work.run(0, 3, slice(1, 1))
    bench.unchanged_but(before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("word", "goes_on"), [(0, True), (6, True), (7, False), (MOST, True)])
def test_a_watched_word_stops_it(way: str, word: int, goes_on: bool) -> None:
    bench = Bench(BENCH)
    before = ([memory.copy() for memory in bench.memories], bench.extent.copy())
    expected = bench.expect(Kind.STORE)
    words = np.array([0, word], dtype=np.uint64)
    at = native.address_of(words)
    work = Stretches(library(way), Kind.STORE, bench.rows, bench.blocks)
    work.watch(native.Watches([(at, 1), (at + 8, 7)]))
    assert work.run(0, 3) == goes_on
    bench.unchanged_but(expected if goes_on else before)


def test_a_word_that_is_set_meanwhile_stops_it_soon() -> None:
    memory, size = np.zeros(1 << 20, dtype=np.uint8), 1 << 20
    rows = np.array([[memory.ctypes.data, size, 0, size, 0]], dtype=np.uint64)
    blocks = np.zeros((1 << 18, 6), dtype=np.uint64)  # a quarter of a TiB, for half a minute
    target = np.zeros(size, dtype=np.uint8)
    blocks[:, 0], blocks[:, 1] = target.ctypes.data, size
    word = np.zeros(1, dtype=np.uint64)
    work = Stretches(library(LEVELS[-1]), Kind.STORE, rows, blocks)
    work.watch(native.Watches([(native.address_of(word), 1)]))
    threading.Timer(0.1, word.fill, (1,)).start()
    began = time.monotonic()
    assert not work.run(0, len(blocks))
    assert time.monotonic() - began < 5


def test_a_level_that_the_processor_lacks_is_refused() -> None:
    if LEVELS == native.LEVELS:
        pytest.skip("this processor has every level")
    bench = Bench(BENCH)
    with pytest.raises(BadStretch, match="instructions"):
        Stretches(library(native.LEVELS[-1]), Kind.STORE, bench.rows, bench.blocks).run(0, 3)


def test_the_variable_names_the_level_or_says_off(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for value in ("auto", "off", "plain", *LEVELS, "fast"):
        monkeypatch.setenv(native.VARIABLE, value)
        found, why = native.find()
        said[value] = found.level if found is not None else why
    assert said["off"] == "KVD_NATIVE is off"
    assert said["auto"] == LEVELS[-1]
    assert [said[level] for level in LEVELS] == list(LEVELS)
    assert said["fast"].startswith("KVD_NATIVE is 'fast', and not auto, off,")


def test_a_library_of_another_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tmp_path / "copies.c"
    changed.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    with pytest.raises(OSError, match="built from another"):
        native.load(native.LIBRARY)
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    assert native.find() == (None, "it was not built: no C compiler when kvd was installed")
    (tmp_path / "none.so").write_bytes(b"no library")
    found, why = native.find()
    assert found is None
    assert "none.so" in why


@pytest.mark.parametrize("way", WAYS)
def test_a_small_part_costs_no_question_to_the_processor(way: str) -> None:
    """In a virtual machine one takes tens of microseconds."""
    small = np.zeros(64, dtype=np.uint8)
    starts = np.full(100, native.address_of(small), dtype=np.uint64)
    sums, used = empty_sums(100, 8), library(way)
    seconds = timeit.repeat(lambda: used.sum_up(starts, 64, sums), number=1, repeat=50)
    assert min(seconds) < 100 * 3e-6
