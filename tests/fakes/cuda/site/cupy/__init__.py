"""The part of CuPy that a mover uses, over whatever libcuda.so.1 this process finds.

Names, signatures, return values and errors are those of CuPy 14. There are no arrays here.
"""

from . import cuda
from ._raw import RawKernel, RawModule

__version__ = "14.2.0"

__all__ = ["RawKernel", "RawModule", "cuda"]
