"""Calls of the driver as the CUDA runtime makes them: lazily, in the device's primary context."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any

# The runtime's names of what the driver answers, by code: they are not the driver's own.
NAMES = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    3: "cudaErrorInitializationError",
    35: "cudaErrorInsufficientDriver",
    46: "cudaErrorDevicesUnavailable",
    100: "cudaErrorNoDevice",
    101: "cudaErrorInvalidDevice",
    201: "cudaErrorDeviceUninitialized",
    205: "cudaErrorMapBufferObjectFailed",
    208: "cudaErrorAlreadyMapped",
    214: "cudaErrorECCUncorrectable",
    304: "cudaErrorOperatingSystem",
    400: "cudaErrorInvalidResourceHandle",
    500: "cudaErrorSymbolNotFound",
    600: "cudaErrorNotReady",
    700: "cudaErrorIllegalAddress",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    713: "cudaErrorHostMemoryNotRegistered",
    716: "cudaErrorMisalignedAddress",
    719: "cudaErrorLaunchFailure",
    801: "cudaErrorNotSupported",
    999: "cudaErrorUnknown",
}
INSUFFICIENT_DRIVER = 35

_library: ctypes.CDLL | None = None
_contexts: dict[int, int] = {}
_lock = threading.Lock()
_thread = threading.local()


class CUDARuntimeError(RuntimeError):
    """A call failed; `status` is its cudaError_t."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{NAMES.get(status, 'cudaErrorUnknown')}: {_text_of(status)}")

    def __reduce__(self) -> tuple[type[CUDARuntimeError], tuple[int]]:
        return (type(self), (self.status,))


def check_status(status: int) -> None:
    if status != 0:
        raise CUDARuntimeError(status)


def library() -> ctypes.CDLL:
    """The driver, initialised."""
    global _library
    if _library is None:
        try:
            loaded = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise CUDARuntimeError(INSUFFICIENT_DRIVER) from None
        check_status(loaded.cuInit(0))
        _library = loaded
    return _library


def current_device() -> int:
    return getattr(_thread, "device", 0)


def set_device(device: int) -> None:
    found = c_int()
    call("cuDeviceGet", byref(found), device)
    _thread.device = device
    _make_current(device)


def bind() -> None:
    """Have a context in this thread: the one that is, or else the device's primary one."""
    current = c_void_p()
    call("cuCtxGetCurrent", byref(current))
    if not current.value:
        _make_current(current_device())


def call(name: str, *arguments: Any) -> None:
    """Call the driver, whatever the context."""
    check_status(getattr(library(), name)(*arguments))


def call_bound(name: str, *arguments: Any) -> None:
    """Call the driver with a context."""
    bind()
    call(name, *arguments)


def _make_current(device: int) -> None:
    with _lock:
        if device not in _contexts:
            made = c_void_p()
            call("cuDevicePrimaryCtxRetain", byref(made), device)
            _contexts[device] = made.value or 0
    call("cuCtxSetCurrent", c_void_p(_contexts[device]))


def _text_of(status: int) -> str:
    if status == INSUFFICIENT_DRIVER:
        return "CUDA driver version is insufficient for CUDA runtime version"
    text = c_char_p()
    if _library is None or _library.cuGetErrorString(status, byref(text)) != 0 or not text.value:
        return NAMES.get(status, "unknown error")
    return text.value.decode()
