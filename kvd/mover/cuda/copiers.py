"""The ways to have a GPU's copy engines, or its processors, make a list of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cupy.cuda import runtime

from kvd.core.events import JobKind
from kvd.core.keys import U64
from kvd.mover.cuda.batch import BatchCall
from kvd.mover.cuda.held import HeldUntilPassed
from kvd.mover.cuda.kernel import CopyKernel, KernelUnavailable
from kvd.mover.cuda.pinned import UNREACHED, reached_by_host_address
from kvd.mover.cuda.runs import Runs
from kvd.mover.layout import GpuConfig
from kvd_proto.libcuda import libcuda

BATCH = "batch"
PLAIN = "plain"
STRIDED = "strided"
KERNEL = "kernel"

Copies = tuple[U64, U64, U64]  # destinations, sources, bytes


class CopierUnavailable(Exception):
    """This driver or device can't copy that way; the message says what is lacking."""


class Copier(Protocol):
    """One way to copy. Any thread in which the device's context is current; several at once."""

    @property
    def name(self) -> str:
        """One of the four names above."""

    def submit(self, kind: JobKind, runs: Runs, stream: int) -> None:
        """Queue the copies on the stream, in order behind what is queued there.

        Never waits for a copy. The runs need not be kept. A load's host bytes must be there
        already: work queued on the stream may not still be writing them. After CudaError or
        CuPy's CUDARuntimeError any part of the copies may be queued.
        """


def make_copier(name: str, gpu: GpuConfig) -> Copier:
    """The copier of that name; CopierUnavailable where driver or device lack it.

    To be called with the device's context current.
    """
    makers: dict[str, Callable[[GpuConfig], Copier]] = {
        BATCH: BatchCopier,
        PLAIN: PlainCopier,
        STRIDED: StridedCopier,
        KERNEL: KernelCopier,
    }
    return makers[name](gpu)


class BatchCopier:
    """One call of the driver for many copies, by its copy engines. It needs host memory that the
    device reaches by the host's own addresses."""

    name = BATCH

    def __init__(self, gpu: GpuConfig) -> None:
        if not reached_by_host_address():
            raise CopierUnavailable(UNREACHED)
        try:
            self._call = BatchCall(libcuda())
        except LookupError as error:
            raise CopierUnavailable(str(error)) from error
        self._most = gpu.batch_descriptors
        self._held: HeldUntilPassed[Copies] = HeldUntilPassed()

    def submit(self, kind: JobKind, runs: Runs, stream: int) -> None:
        self._held.release()
        copies = _directed(kind, runs.expand())
        # NVIDIA does not say whether the arrays are read during the call only.
        try:
            for start in range(0, len(copies[0]), self._most):
                rows = slice(start, start + self._most)
                some = (copies[0][rows], copies[1][rows], copies[2][rows])
                self._call.copy(kind, some, stream)
        finally:
            self._held.hold(copies, stream)


class PlainCopier:
    """One asynchronous copy per stretch, by the copy engines: what every driver has."""

    name = PLAIN

    def __init__(self, gpu: GpuConfig) -> None:
        del gpu

    def submit(self, kind: JobKind, runs: Runs, stream: int) -> None:
        columns = (column.tolist() for column in _directed(kind, runs.expand()))
        memory_kind = _memory_kind(kind)
        for destination, source, nbytes in zip(*columns, strict=True):
            runtime.memcpyAsync(destination, source, nbytes, memory_kind, stream)


class StridedCopier:
    """One asynchronous copy per run, by the copy engines, which step through it themselves."""

    name = STRIDED

    def __init__(self, gpu: GpuConfig) -> None:
        self._plain = PlainCopier(gpu)
        self._most_pitch = runtime.deviceGetAttribute(
            runtime.cudaDevAttrMaxPitch, runtime.getDevice()
        )

    def submit(self, kind: JobKind, runs: Runs, stream: int) -> None:
        pitches = (runs.host_pitch, runs.device_pitch)
        steps = runs.height > 1
        for pitch in pitches:
            # Two stretches of a run may overlap in the engine's memory, where a load's bytes
            # are the same for both; as one strided copy the driver would refuse them.
            steps &= (pitch <= self._most_pitch) & (pitch >= runs.width)
        self._submit_steps(kind, runs[steps], stream)
        self._plain.submit(kind, runs[~steps], stream)

    def _submit_steps(self, kind: JobKind, runs: Runs, stream: int) -> None:
        host = (runs.host.tolist(), runs.host_pitch.tolist())
        device = (runs.device.tolist(), runs.device_pitch.tolist())
        to, source = (host, device) if kind is JobKind.STORE else (device, host)
        shape = (runs.width.tolist(), runs.height.tolist())
        memory_kind = _memory_kind(kind)
        for row in zip(*to, *source, *shape, strict=True):
            runtime.memcpy2DAsync(*row, memory_kind, stream)


class KernelCopier:
    """A kernel that copies, on a few of the device's processors. It needs host memory that is
    registered, and waits its turn behind the kernels of other processes."""

    name = KERNEL

    def __init__(self, gpu: GpuConfig) -> None:
        del gpu
        try:
            self._kernel = CopyKernel()
        except KernelUnavailable as error:
            raise CopierUnavailable(str(error)) from error

    def submit(self, kind: JobKind, runs: Runs, stream: int) -> None:
        stretches = runs.expand(self._kernel.most_stretch_bytes)
        self._kernel.copy(_directed(kind, stretches), stream)


def _directed(kind: JobKind, stretches: tuple[U64, U64, U64]) -> Copies:
    host, device, nbytes = stretches
    return (host, device, nbytes) if kind is JobKind.STORE else (device, host, nbytes)


def _memory_kind(kind: JobKind) -> int:
    store = kind is JobKind.STORE
    chosen: int = runtime.memcpyDeviceToHost if store else runtime.memcpyHostToDevice
    return chosen
