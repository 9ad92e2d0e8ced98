"""The pool: the host memory that holds the blocks, its books, and its recovery after a crash."""

from kvd.pool.config import PoolConfig, PoolError
from kvd.pool.pool import Pool

__all__ = ["Pool", "PoolConfig", "PoolError"]
