"""Checksums of the bytes that a slot's part holds, to tell whether they are still the stored ones.

A part is a sequence of 64-bit words, cut into lines of LINE_WORDS. A line's sum is that of its
words, each times an odd key of its place in the line; the checksum is the sum of the lines' sums,
each times an odd key of the line, with the part's length, everything modulo 2**64: multilinear
hashing, as in Lemire and Kaser, "Strongly universal string hashing is fast" (The Computer Journal,
2014). A change within one word is always seen, since odd numbers can be divided by; of any other
change one in 2**64 is missed, on average over the keys. The keys are fixed, so this is no proof
against somebody who may write to the pool and wants to deceive.

The native library computes it as fast as memory can be read, and while it copies. Without that
library numpy computes the same, at about the speed of its copies. Both let go of the interpreter's
lock. See docs/adr/0010 and 0024.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvd import native
from kvd.core.keys import NO_SUM, U64
from kvd.mover.copy_engine import CopyStopped, KeepGoing
from kvd.mover.layout import WORD, LocatedPart
from kvd_proto.tags import mix

Bytes = npt.NDArray[np.uint8]

LINE_WORDS = 1024
# Copied and read again for its checksum while it is still in the cache.
PIECE_BYTES = 1 << 20
# A GPU's bytes come past the cache, and each piece costs a wait for them. Not measured yet.
GPU_PIECE_BYTES = 16 << 20
LEAST_WORDS = 128  # of a part that the library is called for
_FIRST_LINES = 8192
_EXTENT, _ROOM, _ENGINE, _SUM = map(native.BLOCK_FIELDS.index, ("extent", "room", "engine", "sum"))
_U64 = np.dtype("<u8")


def _odd_keys(seed: int, count: int) -> U64:
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(seed)
    return mix(mix(numbers)) | np.uint64(1)


_WORD_KEYS = native.on_cache_lines(_odd_keys(1, LINE_WORDS))
_LINE_SEED = 1 << 32
_LINE_KEYS = [_odd_keys(_LINE_SEED, _FIRST_LINES)]  # grown for parts above 64 MiB


def _line_keys(count: int) -> U64:
    if count > len(_LINE_KEYS[0]):
        _LINE_KEYS[0] = _odd_keys(_LINE_SEED, 2 * count)
    return _LINE_KEYS[0][:count]


@functools.lru_cache(maxsize=8)
def _keys_of(lines: int) -> native.Keys:
    """The keys, for the library, of parts of at most so many lines."""
    return native.Keys(_WORD_KEYS, _line_keys(lines))


@functools.lru_cache(maxsize=1024)
def _of_length(words: int) -> np.uint64:
    """What the sum of a part of so many words begins with."""
    start: np.uint64 = mix(np.array([words], dtype=np.uint64))[0]
    return start


def checksums(parts: U64) -> U64:
    """The checksum of each row. Shape [n, words of a part]; rows may lie anywhere in memory."""
    library = native.library()
    count, width = parts.shape
    if library is None or width < LEAST_WORDS or parts.strides[1] != WORD:
        return by_numpy(parts)
    start, step = parts.__array_interface__["data"][0], parts.strides[0]
    starts = start + step * np.arange(count, dtype=np.int64)
    return _by_library(library, starts.astype(np.uint64), width)


def differ(found: U64, wanted: U64) -> npt.NDArray[np.bool_]:
    """Where bytes are others than is known of them; of some nothing is (NO_SUM)."""
    mask: npt.NDArray[np.bool_] = (found != wanted) & (wanted != NO_SUM)
    return mask


def checksums_of(parts: Sequence[memoryview]) -> U64:
    """The checksum of each part, which may lie anywhere and be of any whole number of words."""
    library = native.library()
    sizes = {part.nbytes for part in parts}
    if library is not None and len(sizes) == 1 and not any(part.readonly for part in parts):
        width, rest = divmod(sizes.pop(), WORD)
        if width >= LEAST_WORDS and not rest:
            starts = [native.address_of(part) for part in parts]
            return _by_library(library, np.array(starts, dtype=np.uint64), width)
    sums = np.empty(len(parts), dtype=np.uint64)
    for number, part in enumerate(parts):
        sums[number] = checksums(np.frombuffer(part, dtype=_U64).reshape(1, -1))[0]
    return sums


def copy_and_sum(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> U64:
    """Copy each part to its place, which is as long; the checksum of each, of what was copied.

    The library does it in one pass. What it writes goes past the processor's cache.
    """
    library = native.library()
    sizes = {part.nbytes for part in sources}
    if library is not None and len(sizes) == 1 and not any(part.readonly for part in sources):
        width, rest = divmod(sizes.pop(), WORD)
        if width >= LEAST_WORDS and not rest:
            try:
                return _copied_by_library(library, sources, targets, width)
            except native.BadStretch:  # too far apart; nothing was copied
                pass
    sums = checksums_of(sources)
    for source, target in zip(sources, targets, strict=True):
        np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)
    return sums


def _copied_by_library(
    library: native.Library,
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    width: int,
) -> U64:
    count, size = len(sources), width * WORD
    assert all(target.nbytes == size for target in targets)
    places = np.array([native.address_of(target) for target in targets], dtype=np.uint64)
    begin = places.min()
    reach = places.max() - begin + np.uint64(size)
    rows = np.array([[begin, reach, 1, size, 0]], dtype=np.uint64)
    blocks = np.zeros((count, len(native.BLOCK_FIELDS)), dtype=np.uint64)
    blocks[:, _EXTENT] = [native.address_of(source) for source in sources]
    blocks[:, _ROOM] = size
    blocks[:, _ENGINE] = places - begin
    blocks[:, _SUM] = np.arange(count, dtype=np.uint64)
    found = empty_sums(count, width)
    native.Stretches(library, native.Kind.LOAD, rows, blocks, found).run(0, count)
    return found.sums


def empty_sums(count: int, width: int) -> native.Sums:
    """Sums of parts of so many words, before any word is added to them by the library."""
    sums = np.empty(count, dtype=np.uint64)
    sums.fill(_of_length(width))
    return native.Sums(sums, _keys_of(max(_FIRST_LINES, width // LINE_WORDS + 1)))


def empty_sums_of(sizes: Sequence[int]) -> native.Sums:
    """Likewise of parts of so many bytes each."""
    sums = np.array([_of_length(size // WORD) for size in sizes], dtype=np.uint64)
    lines = max(sizes, default=0) // (WORD * LINE_WORDS) + 1
    return native.Sums(sums, _keys_of(max(_FIRST_LINES, lines)))


def _by_library(library: native.Library, starts: U64, width: int) -> U64:
    found = empty_sums(len(starts), width)
    library.sum_up(starts, width * WORD, found)
    return found.sums


def by_numpy(parts: U64) -> U64:
    """What `checksums` gives, without the library."""
    count, width = parts.shape
    lines, rest = divmod(width, LINE_WORDS)
    keys = _line_keys(lines + 1)
    sums = np.full(count, _of_length(width), dtype=np.uint64)
    if lines:
        whole = parts[:, : lines * LINE_WORDS].reshape(count, lines, LINE_WORDS)
        sums += (whole @ _WORD_KEYS) @ keys[:lines]
    if rest:
        sums += (parts[:, lines * LINE_WORDS :] @ _WORD_KEYS[:rest]) * keys[lines]
    return sums


def part_checksums(
    part: LocatedPart, part_bytes: int, bytes_of: Callable[[int], Bytes], keep_going: KeepGoing
) -> U64:
    """The checksum of each slot of the part, [n]. `bytes_of` gives an open extent's bytes.

    Looks at keep_going between runs of slots and raises CopyStopped.
    """
    sums = np.empty(len(part.extents), dtype=np.uint64)
    for start, stop in _neighbours(part, part_bytes):
        if not keep_going():
            raise CopyStopped
        shape = (stop - start, part_bytes // WORD)
        extent, offset = int(part.extents[start]), int(part.offsets[start])
        words = np.ndarray(shape, _U64, bytes_of(extent), offset)
        sums[start:stop] = checksums(words)
    return sums


def _neighbours(part: LocatedPart, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of slots, as [start, stop), that lie one after the other in one extent."""
    if not len(part.extents):
        return
    extents, offsets = part.extents, part.offsets
    apart = (extents[1:] != extents[:-1]) | (offsets[1:] != offsets[:-1] + np.uint64(part_bytes))
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(extents)]
    most = max(1, PIECE_BYTES // part_bytes)
    for first, end in itertools.pairwise(bounds):
        for start in range(first, end, most):
            yield start, min(end, start + most)
