"""The native library makes the same runs as numpy, and submits every byte of them exactly once."""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.cuda import DEVICE, HOST, Copy2D
from kvd import native
from kvd.core.keys import U64
from kvd.mover.cuda.batch import BatchCall
from kvd.mover.cuda.native_lists import MOST_BATCH, RUN_FIELDS, Limits, NativeLists
from kvd.mover.cuda.runs import Runs
from kvd.mover.layout import WORD, FragmentSpec, GroupMap, LocatedPart
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.libcuda import CopyAttributes, CudaError, Libcuda
from tests.contract.test_copy_runs import (
    REGION_BASES,
    Case,
    cases,
    group_of,
    host_base,
    part_of,
    runs_for,
    words_by_loop,
    words_of,
)

Words = Counter[tuple[int, int]]
STREAM = 0x5000
REFUSED = 1
REGIONS = np.array(REGION_BASES, dtype=np.uint64)
MAPPINGS = np.array([host_base(extent) for extent in range(8)], dtype=np.uint64)
LIMITS = Limits(batch_copies=3, narrow_bytes=3 * WORD, least_steps=3, most_pitch=60 * WORD)


class Recorder:
    """A driver that notes the words it is to copy, as (host, device), and what calls had them."""

    def __init__(self, *, is_store: bool, has_batches: bool = True, tells: bool = False) -> None:
        self.is_store, self.tells_index = is_store, tells
        self.words: Words = Counter()
        self.batches: list[int] = []  # copies of each
        self.strided: list[tuple[int, int, int]] = []  # width, height, largest pitch
        self.single = 0
        self.fails_at = -1  # the call that is refused, counted from 0
        self._calls = 0
        arrays = (POINTER(c_uint64),) * 3
        shared = (*arrays, c_size_t, POINTER(CopyAttributes), POINTER(c_size_t), c_size_t)
        told = (POINTER(c_size_t),) if tells else ()
        functions: dict[str, Any] = {
            "batch": CFUNCTYPE(c_int, *shared, *told, c_void_p)(self._batch),
            "cuMemcpy2DAsync_v2": CFUNCTYPE(c_int, POINTER(Copy2D), c_void_p)(self._strided),
            "cuMemcpyHtoDAsync_v2": CFUNCTYPE(c_int, c_uint64, c_void_p, c_size_t, c_void_p)(
                lambda to, source, size, stream: self._one(source, to, size, stream)
            ),
            "cuMemcpyDtoHAsync_v2": CFUNCTYPE(c_int, c_void_p, c_uint64, c_size_t, c_void_p)(
                self._one
            ),
        }
        self._functions = functions
        self.has_batches = has_batches

    def address(self, name: str = "batch") -> int:
        found = ctypes.cast(self._functions[name], c_void_p).value
        assert found is not None
        return found

    def error(self, function: str, code: int) -> CudaError:
        return CudaError(function, code, "CUDA_ERROR_INVALID_VALUE", "invalid argument")

    def _is_refused(self, stream: int) -> bool:
        assert stream == STREAM
        self._calls += 1
        return self._calls - 1 == self.fails_at

    def _note(self, host: int, device: int, size: int) -> None:
        assert size % WORD == 0 < size
        self.words.update((host + at, device + at) for at in range(0, size, WORD))

    def _batch(self, *given: Any) -> int:
        to, source, sizes, count, attributes, first, kinds, *told, stream = given
        assert (first[0], kinds, len(told)) == (0, 1, int(self.tells_index))
        assert attributes[0].source_access_order == (1 if self.is_store else 3)
        assert attributes[0].flags == 1
        if self._is_refused(stream):
            return REFUSED
        self.batches.append(count)
        host, device = (to, source) if self.is_store else (source, to)
        for row in range(count):
            self._note(host[row], device[row], sizes[row])
        return 0

    def _strided(self, pointer: Any, stream: int) -> int:
        if self._is_refused(stream):
            return REFUSED
        copy = pointer[0]
        assert (copy.source_type, copy.target_type) == (
            (DEVICE, HOST) if self.is_store else (HOST, DEVICE)
        )
        host = copy.target_host if self.is_store else copy.source_host
        device = copy.source_device if self.is_store else copy.target_device
        host_pitch = copy.target_pitch if self.is_store else copy.source_pitch
        device_pitch = copy.source_pitch if self.is_store else copy.target_pitch
        assert min(host_pitch, device_pitch) >= copy.width
        self.strided.append((copy.width, copy.height, max(host_pitch, device_pitch)))
        for row in range(copy.height):
            self._note(host + row * host_pitch, device + row * device_pitch, copy.width)
        return 0

    def _one(self, host: int, device: int, size: int, stream: int) -> int:
        if self._is_refused(stream):
            return REFUSED
        self.single += 1
        self._note(host, device, size)
        return 0


class _Batch:
    """What `NativeLists` takes of a `BatchCall`."""

    def __init__(self, recorder: Recorder) -> None:
        self.address, self.tells_index = recorder.address(), recorder.tells_index


@pytest.fixture(autouse=True, scope="module")
def _there_is_a_library() -> None:
    if native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")


def lists_of(recorder: Recorder, limits: Limits = LIMITS) -> NativeLists:
    library = native.library()
    assert library is not None
    batch = cast(BatchCall, _Batch(recorder)) if recorder.has_batches else None
    driver = cast(Libcuda, recorder)
    return NativeLists(library, driver, batch, limits, is_store=recorder.is_store)


def submitted(lists: NativeLists, most_bytes: int) -> list[int]:
    """Submit all of the list; bytes of each piece."""
    sizes = []
    while lists.has_more:
        sizes.append(lists.submit(most_bytes, STREAM))
    return sizes


def sorted_rows(runs: U64) -> list[list[int]]:
    return sorted(runs.tolist())


def by_numpy(group: GroupMap, part: LocatedPart) -> U64:
    runs = runs_for(group, part)
    return np.stack([getattr(runs, field) for field in RUN_FIELDS], axis=1)


@given(case=cases())
def test_runs_are_those_of_numpy(case: Case) -> None:
    lists = lists_of(Recorder(is_store=True))
    lists.make(case.part, case.group, REGIONS, MAPPINGS)
    assert sorted_rows(lists.runs) == sorted_rows(by_numpy(case.group, case.part))
    assert words_of(Runs(*lists.runs.T)) == words_by_loop(case.group, case.part)


@given(
    case=cases(),
    most_words=st.integers(1, 40),
    is_store=st.booleans(),
    has_batches=st.booleans(),
    tells=st.booleans(),
)
def test_every_word_is_submitted_once_in_pieces_that_keep_their_bound(
    case: Case, most_words: int, *, is_store: bool, has_batches: bool, tells: bool
) -> None:
    recorder = Recorder(is_store=is_store, has_batches=has_batches, tells=tells)
    lists = lists_of(recorder)
    lists.make(case.part, case.group, REGIONS, MAPPINGS)
    sizes = submitted(lists, most_words * WORD)
    assert recorder.words == words_by_loop(case.group, case.part)
    assert sum(sizes) == WORD * recorder.words.total()
    assert all(0 < size <= most_words * WORD for size in sizes)
    assert all(0 < count <= LIMITS.batch_copies for count in recorder.batches)
    assert all(pitch <= LIMITS.most_pitch for _, _, pitch in recorder.strided)
    assert has_batches == (not recorder.single) or not recorder.words or recorder.strided


def test_a_list_follows_another_of_any_size_and_group() -> None:
    recorder = Recorder(is_store=False)
    lists = lists_of(recorder)
    small = group_of(FragmentSpec(0, 0, 64, 64))
    large = group_of(*(FragmentSpec(1, 8192 * n, 64, 8) for n in range(700)), num_blocks=64)
    for group, count in ((small, 2), (large, 40), (small, 1), (large, 3)):
        recorder.words.clear()
        part = part_of(group, [(7 * n) % 64 for n in range(count)], list(range(count)))
        lists.make(part, group, REGIONS, MAPPINGS)
        submitted(lists, 1 << 20)
        assert recorder.words == words_by_loop(group, part)


def test_a_list_that_was_not_submitted_to_its_end_leaves_nothing_to_the_next() -> None:
    recorder = Recorder(is_store=False)
    lists = lists_of(recorder)
    group = group_of(*(FragmentSpec(0, 800 * n, 64, 16) for n in range(5)))
    part = part_of(group, [5, 9, 1], [0, 1, 2])
    lists.make(part, group, REGIONS, MAPPINGS)
    assert lists.submit(3 * 16, STREAM) == 3 * 16
    recorder.words.clear()
    lists.make(part, group, REGIONS, MAPPINGS)
    submitted(lists, 1 << 20)
    assert recorder.words == words_by_loop(group, part)


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_refused_call_is_raised_by_its_name_and_the_next_list_is_whole(call: int) -> None:
    recorder = Recorder(is_store=True)
    lists = lists_of(recorder)
    group = group_of(
        *(FragmentSpec(0, 800 * n, 64, 16) for n in range(4)), FragmentSpec(1, 0, 800, 80)
    )
    part = part_of(group, [5, 9, 1, 3], [0, 1, 2, 3])
    lists.make(part, group, REGIONS, MAPPINGS)
    recorder.fails_at = call
    with pytest.raises(CudaError, match=r"cuMemcpy(2D|Batch)Async.*INVALID_VALUE"):
        submitted(lists, 1 << 20)
    recorder.fails_at = -1
    recorder.words.clear()
    lists.make(part, group, REGIONS, MAPPINGS)
    submitted(lists, 1 << 20)
    assert recorder.words == words_by_loop(group, part)


@pytest.mark.parametrize(
    ("steps", "width", "strided"), [(3, 2, 1), (2, 2, 0), (3, 3, 0), (4, 2, 1), (3, 1, 1)]
)
def test_narrow_even_stretches_are_one_strided_copy(steps: int, width: int, strided: int) -> None:
    recorder = Recorder(is_store=False)
    fragments = (FragmentSpec(0, 5 * WORD * n, 50 * WORD, width * WORD) for n in range(steps))
    group = group_of(*fragments)
    lists = lists_of(recorder)
    lists.make(part_of(group, [4], [0]), group, REGIONS, MAPPINGS)
    submitted(lists, 1 << 20)
    assert len(recorder.strided) == strided
    assert sum(recorder.batches) == (0 if strided else steps)


def test_no_blocks_and_null_blocks_are_no_copies() -> None:
    recorder = Recorder(is_store=True)
    lists = lists_of(recorder)
    group = group_of(FragmentSpec(0, 0, 64, 64))
    for engine_blocks in ([], [NULL_ENGINE_BLOCK] * 3):
        part = part_of(group, engine_blocks, list(range(len(engine_blocks))))
        assert not lists.make(part, group, REGIONS, MAPPINGS).has_more
    assert not recorder.words


def test_a_batch_is_never_larger_than_the_library_has_room_for() -> None:
    with pytest.raises(AssertionError):
        lists_of(Recorder(is_store=True), Limits(MOST_BATCH + 1, 1, 1, 1))


def test_columns_of_somebody_elses_arrays_are_copied_first() -> None:
    """Rows of a larger table are neither contiguous nor this type."""
    recorder = Recorder(is_store=True)
    lists = lists_of(recorder)
    group = group_of(FragmentSpec(0, 0, 64, 64))
    whole = part_of(group, [3, 9, 5, 1], [0, 1, 2, 3])
    odd = LocatedPart(
        0, whole.extents[::2], whole.offsets[::2].astype(np.uint64), whole.engine_blocks[::2]
    )
    lists.make(odd, group, REGIONS, MAPPINGS)
    submitted(lists, 1 << 20)
    assert recorder.words == words_by_loop(group, odd)
