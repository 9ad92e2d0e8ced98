"""`cupy.cuda.runtime`: functions by CuPy's names, with its arguments, answers and errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from ._calls import CUDARuntimeError, call, call_bound, check_status, current_device, library
from ._calls import set_device as setDevice  # noqa: N812 - CuPy's name
from ._constants import *  # noqa: F403 - they are this module's, as in CuPy
from ._constants import (
    cudaDevAttrComputeMode,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrPciBusId,
    cudaIpcMemLazyEnablePeerAccess,
    cudaMemAttachGlobal,
    memcpyDefault,
)

__all__ = ["CUDARuntimeError", "check_status", "setDevice"]  # and all else that stands here

_IPC_HANDLE_BYTES = 64
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)
_RUNTIME_VERSION = 12090
# Callbacks that a stream has yet to call, by number.
_waiting: dict[int, Any] = {}


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _IPC_HANDLE_BYTES),)


class _Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D of unified addresses."""

    _fields_ = (
        *(("from_x", c_size_t), ("from_y", c_size_t), ("from_type", c_int)),
        *(("from_host", c_void_p), ("from_device", c_ulonglong), ("from_array", c_void_p)),
        *(("from_pitch", c_size_t), ("to_x", c_size_t), ("to_y", c_size_t), ("to_type", c_int)),
        *(("to_host", c_void_p), ("to_device", c_ulonglong), ("to_array", c_void_p)),
        *(("to_pitch", c_size_t), ("width", c_size_t), ("height", c_size_t)),
    )


class PointerAttributes:
    """What pointerGetAttributes answers."""

    def __init__(self, device: int, devicePointer: int, hostPointer: int, type: int = -1) -> None:
        self.device = device
        self.devicePointer = devicePointer
        self.hostPointer = hostPointer
        self.type = type


# -- devices --


def driverGetVersion() -> int:
    return _asked("cuDriverGetVersion", c_int())


def runtimeGetVersion() -> int:
    return _RUNTIME_VERSION


def getDeviceCount() -> int:
    return _asked("cuDeviceGetCount", c_int())


def getDevice() -> int:
    library()
    return current_device()


def deviceGetAttribute(attrib: int, device: int) -> int:
    return _asked("cuDeviceGetAttribute", c_int(), attrib, device)


def deviceGetPCIBusId(device: int) -> str:
    text = ctypes.create_string_buffer(13)
    call("cuDeviceGetPCIBusId", text, len(text), device)
    return text.value.decode()


def deviceGetByPCIBusId(pci_bus_id: str) -> int:
    return _asked("cuDeviceGetByPCIBusId", c_int(), pci_bus_id.encode())


def deviceCanAccessPeer(device: int, peerDevice: int) -> int:
    return _asked("cuDeviceCanAccessPeer", c_int(), device, peerDevice)


def getDeviceProperties(device: int) -> dict[str, Any]:
    name, found = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    call("cuDeviceGetName", name, len(name), device)
    call("cuDeviceGetUuid_v2", found, device)
    return {
        "name": name.value,
        "uuid": found.raw,
        "totalGlobalMem": _asked("cuDeviceTotalMem_v2", c_size_t(), device),
        "multiProcessorCount": deviceGetAttribute(cudaDevAttrMultiProcessorCount, device),
        "computeMode": deviceGetAttribute(cudaDevAttrComputeMode, device),
        "pciBusID": deviceGetAttribute(cudaDevAttrPciBusId, device),
        "major": 9,
        "minor": 0,
    }


def deviceSynchronize() -> None:
    call_bound("cuCtxSynchronize")


def memGetInfo() -> tuple[int, int]:
    free_bytes, total = c_size_t(), c_size_t()
    call_bound("cuMemGetInfo_v2", byref(free_bytes), byref(total))
    return free_bytes.value, total.value


# -- memory --


def malloc(size: int) -> int:
    return _asked_bound("cuMemAlloc_v2", c_ulonglong(), c_size_t(size)) if size else 0


def free(ptr: int) -> None:
    call_bound("cuMemFree_v2", c_ulonglong(ptr))


def mallocManaged(size: int, flags: int = cudaMemAttachGlobal) -> int:
    return _asked_bound("cuMemAllocManaged", c_ulonglong(), c_size_t(size), c_uint(flags))


def mallocAsync(size: int, stream: int) -> int:
    return _asked_bound("cuMemAllocAsync", c_ulonglong(), c_size_t(size), c_void_p(stream))


def freeAsync(ptr: int, stream: int) -> None:
    call_bound("cuMemFreeAsync", c_ulonglong(ptr), c_void_p(stream))


def hostAlloc(size: int, flags: int) -> int:
    return _asked_bound("cuMemHostAlloc", c_void_p(), c_size_t(size), c_uint(flags))


def freeHost(ptr: int) -> None:
    call_bound("cuMemFreeHost", c_void_p(ptr))


def hostRegister(ptr: int, size: int, flags: int) -> None:
    call_bound("cuMemHostRegister_v2", c_void_p(ptr), c_size_t(size), c_uint(flags))


def hostUnregister(ptr: int) -> None:
    call_bound("cuMemHostUnregister", c_void_p(ptr))


def pointerGetAttributes(ptr: int) -> PointerAttributes:
    kind, device = c_uint(), c_int()
    on_device, on_host = c_ulonglong(), c_ulonglong()
    wanted = (c_int * 4)(2, 9, 3, 4)
    found = (c_void_p * 4)(
        *(ctypes.addressof(value) for value in (kind, device, on_device, on_host))
    )
    call_bound("cuPointerGetAttributes", 4, wanted, found, c_ulonglong(ptr))
    return PointerAttributes(device.value, on_device.value, on_host.value, kind.value)


# -- copies --


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    _check_direction(dst, src, kind)
    call_bound("cuMemcpy", c_ulonglong(dst), c_ulonglong(src), c_size_t(size))


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    _check_direction(dst, src, kind)
    to, from_, where = c_ulonglong(dst), c_ulonglong(src), c_void_p(stream)
    call_bound("cuMemcpyAsync", to, from_, c_size_t(size), where)


def memcpy2D(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int
) -> None:
    call_bound(
        "cuMemcpy2DUnaligned_v2", _rectangle((dst, dpitch), (src, spitch), width, height, kind)
    )


def memcpy2DAsync(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    rectangle = _rectangle((dst, dpitch), (src, spitch), width, height, kind)
    call_bound("cuMemcpy2DAsync_v2", rectangle, c_void_p(stream))


def memset(ptr: int, value: int, size: int) -> None:
    call_bound("cuMemsetD8_v2", c_ulonglong(ptr), ctypes.c_ubyte(value), c_size_t(size))


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    where = c_void_p(stream)
    call_bound("cuMemsetD8Async", c_ulonglong(ptr), ctypes.c_ubyte(value), c_size_t(size), where)


# -- handles for other processes --


def ipcGetMemHandle(devPtr: int) -> bytes:
    handle = _Handle()
    call_bound("cuIpcGetMemHandle", byref(handle), c_ulonglong(devPtr))
    return ctypes.string_at(byref(handle), _IPC_HANDLE_BYTES)


def ipcOpenMemHandle(handle: bytes, flags: int = cudaIpcMemLazyEnablePeerAccess) -> int:
    given = _Handle.from_buffer_copy(handle)
    return _asked_bound("cuIpcOpenMemHandle_v2", c_ulonglong(), given, c_uint(flags))


def ipcCloseMemHandle(devPtr: int) -> None:
    call_bound("cuIpcCloseMemHandle", c_ulonglong(devPtr))


# -- streams and events --


def streamCreate() -> int:
    return streamCreateWithFlags(0)


def streamCreateWithFlags(flags: int) -> int:
    return _asked_bound("cuStreamCreate", c_void_p(), c_uint(flags))


def streamCreateWithPriority(flags: int, priority: int) -> int:
    return _asked_bound("cuStreamCreateWithPriority", c_void_p(), c_uint(flags), priority)


def streamDestroy(stream: int) -> None:
    call_bound("cuStreamDestroy_v2", c_void_p(stream))


def streamSynchronize(stream: int) -> None:
    call_bound("cuStreamSynchronize", c_void_p(stream))


def streamQuery(stream: int) -> int:
    """The status itself: 0, or 600 while it works."""
    return _status_of("cuStreamQuery", stream)


def streamGetFlags(stream: int) -> int:
    value = c_uint()
    call_bound("cuStreamGetFlags", c_void_p(stream), byref(value))
    return value.value


def streamGetPriority(stream: int) -> int:
    value = c_int()
    call_bound("cuStreamGetPriority", c_void_p(stream), byref(value))
    return value.value


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    call_bound("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(flags))


def launchHostFunc(stream: int, callback: Callable[[Any], Any], arg: Any) -> None:
    """Call `callback(arg)` on the stream's thread, in its turn."""
    number = len(_waiting) + 1
    while number in _waiting:
        number += 1

    def run(_: object) -> None:
        _waiting.pop(number, None)
        callback(arg)

    _waiting[number] = function = _HOST_FUNCTION(run)
    call_bound("cuLaunchHostFunc", c_void_p(stream), function, None)


def eventCreate() -> int:
    return eventCreateWithFlags(0)


def eventCreateWithFlags(flags: int) -> int:
    return _asked_bound("cuEventCreate", c_void_p(), c_uint(flags))


def eventDestroy(event: int) -> None:
    call_bound("cuEventDestroy_v2", c_void_p(event))


def eventRecord(event: int, stream: int) -> None:
    call_bound("cuEventRecord", c_void_p(event), c_void_p(stream))


def eventSynchronize(event: int) -> None:
    call_bound("cuEventSynchronize", c_void_p(event))


def eventQuery(event: int) -> int:
    """The status itself: 0, or 600 while it has not happened."""
    return _status_of("cuEventQuery", event)


def eventElapsedTime(start: int, end: int) -> float:
    value = c_float()
    call_bound("cuEventElapsedTime", byref(value), c_void_p(start), c_void_p(end))
    return value.value


# -- how these are made of the driver's --


def _asked(name: str, value: Any, *arguments: Any) -> int:
    call(name, byref(value), *arguments)
    return int(value.value or 0)


def _asked_bound(name: str, value: Any, *arguments: Any) -> int:
    call_bound(name, byref(value), *arguments)
    return int(value.value or 0)


def _status_of(name: str, handle: int) -> int:
    try:
        call_bound(name, c_void_p(handle))
    except CUDARuntimeError as error:
        return error.status
    return 0


def _is_device(address: int) -> int:
    return int(library().kvdFakeIsDevice(c_ulonglong(address)))


def _check_direction(dst: int, src: int, kind: int) -> None:
    """A kind that the addresses belie is an invalid argument; memcpyDefault goes by them."""
    if kind not in range(5):
        raise CUDARuntimeError(21)
    if kind != memcpyDefault and kind != (2 * _is_device(src) | _is_device(dst)):
        raise CUDARuntimeError(1)


def _rectangle(
    to: tuple[int, int], source: tuple[int, int], width: int, height: int, kind: int
) -> Any:
    _check_direction(to[0], source[0], kind)
    unified = 4
    return byref(
        _Rectangle(
            from_type=unified,
            from_device=source[0],
            from_pitch=source[1],
            to_type=unified,
            to_device=to[0],
            to_pitch=to[1],
            width=width,
            height=height,
        )
    )
