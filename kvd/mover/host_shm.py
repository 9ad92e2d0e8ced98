"""Copies between two shared memories: the engine's, mapped by descriptor, and the pool's files.

The native library copies where it is there (`streams.py`). Without it, and where the engine's
memory has holes, everything is a numpy view of 64-bit words over a mapping: an assignment between
two views is checked against the mapping's bounds and releases the interpreter's lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvd import native
from kvd.core.errors import InvalidArgument
from kvd.core.events import JobKind
from kvd.core.keys import U64
from kvd.linux.calls import lies_in_memory
from kvd.mover.checksums import empty_sums, part_checksums
from kvd.mover.copy_engine import CopyStopped, KeepGoing
from kvd.mover.facts import MoverFacts
from kvd.mover.layout import WORD, GroupMap, LocatedPart, MoverConfig, Region, check_config
from kvd.mover.presence import I64, Presence
from kvd.mover.ranges import FoldedFragment, Range, fold, ranges_of
from kvd.mover.streams import MAX_CALL_BYTES, BlockStretch, Streams
from kvd.processes.mappings import WARM_BYTES, Bytes, Mapping, map_extent, populate, warm
from kvd_proto.layout import NULL_ENGINE_BLOCK

# Of stretches whose pages are looked up together: where they are small, the numbers of all that a
# store may have would take more memory than its bytes.
STARTS_AT_ONCE = 1 << 16

_U64 = np.dtype("<u8")


UNTOLD = (
    "mincore is refused here, so stores read engines' memory through files, far slower:"
    " allow it (SystemCallFilter= of the unit, the container's seccomp profile)"
)


@dataclass(frozen=True, slots=True)
class _Memory:
    """A file of the engine's. The descriptor is ours."""

    fd: int
    mapping: Mapping
    presence: Presence

    @classmethod
    def of(cls, fd: int, size: int) -> _Memory:
        mapping = Mapping.of(fd, size)
        return cls(os.dup(fd), mapping, Presence(mapping.address, size))

    def read(self, at: int, into: Bytes) -> None:
        """Read through the file: holes are zeros, and stay holes."""
        view = into.data
        while view:
            count = os.preadv(self.fd, [view], at)
            if count == 0:
                raise OSError(f"the engine's memory ends at byte {at}")
            view, at = view[count:], at + count

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class _PieceView:
    """How a piece of any run of engine blocks is seen as words, on both sides alike."""

    file: _Memory  # of the piece's region
    start: int  # of engine block 0's piece in it
    room: int  # from there to the region's end
    stride: int
    at: int
    tail: tuple[int, ...]  # shape after the number of blocks
    engine_steps: tuple[int, ...]
    slot_steps: tuple[int, ...]
    rows: I64  # where the stretches of one block begin, in their order
    row_bytes: int

    @classmethod
    def of(
        cls, piece: FoldedFragment, place: tuple[_Memory, Region], block_bytes: int
    ) -> _PieceView:
        file, region = place
        tail = (*piece.counts, piece.bytes // 8)
        packed = [8]  # in a slot the repetitions lie close together
        for count in tail[:0:-1]:
            packed.insert(0, packed[0] * count)
        rows = np.zeros(1, dtype=np.int64)
        for count, step in zip(piece.counts, piece.steps, strict=True):
            rows = (rows[:, None] + np.arange(count) * step).ravel()
        return cls(
            file,
            region.offset + piece.base,
            region.bytes - piece.base,
            piece.stride,
            piece.at,
            tail,
            (piece.stride, *piece.steps, 8),
            (block_bytes, *packed),
            rows,
            piece.bytes,
        )

    def stretches(self) -> list[BlockStretch]:
        """What of every engine block this is, stretch by stretch."""
        return [
            BlockStretch(
                self.file.mapping.address + self.start + row,
                self.room - row,
                self.stride,
                self.row_bytes,
                self.at + number * self.row_bytes,
            )
            for number, row in enumerate(self.rows.tolist())
        ]

    def starts(self, first: int, blocks: int) -> I64:
        """Where the stretches of these blocks begin in the file, in the slots' order."""
        return self.starts_of(np.arange(first, first + blocks))

    def starts_of(self, blocks: I64) -> I64:
        """The same of any blocks."""
        starts: I64 = (self.start + blocks * self.stride)[:, None] + self.rows
        return starts.ravel()

    def is_present(self, blocks: I64) -> bool:
        """Whether the file has every page of these blocks' stretches."""
        step = max(1, STARTS_AT_ONCE // len(self.rows))
        return all(
            self.file.presence.covers(self.starts_of(blocks[at : at + step]), self.row_bytes)
            for at in range(0, len(blocks), step)
        )


class HostSharedMemory:
    """The `CopyEngine` for host shared memory.

    Refuses, with the field named, memory that is not a memory file, is smaller than said or
    can't be written, and every layout that `check_config` refuses. Copies by `library`; None: by
    numpy.
    """

    copies_at_once = 1  # a copy keeps a processor busy from its beginning to its end

    def __init__(self, config: MoverConfig, library: native.Library | None = None) -> None:
        check_config(config)
        level = None if library is None else library.level
        self.facts = MoverFacts.of_host_memory(level, native.why_not())
        self._config = config
        self._extents: dict[int, Mapping] = {}
        self._files: dict[tuple[int, int], _Memory] = {}
        self._regions: list[tuple[_Memory, Region]] = []
        self._pieces: list[list[_PieceView]] = []
        try:
            for number, region in enumerate(config.regions):
                assert isinstance(region, Region), "a GPU's memory is not for this engine"
                self._regions.append((self._map_region(region, f"memories[{number}]"), region))
        except InvalidArgument:
            self.close()
            raise
        if level is not None and not all(file.presence.is_told() for file, _ in self._regions):
            self.facts = replace(self.facts, note=UNTOLD)
        self._pieces = [
            [
                _PieceView.of(piece, self._regions[piece.region], group.engine_block_bytes)
                for piece in fold(group.fragments)
            ]
            for group in config.groups
        ]
        self._streams = [
            None if library is None else self._streams_of(library, group, pieces)
            for group, pieces in zip(config.groups, self._pieces, strict=True)
        ]

    def _streams_of(
        self, library: native.Library, group: GroupMap, pieces: list[_PieceView]
    ) -> Streams:
        return Streams(library, group, [s for p in pieces for s in p.stretches()], self._extents)

    # -- extents ----------------------------------------------------------------------------

    def open_extent(self, extent: int) -> Bytes:
        self._extents[extent] = map_extent(self._config.extents, extent)
        return self._extents[extent].view

    def close_extent(self, extent: int) -> None:
        self._extents.pop(extent).close()

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        warm(self._extents[extent], keep_going)

    # -- the engine's memory ----------------------------------------------------------------

    def warm_memory(self, keep_going: KeepGoing) -> None:
        for file, region in self._regions:
            first = region.offset - region.offset % mmap.PAGESIZE
            end = region.offset + region.bytes
            for start in range(first, end, WARM_BYTES):
                if not keep_going():
                    return
                _populate_present(file, start, min(WARM_BYTES, end - start))

    def _map_region(self, region: Region, name: str) -> _Memory:
        try:
            status = os.fstat(region.fd)
        except OSError as error:
            raise InvalidArgument(f"{name} is no open descriptor: {error}", name) from error
        if not stat.S_ISREG(status.st_mode) or not lies_in_memory(region.fd):
            raise InvalidArgument(f"{name} is not shared memory", name)
        _require_inside(region, status.st_size, name)
        if fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise InvalidArgument(f"{name} is not open for reading and writing", name)
        key = (status.st_dev, status.st_ino)
        if key not in self._files:
            try:
                self._files[key] = _Memory.of(region.fd, status.st_size)
            except (OSError, ValueError, MemoryError) as error:
                raise InvalidArgument(f"{name} can't be mapped: {error}", name) from error
        file = self._files[key]
        # The engine may have made it longer since an earlier region had it mapped.
        _require_inside(region, len(file.mapping.view), name)
        return file

    # -- copies -----------------------------------------------------------------------------

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        streams = self._streams[part.group]
        if streams is None:
            return self._copy_by_numpy(kind, part, keep_going)
        return sum(
            streams.copy(kind, some, keep_going, None)
            if streams_can
            else self._copy_by_numpy(kind, some, keep_going)
            for some, streams_can in self._by_presence(kind, part)
        )

    @property
    def sums_up(self) -> bool:
        """Whether it can sum up what it copies in the same pass."""
        return None not in self._streams

    def copy_and_sum(
        self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing
    ) -> tuple[int, U64]:
        """As `copy`; and the checksum of each slot's part, of the very words that were copied."""
        streams = self._streams[part.group]
        assert streams is not None
        part_bytes, copied = self._config.groups[part.group].part_bytes, 0
        found = [np.empty(0, dtype=np.uint64)]
        for some, streams_can in self._by_presence(kind, part):
            if streams_can:
                sums = empty_sums(len(some.extents), part_bytes // WORD)
                copied += streams.copy(kind, some, keep_going, sums)
                found.append(sums.sums)
            else:
                copied += self._copy_by_numpy(kind, some, keep_going)
                found.append(part_checksums(some, part_bytes, self._bytes_of, keep_going))
        return copied, np.concatenate(found)

    def wipe(self, part: LocatedPart) -> None:
        """Zero these engine blocks: what a load has put there is not what was stored."""
        blocks = _real_blocks(part)
        for piece in self._pieces[part.group]:
            for start in piece.starts_of(blocks).tolist():
                piece.file.mapping.view[start : start + piece.row_bytes] = 0

    def _bytes_of(self, extent: int) -> Bytes:
        return self._extents[extent].view

    def _by_presence(self, kind: JobKind, part: LocatedPart) -> Iterator[tuple[LocatedPart, bool]]:
        """The part in pieces, and whether the library may copy each: a store's may have holes."""
        if kind is JobKind.LOAD or self._is_present(part):
            yield part, True
            return
        part_bytes = self._config.groups[part.group].part_bytes
        for _, some in part.pieces(MAX_CALL_BYTES // part_bytes):
            yield some, self._is_present(some)

    def _is_present(self, part: LocatedPart) -> bool:
        """Whether the engine's memory has every page of these blocks."""
        if all(file.presence.full for file, _ in self._regions):
            return True
        blocks = _real_blocks(part)
        return all(
            piece.file.presence.full or piece.is_present(blocks)
            for piece in self._pieces[part.group]
        )

    def _copy_by_numpy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        group = self._config.groups[part.group]
        pieces = self._pieces[part.group]
        block_bytes = group.engine_block_bytes
        copied = 0
        for run in ranges_of(part, group):
            if not keep_going():
                raise CopyStopped
            if run.first is not None:
                for piece in pieces:
                    self._copy_piece(kind, run, piece)
                copied += run.blocks * block_bytes
            elif kind is JobKind.STORE:
                end = run.offset + run.blocks * block_bytes
                self._extents[run.extent].view[run.offset : end] = 0
        return copied

    def _copy_piece(self, kind: JobKind, run: Range, piece: _PieceView) -> None:
        assert run.first is not None
        shape = (run.blocks, *piece.tail)
        start = piece.start + run.first * piece.stride
        if kind is JobKind.STORE and not piece.file.presence.full:
            starts = piece.starts(run.first, run.blocks)
            if not piece.file.presence.covers(starts, piece.row_bytes):
                self._read_piece(run, piece, starts)
                return
        memory = piece.file.mapping.view
        engine = np.ndarray(shape, _U64, memory, start, piece.engine_steps)
        extent = self._extents[run.extent].view
        slots = np.ndarray(shape, _U64, extent, run.offset + piece.at, piece.slot_steps)
        if kind is JobKind.STORE:
            np.copyto(slots, engine)
        else:
            np.copyto(engine, slots)

    def _read_piece(self, run: Range, piece: _PieceView, starts: I64) -> None:
        """Store what is partly holes, without making pages of them."""
        extent = self._extents[run.extent].view
        size, per_block = piece.row_bytes, len(piece.rows)
        block_bytes = piece.slot_steps[0]
        for number, start in enumerate(starts.tolist()):
            block, row = divmod(number, per_block)
            at = run.offset + piece.at + block * block_bytes + row * size
            piece.file.read(start, extent[at : at + size])

    def close(self) -> None:
        for extent in list(self._extents):
            self.close_extent(extent)
        self._regions.clear()
        self._pieces.clear()
        while self._files:
            self._files.popitem()[1].close()


def _require_inside(region: Region, size: int, name: str) -> None:
    end = region.offset + region.bytes
    if end > size:
        raise InvalidArgument(f"{name} ends at byte {end}, its file has {size}", f"{name}.bytes")


def _real_blocks(part: LocatedPart) -> I64:
    """The engine blocks that are not null."""
    real: I64 = part.engine_blocks[part.engine_blocks != NULL_ENGINE_BLOCK].astype(np.int64)
    return real


def _populate_present(file: _Memory, start: int, size: int) -> None:
    """Map those pages that the file has. Holes stay: they would be charged to this process."""
    first = start // mmap.PAGESIZE
    present = file.presence.learn(first, -(-size // mmap.PAGESIZE))
    edges = np.flatnonzero(np.diff(present, prepend=np.uint8(0), append=np.uint8(0)))
    for begin, end in edges.reshape(-1, 2).tolist():
        address = file.mapping.address + (first + begin) * mmap.PAGESIZE
        populate(address, (end - begin) * mmap.PAGESIZE)
