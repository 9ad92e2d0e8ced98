"""How lists of copies are given to a GPU's copy engines.

Evenly spaced narrow stretches go as one strided copy, everything else in short batches. What each
way reaches is measured in docs/gpu-facts.md ("copies"): a strided copy has 0.95 of a large one's
speed whatever its width; a batch has 0.98 from 64 KiB a stretch on, and less below, since each
stretch costs the driver half a microsecond. Longer batches were slower than short ones. A kernel
of our own was slower than both beside a busy engine, and slowed that engine's products by 60 %.
"""

from __future__ import annotations

import numpy as np
from cupy.cuda import runtime

from kvd.core.events import JobKind
from kvd.core.keys import U64
from kvd.mover.cuda.batch import BatchCall
from kvd.mover.cuda.held import HeldUntilPassed
from kvd.mover.cuda.runs import Runs
from kvd.processes.complaints import log_limited
from kvd_proto.libcuda import libcuda

BATCH = "batch"
PLAIN = "plain"  # where the driver has no batches

BATCH_COPIES = 128  # in one call: with 512 and more the same stretches took longer, with 16 too
NARROW_BYTES = 64 << 10  # wider stretches are as fast in a batch
LEAST_STEPS = 8  # of a strided copy: a call takes the time of six stretches in a batch

Copies = tuple[U64, U64, U64]  # destinations, sources, bytes


class Copier:
    """Queues copies on streams. Any thread in which the device's context is current; several at
    once. To be made with that context current. Without `batch` copies go one by one."""

    def __init__(self, batch: BatchCall | None) -> None:
        self._batch = batch
        self._most_pitch = np.uint64(
            runtime.deviceGetAttribute(runtime.cudaDevAttrMaxPitch, runtime.getDevice())
        )
        self._held: HeldUntilPassed[Copies] = HeldUntilPassed()

    @property
    def name(self) -> str:
        """How it copies what is not evenly spaced: by batches, or one by one."""
        return PLAIN if self._batch is None else BATCH

    def submit(self, kind: JobKind, runs: Runs, stream: int) -> None:
        """Queue the copies on the stream, behind what is queued there.

        Never waits for a copy. The runs need not be kept. A load's host bytes must be there
        already: work queued on the stream may not still be writing them. After CudaError or
        CuPy's CUDARuntimeError any part of the copies may be queued.
        """
        steps = self._are_strided(runs)
        if not steps.any():
            self._submit_stretches(kind, runs, stream)
            return
        _submit_strided(kind, runs[steps], stream)
        if not steps.all():
            self._submit_stretches(kind, runs[~steps], stream)

    def _are_strided(self, runs: Runs) -> np.typing.NDArray[np.bool_]:
        """Which runs go as one strided copy each. Without batches, all that may."""
        if self._batch is None:
            steps = runs.height > 1
        else:
            steps = (runs.height >= LEAST_STEPS) & (runs.width < NARROW_BYTES)
        for pitch in (runs.host_pitch, runs.device_pitch):
            # Two stretches of a run may overlap in the engine's memory, where a load's bytes
            # are the same for both; as one strided copy the driver would refuse them.
            steps &= (pitch <= self._most_pitch) & (pitch >= runs.width)
        return steps

    def _submit_stretches(self, kind: JobKind, runs: Runs, stream: int) -> None:
        copies = _directed(kind, runs.expand())
        if self._batch is None:
            _submit_one_by_one(kind, copies, stream)
            return
        self._held.release()
        # NVIDIA does not say whether the arrays are read during the call only.
        try:
            for start in range(0, len(copies[0]), BATCH_COPIES):
                rows = slice(start, start + BATCH_COPIES)
                self._batch.copy(kind, (copies[0][rows], copies[1][rows], copies[2][rows]), stream)
        finally:
            self._held.hold(copies, stream)


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
