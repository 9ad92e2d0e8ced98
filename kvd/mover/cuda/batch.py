"""Many copies by one call of the driver: cuMemcpyBatchAsync, which CuPy does not have."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

from kvd.core.events import JobKind
from kvd.core.keys import U64
from kvd_proto.libcuda import CUDA_SUCCESS, CopyAttributes, CudaError, Libcuda

FUNCTION = "cuMemcpyBatchAsync"
FIRST_VERSION = 12080
VERSION_WITHOUT_INDEX = 13000  # since then the call no longer tells which copy was wrong

_ORDER_STREAM = 1  # CUmemcpySrcAccessOrder
_ORDER_ANY = 3
_PREFER_OVERLAP_WITH_COMPUTE = 1  # CUmemcpyFlags
_LEGACY_STREAMS = (0, 1)  # both are names of the one that everything waits for
_ARRAYS = (c_void_p, c_void_p, c_void_p, c_size_t)  # destinations, sources, sizes, count
_ATTRIBUTES = (POINTER(CopyAttributes), POINTER(c_size_t), c_size_t)
_NO_INDEX = c_size_t(-1).value


class BatchRefused(CudaError):
    """The driver refused a batch. `index`: the copy it found fault with, where it says so."""

    def __init__(self, error: CudaError, index: int | None, what: str) -> None:
        Exception.__init__(self, f"{error}; {what}")
        self.function, self.code, self.name = error.function, error.code, error.name
        self.index = index


class BatchCall:
    """The driver's function, in the form that its version has. Any thread, several at once."""

    def __init__(self, driver: Libcuda) -> None:
        """LookupError where the driver has no such function."""
        version = driver.driver_version()
        # A driver gives the newest form that is no newer than what it is asked for: an older
        # one, asked for the form without the index, would give the one that writes it.
        self.tells_index = version < VERSION_WITHOUT_INDEX
        asked = FIRST_VERSION if self.tells_index else VERSION_WITHOUT_INDEX
        address = driver.entry(FUNCTION, asked) if version >= FIRST_VERSION else None
        if not address:
            raise LookupError(
                f"the driver has no {FUNCTION}: it speaks CUDA {version // 1000}."
                f"{version % 1000 // 10}, and CUDA 12.8 is needed"
            )
        self.address = address
        told = (POINTER(c_size_t),) if self.tells_index else ()
        self._call: Any = ctypes.CFUNCTYPE(c_int, *_ARRAYS, *_ATTRIBUTES, *told, c_void_p)(address)
        self._driver = driver

    def copy(self, kind: JobKind, copies: tuple[U64, U64, U64], stream: int) -> None:
        """Queue copies on the stream: destinations, sources, sizes in bytes, arrays [n].

        BatchRefused or CudaError where the driver refuses; some may be queued then.
        """
        assert stream not in _LEGACY_STREAMS, "the call takes no legacy stream"
        destinations, sources, sizes = map(np.ascontiguousarray, copies)
        count = len(sizes)
        if count == 0:
            return
        attributes = _attributes(kind)
        first = c_size_t(0)  # they are for all copies from this one on
        failed = c_size_t(_NO_INDEX)
        told = (byref(failed),) if self.tells_index else ()
        code = self._call(
            destinations.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            count,
            byref(attributes),
            byref(first),
            1,
            *told,
            stream,
        )
        if code == CUDA_SUCCESS:
            return
        error = self._driver.error(FUNCTION, code)
        index = failed.value if failed.value < count else None
        if index is None:
            raise BatchRefused(error, None, f"in a batch of {count} copies")
        what = f"{sources[index]:#x} to {destinations[index]:#x}, {sizes[index]} bytes"
        raise BatchRefused(error, index, f"copy {index} of {count}: {what}")


def _attributes(kind: JobKind) -> CopyAttributes:
    """A store's source is the engine's memory, read where its turn in the stream comes. A load's
    are slots that the transfer has pinned: nothing writes them from before it is queued until it
    has ended, so the driver may read them as early as it likes."""
    attributes = CopyAttributes()
    attributes.source_access_order = _ORDER_STREAM if kind is JobKind.STORE else _ORDER_ANY
    attributes.flags = _PREFER_OVERLAP_WITH_COMPUTE
    return attributes
