"""Finds what a rank's GPU memory is made of, and makes the handles that the daemon opens it by.

A legacy handle names a whole allocation of cudaMalloc, so there is one for each allocation,
however many tensors lie in it. Memory of cuMemCreate goes by descriptor where it was created
for that. All else is refused, here, where the engine's author can see it and do something.
"""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvd_client.worker.cuda_refusals import CudaMemoryRefused, CudaRefusal
from kvd_client.worker.memory import DeviceSpan
from kvd_client.worker.regions import IpcRegion, VmmRegion
from kvd_client.worker.spans import Allocation, SpanPlace, Stretch, cover
from kvd_proto.libcuda import (
    ERROR_INVALID_VALUE,
    ERROR_NOT_SUPPORTED,
    HANDLE_TYPE_POSIX_FD,
    LOCATION_DEVICE,
    AllocationProperties,
    ComputeMode,
    CudaError,
    CudaUnavailable,
    DeviceAttribute,
    IpcHandle,
    Libcuda,
    MemoryType,
    PointerAttribute,
    libcuda,
)

_UNKNOWN = (ERROR_INVALID_VALUE, ERROR_NOT_SUPPORTED)  # drivers say so of attributes they lack


class HandleKind(enum.Enum):
    """How an allocation on a GPU is shared."""

    LEGACY = "legacy IPC handle"
    VMM = "descriptor of a physical allocation"


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


# -- what the driver says of an address and of a GPU -------------------------------------------


def device_of(driver: Libcuda, span: DeviceSpan) -> int:
    """The number that this process has for the GPU of a span, which has to be device memory."""
    name = f"the memory at {span.address:#x}"
    try:
        kind = driver.pointer_attribute(span.address, PointerAttribute.MEMORY_TYPE)
    except CudaError as error:
        if error.code != ERROR_INVALID_VALUE:
            raise
        raise CudaMemoryRefused(CudaRefusal.NOT_ON_CUDA, f"CUDA does not know {name}") from error
    # Managed memory may say that it is on either side.
    if _attribute(driver, span.address, PointerAttribute.IS_MANAGED):
        raise CudaMemoryRefused(CudaRefusal.MANAGED_MEMORY, f"{name} is managed memory")
    if kind != MemoryType.DEVICE:
        raise CudaMemoryRefused(CudaRefusal.HOST_MEMORY, f"{name} is host memory")
    return driver.pointer_attribute(span.address, PointerAttribute.DEVICE_ORDINAL)


def context_of(driver: Libcuda, span: DeviceSpan) -> int:
    """The context that the memory was made in; 0 for memory that belongs to none."""
    return _attribute(driver, span.address, PointerAttribute.CONTEXT)


def check_gpu(driver: Libcuda, device: int) -> None:
    """Raise CudaMemoryRefused for a GPU that is used in a way that is not proved safe."""
    name = driver.device_name(device)
    if "MIG" in name.split():
        raise CudaMemoryRefused(CudaRefusal.MIG, f"the GPU is a MIG slice ({name})")
    mode = driver.device_attribute(device, DeviceAttribute.COMPUTE_MODE)
    if mode != ComputeMode.DEFAULT:
        raise CudaMemoryRefused(
            CudaRefusal.COMPUTE_MODE,
            f"the GPU is in compute mode {mode}, in which no other process may use it",
        )
    if _has_mps(driver, device):
        raise CudaMemoryRefused(
            CudaRefusal.MPS, "the GPU is shared by MPS, which kvd's movers are not part of"
        )


def kind_of(driver: Libcuda, span: DeviceSpan) -> HandleKind:
    """How the memory at the span's start can be shared; CudaMemoryRefused if not at all."""
    name = f"the memory at {span.address:#x}"
    # Pools first: what else is said of their memory depends on how the pool was made.
    if _attribute(driver, span.address, PointerAttribute.MEMPOOL_HANDLE):
        raise CudaMemoryRefused(
            CudaRefusal.POOL_MEMORY, f"{name} comes from a stream-ordered pool (cudaMallocAsync)"
        )
    if _attribute(driver, span.address, PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE):
        return HandleKind.LEGACY
    try:
        handle = driver.retain_allocation(span.address)
    except CudaError as error:
        raise CudaMemoryRefused(
            CudaRefusal.NOT_SHAREABLE, f"{name} can't be shared with another process"
        ) from error
    try:
        properties = AllocationProperties()
        driver.call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle)
    finally:
        driver.call("cuMemRelease", handle)
    if properties.location.type != LOCATION_DEVICE:
        raise CudaMemoryRefused(CudaRefusal.HOST_MEMORY, f"{name} is host memory")
    if not properties.requested_handle_types & HANDLE_TYPE_POSIX_FD:
        raise CudaMemoryRefused(
            CudaRefusal.VMM_NOT_EXPORTABLE, f"{name} was made by cuMemCreate, not to be exported"
        )
    return HandleKind.VMM


def allocation_of(driver: Libcuda, span: DeviceSpan, kind: HandleKind) -> Allocation:
    """The allocation that the whole span lies in; CudaMemoryRefused where it reaches further."""
    name = f"the {span.bytes} bytes at {span.address:#x}"
    if kind is HandleKind.VMM:
        if not _is_one_piece(driver, span):
            raise CudaMemoryRefused(
                CudaRefusal.SEVERAL_ALLOCATIONS, f"{name} lie in several physical allocations"
            )
        found = _mapping_of(driver, span.address)
    else:
        found = Allocation(*driver.address_range(span.address))
    if span.end > found.base + found.bytes:
        raise CudaMemoryRefused(
            CudaRefusal.OUT_OF_ALLOCATION,
            f"{name} reach beyond their allocation, {found.bytes} bytes at {found.base:#x}",
        )
    return found


def _mapping_of(driver: Libcuda, address: int) -> Allocation:
    """Where a physical allocation is mapped; that is not all of the addresses reserved."""
    try:
        return Allocation(
            driver.pointer_attribute(address, PointerAttribute.MAPPING_BASE_ADDR),
            driver.pointer_attribute(address, PointerAttribute.MAPPING_SIZE),
        )
    except CudaError:  # a driver that is older than these attributes
        return Allocation(*driver.address_range(address))


def _is_one_piece(driver: Libcuda, span: DeviceSpan) -> bool:
    """Whether its two ends are mapped from the same physical allocation."""
    return _backing(driver, span.address) == _backing(driver, span.end - 1)


def _backing(driver: Libcuda, address: int) -> int | None:
    """The handle of what is mapped there, for comparison only; None for nothing."""
    try:
        handle = driver.retain_allocation(address)
    except CudaError:
        return None
    driver.call("cuMemRelease", handle)
    return handle


def _attribute(driver: Libcuda, address: int, attribute: PointerAttribute) -> int:
    """0 also where the driver is older than the attribute, or knows none for such memory."""
    try:
        return driver.pointer_attribute(address, attribute)
    except CudaError as error:
        if error.code not in _UNKNOWN:
            raise
        return 0


def _has_mps(driver: Libcuda, device: int) -> bool:
    try:
        return driver.device_attribute(device, DeviceAttribute.MPS_ENABLED) != 0
    except CudaError as error:
        if error.code not in _UNKNOWN:
            raise
        # An older driver does not say. Who set this variable meant to use MPS.
        return "CUDA_MPS_PIPE_DIRECTORY" in os.environ
