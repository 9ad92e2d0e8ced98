"""Large zeroed arrays that take memory only where they are touched.

`np.zeros` asks the kernel for huge pages, so that one touched element in 2 MiB makes all of
them resident. Slot numbers are sparse where blocks are large (32 slots of 2 MiB use 32 of an
extent's 16384 numbers), so per-slot arrays would cost 60 bytes for slots that can't exist.
"""

from __future__ import annotations

import math
import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

SMALL_BYTES = 64 * 1024
_Scalar = TypeVar("_Scalar", bound=np.generic)


def sparse_zeros(shape: int | tuple[int, ...], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    """Zeros in anonymous private memory of small pages; freed with the last view."""
    sizes = (shape,) if isinstance(shape, int) else shape
    count = math.prod(sizes)
    bytes_wanted = max(1, count * np.dtype(dtype).itemsize)
    if bytes_wanted <= SMALL_BYTES:
        return np.zeros(sizes, dtype)  # the kernel bounds how many mappings a process may have
    memory = mmap.mmap(-1, bytes_wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(sizes)
