"""Finds what a rank's GPU memory is made of, and makes the handles that the daemon opens it by.

A legacy handle names a whole allocation of cudaMalloc, so there is one for each allocation,
however many tensors lie in it. Memory of cuMemCreate goes by descriptor where it was created
for that. All else is refused, here, where the engine's author can see it and do something.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvd_client.worker.cuda_kinds import (
    HandleKind,
    allocation_of,
    check_gpu,
    context_of,
    device_of,
    kind_of,
)
from kvd_client.worker.cuda_refusals import CudaMemoryRefused, CudaRefusal
from kvd_client.worker.cuda_stream import stream_end
from kvd_client.worker.memory import DeviceSpan
from kvd_client.worker.regions import IpcRegion, VmmRegion
from kvd_client.worker.spans import SpanPlace, Stretch, cover
from kvd_proto.libcuda import (
    HANDLE_TYPE_POSIX_FD,
    CudaError,
    CudaUnavailable,
    IpcHandle,
    Libcuda,
    libcuda,
)

__all__ = ["CudaRegions", "Gpu", "export_regions", "stream_end"]


@dataclass(slots=True)
class Gpu:
    """The GPU that a rank's memory is on, and a context there; closed with the memory."""

    uuid: str
    device: int
    context: int
    owns_context: bool = False  # retained by us: the memory has no context of its own

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) of its device memory, from any thread."""
        driver = libcuda()
        with driver.bound(self.context):
            return driver.memory_bytes()

    def close(self) -> None:
        if self.owns_context:
            self.owns_context = False
            with suppress(CudaError):  # a broken context needs no release
                libcuda().call("cuDevicePrimaryCtxRelease_v2", self.device)


@dataclass(slots=True)
class CudaRegions:
    """The handles that a rank sends; places[i] says where spans[i] is in `handles`.

    Descriptors in it are ours until `close`; the memory itself is the caller's.
    """

    handles: tuple[IpcRegion | VmmRegion, ...]
    gpu: Gpu
    places: tuple[SpanPlace, ...] = ()

    @property
    def gpu_uuid(self) -> str:
        return self.gpu.uuid

    def close(self) -> None:
        """Close the descriptors. What imported them already keeps its own."""
        for handle in self.handles:
            if isinstance(handle, VmmRegion):
                os.close(handle.fd)
        self.handles = ()
        self.gpu.close()


def export_regions(spans: Sequence[DeviceSpan]) -> CudaRegions:
    """Handles for the allocations that the spans lie in, and where each span is in them.

    CudaMemoryRefused with a reason and a fix where they can't be shared; then nothing is left
    open. CudaError when the driver fails. A context must be current on the calling thread.
    """
    try:
        driver = libcuda()
    except CudaUnavailable as error:
        raise CudaMemoryRefused(CudaRefusal.NO_DRIVER, str(error)) from error
    if not driver.current_context():
        raise CudaMemoryRefused(CudaRefusal.NO_CONTEXT, "this thread has no current CUDA context")
    gpu = _gpu_of(driver, spans)
    handles: list[IpcRegion | VmmRegion] = []
    try:
        with driver.bound(gpu.context):
            kinds = [kind_of(driver, span) for span in spans]
            allocations = [
                allocation_of(driver, span, kind) for span, kind in zip(spans, kinds, strict=True)
            ]
            kind_by_base = dict(zip((a.base for a in allocations), kinds, strict=True))
            stretches, places = cover(spans, allocations)
            for stretch in stretches:
                if kind_by_base[stretch.allocation.base] is HandleKind.LEGACY:
                    handles.append(_legacy_handle(driver, stretch, gpu.uuid))
                else:
                    handles.append(_exported(driver, stretch, gpu.uuid))
    except BaseException:
        CudaRegions(tuple(handles), gpu).close()
        raise
    return CudaRegions(tuple(handles), gpu, tuple(places))


def _gpu_of(driver: Libcuda, spans: Sequence[DeviceSpan]) -> Gpu:
    devices = {device_of(driver, span) for span in spans}
    if len(devices) != 1:
        raise CudaMemoryRefused(CudaRefusal.SEVERAL_GPUS, f"the KV lies on GPUs {sorted(devices)}")
    device = driver.device(devices.pop())
    check_gpu(driver, device)
    context = context_of(driver, spans[0])
    if context:
        return Gpu(driver.uuid_of(device), device, context)
    return Gpu(driver.uuid_of(device), device, driver.retain_primary(device), owns_context=True)


def _legacy_handle(driver: Libcuda, stretch: Stretch, gpu_uuid: str) -> IpcRegion:
    handle = IpcHandle()
    base = stretch.allocation.base
    try:
        driver.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    except CudaError as error:
        raise CudaMemoryRefused(
            CudaRefusal.NOT_SHAREABLE,
            f"the driver gives no handle for the memory at {base:#x}: {error}",
        ) from error
    return IpcRegion(bytes(handle), stretch.offset, stretch.bytes, gpu_uuid)


def _exported(driver: Libcuda, stretch: Stretch, gpu_uuid: str) -> VmmRegion:
    allocation, fd = stretch.allocation, ctypes.c_int(-1)
    handle = driver.retain_allocation(allocation.base)
    try:
        driver.call(
            "cuMemExportToShareableHandle", ctypes.byref(fd), handle, HANDLE_TYPE_POSIX_FD, 0
        )
    finally:
        driver.call("cuMemRelease", handle)
    os.set_inheritable(fd.value, False)
    return VmmRegion(fd.value, stretch.offset, stretch.bytes, allocation.bytes, gpu_uuid)
