"""The engine's allocations, opened in this process: by legacy IPC handle or by descriptor.

A handle names a whole allocation, and regions are stretches of it: each distinct handle is opened
once, however many regions lie in it, and closed once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cupy.cuda import runtime

from kvd.core.errors import InvalidArgument
from kvd.mover.cuda.device import ONLY, Device
from kvd.mover.facts import CUDA_IPC, CUDA_VMM
from kvd.mover.layout import CudaRegion
from kvd.mover.registration_errors import GPU_HANDLE_REFUSED
from kvd_proto.libcuda import (
    HANDLE_TYPE_POSIX_FD,
    IPC_HANDLE_BYTES,
    LOCATION_DEVICE,
    AccessDescription,
    CudaError,
    DevicePointer,
    Libcuda,
    Location,
    libcuda,
)

_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PID_HINT = (
    "Where engine and daemon run in containers, both may be process 1 of their own, and such a "
    "handle is not opened: let them share a PID namespace (hostPID)."
)


@dataclass(frozen=True, slots=True)
class _Opened:
    """An allocation in this process: `bytes` from `address` on."""

    address: int
    bytes: int
    close: Callable[[], None]


class Imports:
    """All regions of a rank, reachable by device address while this is open.

    addresses: of each region's first byte. Raises InvalidArgument naming the memory, with
    nothing left open.
    """

    def __init__(self, device: Device, regions: Sequence[CudaRegion]) -> None:
        self._device = device
        self._driver = libcuda()
        self._opened: dict[bytes | int, _Opened] = {}
        try:
            self.addresses = tuple(
                self._place(region, f"memories[{number}]") for number, region in enumerate(regions)
            )
        except BaseException:
            self.close()
            raise
        self.transport = CUDA_VMM if all(r.fd >= 0 for r in regions) else CUDA_IPC

    def close(self) -> None:
        """Close every allocation, the last opened first. No copy may be under way."""
        while self._opened:
            self._opened.popitem()[1].close()

    def _place(self, region: CudaRegion, name: str) -> int:
        """The region's address, with its allocation opened unless it is already."""
        key = region.handle or _file_of(region.fd, name)
        if key not in self._opened:
            opened = self._open_handle if region.handle else self._import_descriptor
            self._opened[key] = opened(region, name)
        allocation = self._opened[key]
        end = region.offset + region.bytes
        if end > allocation.bytes:
            raise InvalidArgument(
                f"{name} ends at byte {end} of its allocation, which has {allocation.bytes}: "
                "register memory that lies in one allocation",
                f"{name}.bytes",
            )
        return allocation.address + region.offset

    # -- legacy handles -------------------------------------------------------------------

    def _open_handle(self, region: CudaRegion, name: str) -> _Opened:
        if len(region.handle) != IPC_HANDLE_BYTES:
            raise InvalidArgument(
                f"{name}.cuda_ipc.handle has {len(region.handle)} bytes, not {IPC_HANDLE_BYTES}",
                f"{name}.cuda_ipc.handle",
            )
        try:
            address = int(runtime.ipcOpenMemHandle(region.handle))
        except runtime.CUDARuntimeError as error:
            raise _refused(
                f"{name}: the driver does not open its IPC handle ({error}). It must be of memory "
                f"on {self._device.uuid} that another process made by cudaMalloc and has not "
                f"freed. {_PID_HINT}",
                name,
            ) from error
        try:
            base, size = self._driver.address_range(address)
        except CudaError as error:
            runtime.ipcCloseMemHandle(address)
            raise _refused(
                f"{name}: the driver does not tell the size of its allocation ({error}), so what "
                "the worker said can't be checked.",
                name,
            ) from error
        return _Opened(address, base + size - address, lambda: runtime.ipcCloseMemHandle(address))

    # -- exported physical allocations ----------------------------------------------------

    def _import_descriptor(self, region: CudaRegion, name: str) -> _Opened:
        if region.allocation_bytes <= 0:
            raise InvalidArgument(
                f"{name}.vmm_fd.allocation_bytes is {region.allocation_bytes}; say the whole "
                "allocation's size",
                f"{name}.vmm_fd.allocation_bytes",
            )
        handle = ctypes.c_ulonglong()
        try:
            self._driver.call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(region.fd),
                HANDLE_TYPE_POSIX_FD,
            )
        except CudaError as error:
            raise _refused(
                f"{name}: the driver does not import its descriptor ({error}). It must be of an "
                "allocation of cuMemCreate that was made exportable as a POSIX file descriptor.",
                name,
            ) from error
        try:
            return _map(self._driver, handle.value, region.allocation_bytes)
        except CudaError as error:
            raise _refused(
                f"{name}: {region.allocation_bytes} bytes of it can't be mapped ({error}). "
                f"allocation_bytes must be its allocation's size, on {self._device.uuid}.",
                name,
            ) from error
        finally:
            # What is mapped stays: the mapping holds the memory, not this handle.
            self._driver.call("cuMemRelease", handle.value)


def _map(driver: Libcuda, handle: int, size: int) -> _Opened:
    """Reserve addresses, map the allocation there and open it for this GPU; or nothing."""
    reserved = DevicePointer()
    driver.call("cuMemAddressReserve", ctypes.byref(reserved), size, 0, 0, 0)
    address = reserved.value
    undo: list[tuple[str, int, int]] = [("cuMemAddressFree", address, size)]
    try:
        driver.call("cuMemMap", address, size, 0, handle, 0)
        undo.insert(0, ("cuMemUnmap", address, size))
        access = AccessDescription(Location(LOCATION_DEVICE, ONLY), _READ_WRITE)
        driver.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
    except CudaError:
        _call_all(driver, undo)
        raise
    return _Opened(address, size, lambda: _call_all(driver, undo))


def _call_all(driver: Libcuda, calls: Sequence[tuple[str, int, int]]) -> None:
    for function, address, size in calls:
        driver.call(function, address, size)


def _file_of(fd: int, name: str) -> int:
    """What tells descriptors of one allocation apart from those of others."""
    try:
        os.fstat(fd)
    except OSError as error:
        raise InvalidArgument(f"{name} is no open descriptor: {error}", name) from error
    # By number: files of the driver may all share one inode. Each token is one descriptor.
    return fd


def _refused(message: str, name: str) -> InvalidArgument:
    return InvalidArgument(message, name, GPU_HANDLE_REFUSED)
