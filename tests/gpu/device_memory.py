"""Device memory of this process by the driver's own calls: what the tests do around kvd.

Needs neither CuPy nor torch, and none of kvd's own declarations, so that these are checked too.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_ulonglong, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
KINDS = ("malloc", "vmm_exportable", "vmm", "managed", "pool")
POSIX_FD = 1
POOL_CURRENT_BYTES = 7


class DriverError(Exception):
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: CUresult {code}")
        self.code = code


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_char * 64),)


class Properties(ctypes.Structure):
    """CUmemAllocationProp of device memory."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location", c_int),
        ("windows", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", c_int), ("location", c_int), ("flags", c_int))


class DeviceMemory:
    """Allocations on one device, in its primary context, which is current in this thread."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        self.library.cuIpcOpenMemHandle_v2.argtypes = (POINTER(c_ulonglong), Handle, ctypes.c_uint)
        self.call("cuInit", 0)
        number, self.context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(number), device)
        self.device = number.value
        self._before = c_void_p()
        self.call("cuCtxGetCurrent", byref(self._before))
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), self.device)
        self.call("cuCtxSetCurrent", self.context)
        self._kinds: dict[int, tuple[str, int, int]] = {}  # kind, bytes, VMM handle

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver; DriverError unless it succeeds."""
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise DriverError(name, code)

    def close(self) -> None:
        """Free what is left, and let go of the context: the one before is current again."""
        for address in list(self._kinds):
            self.free(address)
        self.call("cuCtxSetCurrent", self._before)
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)

    def allocate(self, nbytes: int, kind: str = "malloc") -> int:
        """Address of new device memory of one of KINDS."""
        assert kind in KINDS, kind
        address, handle = c_ulonglong(), 0
        if kind == "malloc":
            self.call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        elif kind == "managed":
            self.call("cuMemAllocManaged", byref(address), c_size_t(nbytes), 1)
        elif kind == "pool":
            self.call("cuMemAllocAsync", byref(address), c_size_t(nbytes), None)
            self.call("cuStreamSynchronize", None)
        else:
            handle_type = POSIX_FD if kind == "vmm_exportable" else 0
            handle, nbytes = self._create(nbytes, handle_type)
            address.value = self._map(handle, nbytes)
        self._kinds[address.value] = (kind, nbytes, handle)
        return address.value

    def free(self, address: int) -> None:
        """Give an allocation back."""
        kind, nbytes, handle = self._kinds.pop(address)
        if kind.startswith("vmm"):
            self.unmap(address, nbytes, handle)
        elif kind == "pool":
            self.call("cuMemFreeAsync", c_ulonglong(address), None)
            self.call("cuStreamSynchronize", None)
        else:
            self.call("cuMemFree_v2", c_ulonglong(address))

    def write(self, address: int, content: bytes) -> None:
        """Put bytes into device memory; they are there once this returns."""
        held = ctypes.create_string_buffer(content, len(content))
        where = c_ulonglong(ctypes.addressof(held))
        self.call("cuMemcpy", c_ulonglong(address), where, c_size_t(len(content)))
        # From pageable memory the call may return before the last of it has landed.
        self.call("cuStreamSynchronize", None)

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of device memory."""
        held = ctypes.create_string_buffer(nbytes)
        where = c_ulonglong(ctypes.addressof(held))
        self.call("cuMemcpy", where, c_ulonglong(address), c_size_t(nbytes))
        return held.raw

    def address_range(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation around an address."""
        base, nbytes = c_ulonglong(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), c_ulonglong(address))
        return base.value, nbytes.value

    def ipc_handle(self, address: int) -> tuple[bytes, int, int]:
        """(handle, offset, size) of the allocation around an address."""
        base, nbytes = self.address_range(address)
        handle = Handle()
        self.call("cuIpcGetMemHandle", byref(handle), c_ulonglong(base))
        return ctypes.string_at(byref(handle), 64), address - base, nbytes

    def open_handle(self, handle: bytes) -> int:
        """Address of another process's allocation in this one."""
        address, given = c_ulonglong(), Handle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", byref(address), given, 1)
        return address.value

    def close_handle(self, address: int) -> None:
        """Close what `open_handle` opened."""
        self.call("cuIpcCloseMemHandle", c_ulonglong(address))

    def export_fd(self, address: int) -> int:
        """A descriptor that names a "vmm_exportable" allocation; the caller closes it."""
        handle, fd = self._kinds[address][2], c_int(-1)
        self.call(
            "cuMemExportToShareableHandle", byref(fd), c_ulonglong(handle), POSIX_FD, c_ulonglong(0)
        )
        return fd.value

    def import_fd(self, fd: int, nbytes: int) -> tuple[int, int]:
        """(address, handle) of another process's VMM allocation; `unmap` gives it back."""
        handle = c_ulonglong()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), POSIX_FD)
        return self._map(handle.value, nbytes), handle.value

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """Give VMM memory back: its mapping, its addresses, its handle."""
        self.call("cuMemUnmap", c_ulonglong(address), c_size_t(nbytes))
        self.call("cuMemAddressFree", c_ulonglong(address), c_size_t(nbytes))
        self.call("cuMemRelease", c_ulonglong(handle))

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def _create(self, nbytes: int, handle_types: int) -> tuple[int, int]:
        properties = Properties(1, handle_types, 1, self.device)
        granularity, handle = c_size_t(), c_ulonglong()
        self.call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), 0)
        nbytes = -(-nbytes // granularity.value) * granularity.value
        self.call("cuMemCreate", byref(handle), c_size_t(nbytes), byref(properties), c_ulonglong(0))
        return handle.value, nbytes

    def _map(self, handle: int, nbytes: int) -> int:
        address, size = c_ulonglong(), c_size_t(nbytes)
        zero, access = c_ulonglong(0), Access(1, self.device, 3)
        self.call("cuMemAddressReserve", byref(address), size, c_size_t(0), zero, zero)
        self.call("cuMemMap", address, size, c_size_t(0), c_ulonglong(handle), zero)
        self.call("cuMemSetAccess", address, size, byref(access), c_size_t(1))
        return address.value
