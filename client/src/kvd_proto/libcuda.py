"""The CUDA driver's library by ctypes: the few calls that both sides need and CuPy lacks.

Nothing is loaded at import. Signatures are those of cuda.h; a test compares them with the header
where one is installed. ctypes lets go of the interpreter's lock during a call.
"""

from __future__ import annotations

import ctypes
import enum
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_char, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64

CUDA_SUCCESS = 0
ERROR_INVALID_VALUE = 1
ERROR_OUT_OF_MEMORY = 2
ERROR_NOT_FOUND = 500
ERROR_NOT_SUPPORTED = 801

HANDLE_TYPE_POSIX_FD = 1  # CUmemAllocationHandleType
LOCATION_DEVICE = 1  # CUmemLocationType
EVENT_BLOCKING_SYNC = 1  # CUevent_flags: whoever waits sleeps instead of spinning
EVENT_DISABLE_TIMING = 2
NAME_BYTES = 256  # room for a device's name
PCI_BUS_ID_BYTES = 32

DevicePointer = c_ulonglong  # CUdeviceptr


class PointerAttribute(enum.IntEnum):
    """CUpointer_attribute: those that kvd asks for."""

    CONTEXT = 1
    MEMORY_TYPE = 2
    IS_MANAGED = 8
    DEVICE_ORDINAL = 9
    IS_LEGACY_CUDA_IPC_CAPABLE = 10
    MEMPOOL_HANDLE = 17
    MAPPING_SIZE = 18
    MAPPING_BASE_ADDR = 19


class DeviceAttribute(enum.IntEnum):
    """CUdevice_attribute: those that kvd asks for."""

    COMPUTE_MODE = 20
    MPS_ENABLED = 133


class MemoryType(enum.IntEnum):
    """CUmemorytype: what kind of memory a pointer is to."""

    HOST = 1
    DEVICE = 2
    ARRAY = 3
    UNIFIED = 4


class ComputeMode(enum.IntEnum):
    """CUcomputemode: which processes may use a device."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class CaptureMode(enum.IntEnum):
    """CUstreamCaptureMode: what a thread may do while another one captures a graph."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


class CudaError(Exception):
    """A call of the driver failed. `code` is its CUresult, `name` that code's name."""

    def __init__(self, function: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{function}: {name} ({code}): {text}")
        self.function = function
        self.code = code
        self.name = name


class CudaUnavailable(Exception):
    """There is no usable driver in this process; the message says what was tried."""


class IpcHandle(Structure):
    """CUipcMemHandle: an allocation's name for other processes."""

    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class DeviceUuid(Structure):
    """CUuuid: a device's name, the same in every process."""

    _fields_ = (("bytes", c_char * 16),)


class Location(Structure):
    """CUmemLocation: the device that memory is on."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(Structure):
    """CUmemAllocationProp.allocFlags, all unused here."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(Structure):
    """CUmemAllocationProp: how physical memory was allocated."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("alloc_flags", AllocationFlags),
    )


class AccessDescription(Structure):
    """CUmemAccessDesc: which device may do what with mapped memory."""

    _fields_ = (("location", Location), ("flags", c_int))


class CopyAttributes(Structure):
    """CUmemcpyAttributes: how one of a batch of copies is to be made."""

    _fields_ = (
        ("source_access_order", c_int),
        ("source_location_hint", Location),
        ("destination_location_hint", Location),
        ("flags", c_uint),
    )


# Exported names (cuda.h maps the plain ones to these), with the types of their arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetName": (ctypes.c_char_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(DeviceUuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAddressRange_v2": (POINTER(DevicePointer), POINTER(c_size_t), DevicePointer),
    "cuPointerGetAttribute": (c_void_p, c_int, DevicePointer),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), DevicePointer),
    "cuMemRetainAllocationHandle": (POINTER(c_ulonglong), c_void_p),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(AllocationProperties), c_ulonglong),
    "cuMemExportToShareableHandle": (c_void_p, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_ulonglong), c_void_p, c_int),
    "cuMemAddressReserve": (
        POINTER(DevicePointer),
        c_size_t,
        c_size_t,
        DevicePointer,
        c_ulonglong,
    ),
    "cuMemAddressFree": (DevicePointer, c_size_t),
    "cuMemMap": (DevicePointer, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (DevicePointer, c_size_t),
    "cuMemSetAccess": (DevicePointer, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemRelease": (c_ulonglong,),
    "cuGetProcAddress_v2": (
        ctypes.c_char_p,
        POINTER(c_void_p),
        c_int,
        c_ulonglong,
        POINTER(c_int),
    ),
}


class Libcuda:
    """The CUDA driver of this process, initialised. Make it by `libcuda()`."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaUnavailable(f"{LIBRARY} can't be loaded: {error}") from error
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise CudaUnavailable(f"{LIBRARY} has no {name}: the driver is too old")
            function.argtypes = arguments
            function.restype = c_int
        try:
            self.call("cuInit", 0)
        except CudaError as error:
            raise CudaUnavailable(f"the CUDA driver can't be used: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call one of the functions above; CudaError unless it succeeds."""
        code: int = getattr(self._library, name)(*arguments)
        if code != CUDA_SUCCESS:
            raise self.error(name, code)

    def error(self, function: str, code: int) -> CudaError:
        """The error that a CUresult stands for."""
        texts = []
        for query in ("cuGetErrorName", "cuGetErrorString"):
            found = ctypes.c_char_p()
            ask = getattr(self._library, query)
            known = ask(c_int(code), ctypes.byref(found)) == CUDA_SUCCESS and found.value
            texts.append(found.value.decode() if known and found.value else "unknown")
        return CudaError(function, code, texts[0], texts[1])

    def driver_version(self) -> int:
        """The CUDA version that the driver speaks: 1000 * major + 10 * minor."""
        version = c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return version.value

    def entry(self, name: str, cuda_version: int) -> int | None:
        """Address of a function as of a CUDA version; None where this driver has none."""
        address, found = c_void_p(), c_int()
        try:
            self.call(
                "cuGetProcAddress_v2",
                name.encode(),
                ctypes.byref(address),
                cuda_version,
                0,
                ctypes.byref(found),
            )
        except CudaError as error:
            if error.code == ERROR_NOT_FOUND:
                return None
            raise
        return address.value

    def address(self, name: str) -> int:
        """Address of an exported function."""
        found = ctypes.cast(getattr(self._library, name), c_void_p).value
        assert found is not None
        return found

    def device(self, number: int) -> int:
        """The handle of the device with this number among those that this process sees."""
        found = c_int()
        self.call("cuDeviceGet", ctypes.byref(found), number)
        return found.value

    def device_attribute(self, device: int, attribute: DeviceAttribute) -> int:
        """CudaError with ERROR_INVALID_VALUE where the driver is older than the attribute."""
        value = c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def pointer_attribute(self, address: int, attribute: PointerAttribute) -> int:
        """What the driver knows of an address; CudaError where that address is none of CUDA's.

        Handles and addresses come as integers, 0 for none.
        """
        # The driver writes 4 or 8 bytes: little-endian, so both read right in a cleared word.
        value = c_ulonglong(0)
        self.call("cuPointerGetAttribute", ctypes.byref(value), attribute, address)
        return value.value

    def address_range(self, address: int) -> tuple[int, int]:
        """(first address, bytes) of the allocation that the address lies in."""
        base, size = DevicePointer(), c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def retain_allocation(self, address: int) -> int:
        """The handle of the physical allocation mapped there, to be given to cuMemRelease."""
        handle = c_ulonglong()
        self.call("cuMemRetainAllocationHandle", ctypes.byref(handle), address)
        return handle.value

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the current context's device."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def current_context(self) -> int:
        """This thread's context; 0 for none."""
        context = c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    @contextmanager
    def bound(self, context: int) -> Iterator[None]:
        """This context is this thread's current one inside; what was current is so again after.

        Nothing that this thread calls inside breaks a graph that another one is capturing.
        """
        before = self.current_context()
        self.call("cuCtxSetCurrent", context)
        mode = c_int(CaptureMode.RELAXED)
        try:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self.call("cuCtxSetCurrent", before)

    def retain_primary(self, device: int) -> int:
        """The device's primary context, made where there is none; to be released again."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def device_name(self, device: int) -> str:
        """As nvidia-smi has it; that of a MIG slice has "MIG" in it."""
        name = ctypes.create_string_buffer(NAME_BYTES)
        self.call("cuDeviceGetName", name, NAME_BYTES, device)
        return name.value.decode(errors="replace")

    def pci_bus_id(self, device: int) -> str:
        """Its place on the bus: "domain:bus:device.function"; the domain has 4 to 8 digits.

        The runtime's own call has room for 4, and fails where there are more.
        """
        place = ctypes.create_string_buffer(PCI_BUS_ID_BYTES)
        self.call("cuDeviceGetPCIBusId", place, PCI_BUS_ID_BYTES, device)
        return place.value.decode(errors="replace")

    def uuid_of(self, device: int) -> str:
        """The UUID, as CUDA_VISIBLE_DEVICES takes it: "GPU-" and 36 characters."""
        found = DeviceUuid()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return f"GPU-{uuid.UUID(bytes=ctypes.string_at(ctypes.byref(found), 16))}"


@cache
def libcuda() -> Libcuda:
    """The driver; CudaUnavailable where there is none. The first call loads and initialises it."""
    return Libcuda()
