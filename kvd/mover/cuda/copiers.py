"""How lists of copies are given to a GPU's copy engines.

Evenly spaced narrow stretches go as one strided copy, everything else in short batches. What each
way reaches is measured in docs/gpu-facts.md ("copies"): a strided copy has 0.95 of a large one's
speed whatever its width; a batch has 0.98 from 64 KiB a stretch on, and less below, since each
stretch costs the driver half a microsecond. A kernel of our own was slower than both beside a busy
engine, and slowed that engine's products by 60 %.

The native library makes the lists and gives them to the driver. Where there is none numpy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from kvd import native
from kvd.core.events import JobKind
from kvd.core.keys import U64
from kvd.mover.cuda.batch import BatchCall
from kvd.mover.cuda.native_lists import Limits, NativeLists
from kvd.mover.cuda.runs import Runs, runs_of
from kvd.mover.layout import GroupMap, LocatedPart
from kvd.processes.complaints import log_limited
from kvd_proto.libcuda import libcuda

BATCH = "batch"
PLAIN = "plain"  # where the driver has no batches

BATCH_COPIES = 128  # in one call: with 16 the same stretches took longer, with 4096 too
NARROW_BYTES = 64 << 10  # wider stretches are as fast in a batch
LEAST_STEPS = 8  # of a strided copy: a call takes the time of six stretches in a batch

Copies = tuple[U64, U64, U64]  # destinations, sources, bytes


@dataclass(frozen=True, slots=True)
class Memories:
    """Where copies begin and end: addresses of each region's first byte on the GPU, and of each
    extent's mapping, by its number."""

    regions: U64
    mappings: U64


class CopyList(Protocol):
    """The copies of some slots, to be submitted piece by piece."""

    @property
    def has_more(self) -> bool:
        """Whether some are not submitted yet."""

    def submit(self, most_bytes: int, stream: int) -> int:
        """Queue the next ones, of at most so many bytes, behind what is queued on the stream.

        Bytes. Never waits for a copy. A load's host bytes must be there already: work queued on
        the stream may not still be writing them. After CudaError or CuPy's CUDARuntimeError any
        part of them may be queued.
        """


class Copier:
    """Copies of one direction. To be made with the device's context current, and used by one
    thread at a time in which it is; a list must be through before the next is made. Without
    `batch` copies go one by one. A driver reads its lists before a call returns, however long
    the stream takes: docs/gpu-facts.md, "copies"."""

    def __init__(
        self, kind: JobKind, batch: BatchCall | None, library: native.Library | None
    ) -> None:
        self.kind = kind
        self._batch = batch
        self._most_pitch = runtime.deviceGetAttribute(
            runtime.cudaDevAttrMaxPitch, runtime.getDevice()
        )
        self._lists: NativeLists | None = None
        if library is not None:
            limits = Limits(BATCH_COPIES, NARROW_BYTES, LEAST_STEPS, self._most_pitch)
            is_store = kind is JobKind.STORE
            self._lists = NativeLists(library, libcuda(), batch, limits, is_store=is_store)

    @property
    def name(self) -> str:
        """How it copies what is not evenly spaced: by batches, or one by one."""
        return PLAIN if self._batch is None else BATCH

    def list(self, slots: LocatedPart, group: GroupMap, memories: Memories) -> CopyList:
        """The slots' copies. Null engine blocks have none."""
        if self._lists is not None:
            return self._lists.make(slots, group, memories.regions, memories.mappings)
        mappings, regions = memories.mappings, memories.regions.tolist()
        return _NumpyList(self, runs_of(slots, group, lambda n: int(mappings[n]), regions))

    def submit(self, runs: Runs, stream: int) -> None:
        """Queue runs of numpy's, as `CopyList.submit` says. They need not be kept."""
        steps = self._are_strided(runs)
        if not steps.any():
            self._submit_stretches(runs, stream)
            return
        _submit_strided(self.kind, runs[steps], stream)
        if not steps.all():
            self._submit_stretches(runs[~steps], stream)

    def _are_strided(self, runs: Runs) -> npt.NDArray[np.bool_]:
        """Which runs go as one strided copy each. Without batches, all that may."""
        if self._batch is None:
            steps = runs.height > 1
        else:
            steps = (runs.height >= LEAST_STEPS) & (runs.width < NARROW_BYTES)
        for pitch in (runs.host_pitch, runs.device_pitch):
            # Two stretches of a run may overlap in the engine's memory, where a load's bytes
            # are the same for both; as one strided copy the driver would refuse them.
            steps &= (pitch <= np.uint64(self._most_pitch)) & (pitch >= runs.width)
        return steps

    def _submit_stretches(self, runs: Runs, stream: int) -> None:
        copies = _directed(self.kind, runs.expand())
        if self._batch is None:
            _submit_one_by_one(self.kind, copies, stream)
            return
        for start in range(0, len(copies[0]), BATCH_COPIES):
            rows = slice(start, start + BATCH_COPIES)
            self._batch.copy(self.kind, (copies[0][rows], copies[1][rows], copies[2][rows]), stream)


class _NumpyList:
    """Runs, cut into pieces as they are asked for."""

    def __init__(self, copier: Copier, runs: Runs) -> None:
        self._copier, self._runs = copier, runs
        self._pieces: Iterator[Runs] | None = None
        self._left = runs.nbytes

    @property
    def has_more(self) -> bool:
        return self._left > 0

    def submit(self, most_bytes: int, stream: int) -> int:
        if self._pieces is None:
            self._pieces = self._runs.pieces(most_bytes)
        piece = next(self._pieces)
        self._copier.submit(piece, stream)
        self._left -= piece.nbytes
        return piece.nbytes


def batch_call() -> BatchCall | None:
    """The driver's call for batches; None, and the log is told why, where there is none."""
    attribute = runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
    if not runtime.deviceGetAttribute(attribute, runtime.getDevice()):
        # GPUs lent to WSL2 and to some virtual machines: only copies that are told one by one
        # have the addresses of registered memory translated. A batch would follow a bad one.
        log_limited("copies go one by one: the GPU can't reach host memory by its address")
        return None
    try:
        return BatchCall(libcuda())
    except LookupError as error:
        log_limited(f"copies go one by one: {error}")
        return None


def _submit_one_by_one(kind: JobKind, copies: Copies, stream: int) -> None:
    memory_kind = _memory_kind(kind)
    for destination, source, nbytes in zip(*(c.tolist() for c in copies), strict=True):
        runtime.memcpyAsync(destination, source, nbytes, memory_kind, stream)


def _submit_strided(kind: JobKind, runs: Runs, stream: int) -> None:
    host = (runs.host.tolist(), runs.host_pitch.tolist())
    device = (runs.device.tolist(), runs.device_pitch.tolist())
    to, source = (host, device) if kind is JobKind.STORE else (device, host)
    shape = (runs.width.tolist(), runs.height.tolist())
    memory_kind = _memory_kind(kind)
    for row in zip(*to, *source, *shape, strict=True):
        runtime.memcpy2DAsync(*row, memory_kind, stream)


def _directed(kind: JobKind, stretches: tuple[U64, U64, U64]) -> Copies:
    host, device, nbytes = stretches
    return (host, device, nbytes) if kind is JobKind.STORE else (device, host, nbytes)


def _memory_kind(kind: JobKind) -> int:
    store = kind is JobKind.STORE
    chosen: int = runtime.memcpyDeviceToHost if store else runtime.memcpyHostToDevice
    return chosen
