"""Copies between two shared memories: the engine's, mapped by descriptor, and the pool's files.

Everything is a numpy view of 64-bit words over a mapping: an assignment between two views is
checked against the mapping's bounds, runs at memcpy's speed and releases the interpreter's
lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

import numpy as np

from kvd.core.errors import InvalidArgument
from kvd.core.events import JobKind
from kvd.mover.copy_engine import CopyStopped, KeepGoing
from kvd.mover.facts import MoverFacts
from kvd.mover.layout import LocatedPart, MoverConfig, Region, check_config
from kvd.mover.mappings import WARM_BYTES, Bytes, Mapping, map_extent, populate, warm
from kvd.mover.ranges import Piece, Range, fold, ranges_of

_U64 = np.dtype("<u8")
_TMPFS = 0x01021994  # linux/magic.h
_HUGETLBFS = 0x958458F6
_MEMORY_FILE_SYSTEMS = (_TMPFS, _HUGETLBFS)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class _PieceView:
    """How a piece of any run of engine blocks is seen as words, on both sides alike."""

    memory: Bytes  # the file of the piece's region
    start: int  # of engine block 0's piece in it
    stride: int
    at: int
    tail: tuple[int, ...]  # shape after the number of blocks
    engine_steps: tuple[int, ...]
    slot_steps: tuple[int, ...]

    @classmethod
    def of(cls, piece: Piece, place: tuple[Mapping, Region], block_bytes: int) -> _PieceView:
        mapping, region = place
        tail = (*piece.counts, piece.bytes // 8)
        packed = [8]  # in a slot the repetitions lie close together
        for count in tail[:0:-1]:
            packed.insert(0, packed[0] * count)
        return cls(
            mapping.view,
            region.offset + piece.base,
            piece.stride,
            piece.at,
            tail,
            (piece.stride, *piece.steps, 8),
            (block_bytes, *packed),
        )


class HostSharedMemory:
    """The CopyEngine of host shared memory.

    Refuses, with the field named, memory that is not a memory file, is smaller than said or
    can't be written, and every layout that `check_config` refuses.
    """

    def __init__(self, config: MoverConfig) -> None:
        check_config(config)
        self.facts = MoverFacts()
        self._config = config
        self._extents: dict[int, Mapping] = {}
        self._files: dict[tuple[int, int], Mapping] = {}
        self._regions: list[tuple[Mapping, Region]] = []
        for number, region in enumerate(config.regions):
            assert isinstance(region, Region), "a GPU's memory is not for this engine"
            self._regions.append((self._map_region(region, f"memories[{number}]"), region))
        self._pieces = [
            [
                _PieceView.of(piece, self._regions[piece.region], group.engine_block_bytes)
                for piece in fold(group.fragments)
            ]
            for group in config.groups
        ]

    # -- extents ----------------------------------------------------------------------------

    def open_extent(self, extent: int) -> Bytes:
        self._extents[extent] = map_extent(self._config, extent)
        return self._extents[extent].view

    def close_extent(self, extent: int) -> None:
        self._extents.pop(extent).close()

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        warm(self._extents[extent], keep_going)

    # -- the engine's memory ----------------------------------------------------------------

    def warm_memory(self, keep_going: KeepGoing) -> None:
        for mapping, region in self._regions:
            first = region.offset - region.offset % mmap.PAGESIZE
            end = region.offset + region.bytes
            for start in range(first, end, WARM_BYTES):
                if not keep_going():
                    return
                _populate_present(mapping.address + start, min(WARM_BYTES, end - start))

    def _map_region(self, region: Region, name: str) -> Mapping:
        try:
            status = os.fstat(region.fd)
        except OSError as error:
            raise InvalidArgument(f"{name} is no open descriptor: {error}", name) from error
        if not stat.S_ISREG(status.st_mode) or not _in_memory(region.fd):
            raise InvalidArgument(f"{name} is not shared memory", name)
        if region.offset + region.bytes > status.st_size:
            raise InvalidArgument(
                f"{name} ends at byte {region.offset + region.bytes}, its file has "
                f"{status.st_size}",
                f"{name}.bytes",
            )
        if fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise InvalidArgument(f"{name} is not open for reading and writing", name)
        key = (status.st_dev, status.st_ino)
        if key not in self._files:
            try:
                self._files[key] = Mapping.of(region.fd, status.st_size)
            except (OSError, ValueError) as error:
                raise InvalidArgument(f"{name} can't be mapped: {error}", name) from error
        return self._files[key]

    # -- copies -----------------------------------------------------------------------------

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
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
        engine = np.ndarray(shape, _U64, piece.memory, start, piece.engine_steps)
        extent = self._extents[run.extent].view
        slots = np.ndarray(shape, _U64, extent, run.offset + piece.at, piece.slot_steps)
        if kind is JobKind.STORE:
            np.copyto(slots, engine)
        else:
            np.copyto(engine, slots)

    def close(self) -> None:
        for extent in list(self._extents):
            self.close_extent(extent)
        self._regions.clear()
        self._pieces.clear()
        while self._files:
            self._files.popitem()[1].close()


def _in_memory(fd: int) -> bool:
    """Whether the file lies on tmpfs or hugetlbfs: a fault elsewhere could wait for ever."""
    status = (ctypes.c_long * 32)()  # struct statfs begins with f_type
    if _libc.fstatfs(fd, ctypes.byref(status)) != 0:
        return False
    return status[0] & 0xFFFFFFFF in _MEMORY_FILE_SYSTEMS


def _populate_present(address: int, size: int) -> None:
    """Map those pages that the file has. Holes stay: they would be charged to this process."""
    pages = -(-size // mmap.PAGESIZE)
    present = np.zeros(pages + 2, dtype=np.uint8)
    if _libc.mincore(address, size, present[1:].ctypes.data) != 0:
        return
    edges = np.flatnonzero(np.diff(present & 1)).reshape(-1, 2)
    for first, end in edges.tolist():
        start = address + first * mmap.PAGESIZE
        populate(start, (end - first) * mmap.PAGESIZE)
