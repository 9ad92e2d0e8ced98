"""Copies by the device's processors: a kernel that gathers or scatters small stretches."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kvd.core.keys import U64
from kvd.mover.cuda.held import HeldUntilPassed
from kvd.mover.cuda.pinned import UNREACHED, reached_by_host_address

SOURCE = Path(__file__).with_name("copy_stretches.cu")
# A block of 1024 threads takes a processor: 8 leave the engine most of what any server's GPU
# has, and have half a megabyte on its way, several times what a link needs.
BLOCKS = 8
THREADS = 1024
# A warp copies a stretch alone: longer ones are cut, so that no warp is busy long after others.
MOST_STRETCH_BYTES = 16 << 10
_LEAST_STRETCHES = 4096  # room in a new list
_STRETCH = 3 * 8
_OPTIONS = ("-std=c++14",)


class KernelUnavailable(Exception):
    """The kernel can't run here; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """Pinned memory that the device reads as Stretch[]."""

    address: int
    rows: U64  # [n, 3]

    @classmethod
    def with_room(cls, stretches: int) -> _List:
        room = max(_LEAST_STRETCHES, 1 << (stretches - 1).bit_length())
        address: int = runtime.hostAlloc(room * _STRETCH, runtime.hostAllocPortable)
        memory = (ctypes.c_uint64 * (room * 3)).from_address(address)
        return cls(address, np.ctypeslib.as_array(memory).reshape(room, 3))


class _Stream:
    """CuPy takes a stream of somebody else's from what has this method."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def stream_of(stream: int) -> Any:
    """CuPy's object for a stream of ours: in a `with` it is the one that kernels go to."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Stream(stream))
    return cupy.cuda.ExternalStream(stream)  # before CuPy 14


class CopyKernel:
    """The kernel, compiled for the current device. Any thread in which its context is current.

    Host memory must be registered or pinned. The lists of stretches are kept in pinned memory
    until their stream has passed them, and then used again.
    """

    most_stretch_bytes = MOST_STRETCH_BYTES

    def __init__(self) -> None:
        if not reached_by_host_address():
            raise KernelUnavailable(UNREACHED)
        source = SOURCE.read_text()
        self._by_16 = _compiled(source, "copy_by_16")
        self._by_8 = _compiled(source, "copy_by_8")
        self._lock = threading.Lock()  # over the free lists
        self._free: list[_List] = []
        self._held: HeldUntilPassed[_List] = HeldUntilPassed()

    def copy(self, copies: tuple[U64, U64, U64], stream: int) -> None:
        """Queue copies on the stream: destinations, sources, sizes in bytes, arrays [n], all of
        them multiples of 8. Never waits for one."""
        count = len(copies[2])
        if count == 0:
            return
        listed = self._list_of(count)
        for column, values in enumerate(copies):
            listed.rows[:count, column] = values
        odd = int(np.bitwise_or.reduce(listed.rows[:count], axis=None)) % 16
        kernel = self._by_8 if odd else self._by_16
        blocks = min(BLOCKS, -(-count * 32 // THREADS))
        try:
            with stream_of(stream):
                kernel((blocks,), (THREADS,), (np.uint64(listed.address), np.uint32(count)))
        finally:
            self._held.hold(listed, stream)

    def _list_of(self, stretches: int) -> _List:
        """Room for so many, taken from what is free."""
        with self._lock:
            self._free += self._held.release()
            for number, free in enumerate(self._free):
                if len(free.rows) >= stretches:
                    return self._free.pop(number)
        return _List.with_room(stretches)


def _compiled(source: str, name: str) -> Any:
    kernel = cupy.RawKernel(source, name, options=_OPTIONS)
    try:
        kernel.compile()
    except Exception as error:
        # NVRTC is a library of its own: it may be absent, or not fit the driver.
        raise KernelUnavailable(f"the copy kernel can't be compiled: {error}") from error
    return kernel
