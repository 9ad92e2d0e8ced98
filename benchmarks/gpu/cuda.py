"""The CUDA driver by ctypes, for the probe and the benchmarks: nothing of kvd is in it.

Signatures are cuda.h's. A function that this driver lacks raises only when it is called, so that
one missing call costs one answer and not all of them.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_void_p,
)
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whether there is a device can be asked without numpy
    import numpy as np
    import numpy.typing as npt

    U64 = npt.NDArray[np.uint64]

Pointer = c_ulonglong

HOST, DEVICE = 1, 2  # CUmemorytype
EVENT_BLOCKING = 1
STREAM_NON_BLOCKING = 1
IPC_LAZY_PEER_ACCESS = 1
REGISTER_PORTABLE_MAPPED = 3
ORDER_STREAM, ORDER_ANY = 1, 3
PREFER_OVERLAP = 1
NOT_READY = 600
PINNED, ON_DEVICE, AS_DESCRIPTOR, READ_WRITE = 1, 1, 1, 3  # CUmem* constants of cuda.h
PIDFD_GETFD = 438  # system call, Linux 5.6

DEVICE_ATTRIBUTES = {
    "multiprocessors": 16,
    "integrated": 18,
    "compute_mode": 20,
    "pci_bus": 33,
    "async_engines": 40,
    "unified_addressing": 41,
    "compute_major": 75,
    "compute_minor": 76,
    "pageable_memory_access": 88,
    "host_pointer_is_device_pointer": 91,
    "memory_node": 131,
    "host_node": 134,
}
POINTER_ATTRIBUTES = {  # name → (CUpointer_attribute, type)
    "memory_type": (2, c_uint),
    "device_pointer": (3, Pointer),
    "buffer_id": (7, c_ulonglong),
    "is_managed": (8, c_uint),
    "device": (9, c_int),
    "legacy_ipc_capable": (10, c_uint),
    "range_start": (11, Pointer),
    "range_bytes": (12, c_size_t),
    "mapped": (13, c_uint),
    "allowed_handle_types": (14, c_ulonglong),
}


class Failed(Exception):
    """A call of the driver failed, or there is no such call; the text names the code."""


class IpcHandle(Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * 64),)


class Uuid(Structure):
    """CUuuid."""

    _fields_ = (("bytes", c_char * 16),)


class Copy2D(Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *(
            field
            for side in ("source", "target")
            for field in (
                (f"{side}_x", c_size_t),
                (f"{side}_y", c_size_t),
                (f"{side}_type", c_int),
                (f"{side}_host", c_void_p),
                (f"{side}_device", Pointer),
                (f"{side}_array", c_void_p),
                (f"{side}_pitch", c_size_t),
            )
        ),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", c_int * 2),
        ("windows_only", c_void_p),
        ("flags", c_ubyte * 8),
    )


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", c_int * 2), ("flags", c_int))


class BatchAttributes(Structure):
    """CUmemcpyAttributes: the order, two locations that are left unset, flags."""

    _fields_ = (("order", c_int), ("hints", c_int * 4), ("flags", c_uint))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(Pointer), c_size_t),
    "cuMemFree_v2": (Pointer,),
    "cuMemsetD8_v2": (Pointer, c_ubyte, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, Pointer, c_size_t),
    "cuMemcpyHtoD_v2": (Pointer, c_void_p, c_size_t),
    "cuMemcpyDtoHAsync_v2": (c_void_p, Pointer, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (Pointer, c_void_p, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(Copy2D), c_void_p),
    "cuMemcpyBatchAsync": (
        *(c_void_p,) * 3,
        c_size_t,
        *(c_void_p,) * 2,
        c_size_t,
        *(c_void_p,) * 2,
    ),
    "cuMemcpyBatchAsync_v2": (*(c_void_p,) * 3, c_size_t, *(c_void_p,) * 2, c_size_t, c_void_p),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetAddressRange_v2": (POINTER(Pointer), POINTER(c_size_t), Pointer),
    "cuPointerGetAttribute": (c_void_p, c_int, Pointer),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), Pointer),
    "cuIpcOpenMemHandle_v2": (POINTER(Pointer), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (Pointer,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
}


class Cuda:
    """The driver in this process. `open_device` makes its primary context current here."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Failed(f"libcuda.so.1 can't be loaded: {error}") from error
        self._functions: dict[str, Any] = {}
        self.call("cuInit", 0)

    def has(self, name: str) -> bool:
        return getattr(self.library, name, None) is not None

    def function(self, name: str) -> Any:
        """A call of the driver, to be made as it is; Failed when the driver has no such call."""
        found = self._functions.get(name)
        if found is None:
            found = getattr(self.library, name, None)
            if found is None:
                raise Failed(f"this driver has no {name}")
            found.argtypes, found.restype = _SIGNATURES[name], c_int
            self._functions[name] = found
        return found

    def code(self, name: str, *arguments: Any) -> int:
        """The CUresult of a call; Failed only when the driver has no such call."""
        return int(self.function(name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call and raise Failed with the code's name unless it succeeds."""
        self.check(name, self.code(name, *arguments))

    def check(self, name: str, code: int) -> None:
        """Raise Failed with the code's name unless it is success."""
        if code:
            text = c_char_p()
            self.library.cuGetErrorName(c_int(code), byref(text))
            raise Failed(f"{name}: {(text.value or b'unknown').decode()} ({code})")

    # -- the device ---------------------------------------------------------------------------

    def devices(self) -> int:
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def open_device(self, number: int = 0) -> None:
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), number)
        self.call("cuCtxSetCurrent", context)
        self._context = context

    def use_in_this_thread(self) -> None:
        """A context is current by thread: the one that was opened."""
        self.call("cuCtxSetCurrent", self._context)

    def name(self, number: int = 0) -> str:
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, 128, number)
        return text.value.decode()

    def uuid(self, number: int = 0) -> str:
        found = Uuid()
        self.call("cuDeviceGetUuid_v2", byref(found), number)
        return f"GPU-{uuid.UUID(bytes=ctypes.string_at(byref(found), 16))}"

    def version(self) -> int:
        found = c_int()
        self.call("cuDriverGetVersion", byref(found))
        return found.value

    def attribute(self, number: int, device: int = 0) -> int:
        found = c_int()
        self.call("cuDeviceGetAttribute", byref(found), number, device)
        return found.value

    # -- memory -------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        address = Pointer()
        self.call("cuMemAlloc_v2", byref(address), size)
        return address.value

    def fill(self, address: int, value: int, size: int) -> None:
        """Set device memory; it is so once this returns, for other streams and processes too."""
        self.call("cuMemsetD8_v2", address, value, size)
        self.call("cuStreamSynchronize", None)

    def write(self, address: int, host: int, size: int) -> None:
        """Copy host memory to the device; it is there once this returns, as with `fill`: by itself
        a copy of pageable memory may end later, and other streams don't wait for it."""
        self.call("cuMemcpyHtoD_v2", address, host, size)
        self.call("cuStreamSynchronize", None)

    def pinned(self, size: int) -> int:
        """Pinned host memory of our own; its address."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), size, 0)
        assert address.value is not None
        return address.value

    def range_of(self, address: int) -> tuple[int, int]:
        base, size = Pointer(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    def pointer_attribute(self, name: str, address: int) -> int:
        number, kind = POINTER_ATTRIBUTES[name]
        value = kind()
        self.call("cuPointerGetAttribute", byref(value), number, address)
        return int(value.value)

    def export(self, address: int) -> bytes:
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open_handle(self, handle: bytes) -> int:
        address = Pointer()
        told = IpcHandle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", byref(address), told, IPC_LAZY_PEER_ACCESS)
        return address.value

    # -- streams and events -------------------------------------------------------------------

    def stream(self) -> int:
        made = c_void_p()
        self.call("cuStreamCreate", byref(made), STREAM_NON_BLOCKING)
        return made.value or 0

    def event(self, flags: int = 0) -> int:
        made = c_void_p()
        self.call("cuEventCreate", byref(made), flags)
        return made.value or 0

    def milliseconds(self, first: int, second: int) -> float:
        found = c_float()
        self.call("cuEventElapsedTime", byref(found), first, second)
        return found.value

    # -- copies -------------------------------------------------------------------------------

    def copy(self, is_store: bool, host: int, device: int, size: int, stream: int) -> None:
        """Queue one copy: a store reads the device, a load writes it."""
        if is_store:
            self.call("cuMemcpyDtoHAsync_v2", host, device, size, stream)
        else:
            self.call("cuMemcpyHtoDAsync_v2", device, host, size, stream)

    def copy_batch(self, is_store: bool, host: U64, device: U64, sizes: U64, stream: int) -> None:
        """Queue the copies in one call of cuMemcpyBatchAsync."""
        source, target = (device, host) if is_store else (host, device)
        order = ORDER_STREAM if is_store else ORDER_ANY
        attributes = BatchAttributes(order, (c_int * 4)(), PREFER_OVERLAP)
        first, failed = c_size_t(0), c_size_t(0)
        common = (
            target.ctypes.data,
            source.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
        )
        if self.has("cuMemcpyBatchAsync_v2"):  # CUDA 13: the same without failIdx
            self.call("cuMemcpyBatchAsync_v2", *common, stream)
        else:
            self.call("cuMemcpyBatchAsync", *common, ctypes.addressof(failed), stream)

    def copy_strided(self, is_store: bool, rows: Copy2D, stream: int) -> None:
        """Queue one cuMemcpy2DAsync; `rows` has the source's and target's types set."""
        assert (rows.source_type == DEVICE) == is_store
        self.call("cuMemcpy2DAsync_v2", byref(rows), stream)


class PhysicalMemory:
    """The driver's calls for physical allocations and their mappings, in this process."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._handles: dict[int, int] = {}

    def allocate(self, kind: str, size: int) -> int:
        """Address of a new allocation of that kind; `size` is a multiple of 2 MiB."""
        address = Pointer()
        if kind == "malloc":
            return self._cuda.allocate(size)
        if kind == "managed":
            self._raw("cuMemAllocManaged", byref(address), c_size_t(size), c_uint(1))
            return address.value
        if kind == "pool":
            self._raw("cuMemAllocAsync", byref(address), c_size_t(size), c_void_p(None))
            self._cuda.call("cuStreamSynchronize", None)
            return address.value
        wanted = Properties(type=PINNED, location=(c_int * 2)(ON_DEVICE, 0))
        wanted.handle_types = AS_DESCRIPTOR if kind == "physical, exportable" else 0
        handle = c_ulonglong()
        self._raw("cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_ulonglong(0))
        return self._map(handle, size)

    def export(self, address: int) -> int:
        """A descriptor of the physical allocation that is mapped there."""
        fd, handle = c_int(-1), c_ulonglong(self._handles[address])
        how = (c_int(AS_DESCRIPTOR), c_ulonglong(0))
        self._raw("cuMemExportToShareableHandle", byref(fd), handle, *how)
        return fd.value

    def open(self, pid: int, number: int, size: int) -> int:
        """Map what that process has under that descriptor; the descriptor is not kept."""
        pidfd = os.pidfd_open(pid)
        try:
            fd = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, number, 0)
            if fd < 0:
                raise Failed(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(pidfd)
        handle = c_ulonglong()
        try:
            self._raw("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(1))
        finally:
            os.close(fd)
        return self._map(handle, size)

    def is_physical(self, address: int) -> bool:
        """Whether the driver names a physical allocation behind the address."""
        handle = c_ulonglong()
        self._raw("cuMemRetainAllocationHandle", byref(handle), c_void_p(address))
        self._raw("cuMemRelease", handle)
        return True

    def _map(self, handle: c_ulonglong, size: int) -> int:
        address, length = Pointer(), c_size_t(size)
        zeros = (c_size_t(0), Pointer(0), c_ulonglong(0))
        self._raw("cuMemAddressReserve", byref(address), length, *zeros)
        self._raw("cuMemMap", address, length, c_size_t(0), handle, c_ulonglong(0))
        access = Access((c_int * 2)(ON_DEVICE, 0), READ_WRITE)
        self._raw("cuMemSetAccess", address, length, byref(access), c_size_t(1))
        self._handles[address.value] = handle.value
        return address.value

    def _raw(self, name: str, *arguments: Any) -> None:
        """Call with arguments that have their C types already."""
        function = getattr(self._cuda.library, name, None)
        if function is None:
            raise Failed(f"this driver has no {name}")
        self._cuda.check(name, int(function(*arguments)))


def rows_of(is_store: bool, host: tuple[int, int], device: tuple[int, int], shape: Any) -> Copy2D:
    """(address, pitch) of both sides and (width, height) as what cuMemcpy2DAsync takes."""
    rows = Copy2D(width=shape[0], height=shape[1])
    for side, is_device in (("source", is_store), ("target", not is_store)):
        address, pitch = device if is_device else host
        setattr(rows, f"{side}_type", DEVICE if is_device else HOST)
        setattr(rows, f"{side}_device" if is_device else f"{side}_host", address)
        setattr(rows, f"{side}_pitch", pitch)
    return rows
