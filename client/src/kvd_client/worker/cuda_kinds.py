"""What the driver says of an address and of a GPU, and whether kvd can work with it."""

from __future__ import annotations

import ctypes
import enum
import os

from kvd_client.worker.cuda_refusals import CudaMemoryRefused, CudaRefusal
from kvd_client.worker.memory import DeviceSpan
from kvd_client.worker.spans import Allocation
from kvd_proto.libcuda import (
    ERROR_INVALID_VALUE,
    ERROR_NOT_SUPPORTED,
    HANDLE_TYPE_POSIX_FD,
    LOCATION_DEVICE,
    AllocationProperties,
    ComputeMode,
    CudaError,
    DeviceAttribute,
    Libcuda,
    MemoryType,
    PointerAttribute,
)

_UNKNOWN = (
    ERROR_INVALID_VALUE,
    ERROR_NOT_SUPPORTED,
)  # what drivers say of attributes that they lack


class HandleKind(enum.Enum):
    """How an allocation on a GPU is shared."""

    LEGACY = "legacy IPC handle"
    VMM = "descriptor of a physical allocation"


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
