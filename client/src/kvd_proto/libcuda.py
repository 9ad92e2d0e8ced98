"""The CUDA driver's library by ctypes: the few calls that both sides need and CuPy lacks.

Nothing is loaded at import. Signatures are those of cuda.h; a test compares them with the header
where one is installed. ctypes lets go of the interpreter's lock during a call.
"""

from __future__ import annotations

import ctypes
import uuid
from ctypes import POINTER, Structure, c_char, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64

CUDA_SUCCESS = 0
ERROR_OUT_OF_MEMORY = 2
ERROR_NOT_FOUND = 500

DevicePointer = c_ulonglong  # CUdeviceptr


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
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class DeviceUuid(Structure):
    """CUuuid."""

    _fields_ = (("bytes", c_char * 16),)


class Location(Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("alloc_flags", AllocationFlags),
    )


class AccessDescription(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class CopyAttributes(Structure):
    """CUmemcpyAttributes."""

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
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetName": (ctypes.c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(DeviceUuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAddressRange_v2": (POINTER(DevicePointer), POINTER(c_size_t), DevicePointer),
    "cuPointerGetAttribute": (c_void_p, c_int, DevicePointer),
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
    """The driver of this process, initialised. Make it by `libcuda()`."""

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

    def uuid_of(self, device: int) -> str:
        """The device's UUID as nvidia-smi and CUDA_VISIBLE_DEVICES have it, with "GPU-" before it."""
        found = DeviceUuid()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return f"GPU-{uuid.UUID(bytes=ctypes.string_at(ctypes.byref(found), 16))}"


@cache
def libcuda() -> Libcuda:
    """The driver; CudaUnavailable where there is none. The first call loads and initialises it."""
    return Libcuda()
