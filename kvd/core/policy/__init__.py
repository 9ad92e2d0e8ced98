"""Who leaves when the pool is full: eviction policies behind one seam (`base`)."""

from __future__ import annotations

from kvd.core.policy.arc import ArcPolicy
from kvd.core.policy.base import Evictable, EvictionPolicy
from kvd.core.policy.lru import LruPolicy
from kvd.core.policy.s3fifo import S3FifoPolicy
from kvd.core.policy.slot_queue import Capacity

POLICY_NAMES = ("lru", "arc", "s3fifo")


def make_policy(name: str, capacity: Capacity, max_slots: int) -> EvictionPolicy:
    """A policy for one size class.

    `capacity` answers with the slots that the class may have in use now; `max_slots` bounds
    the slot numbers. A name outside POLICY_NAMES is a broken invariant: the configuration
    checks it.
    """
    match name:
        case "lru":
            return LruPolicy(max_slots)
        case "arc":
            return ArcPolicy(capacity, max_slots)
        case "s3fifo":
            return S3FifoPolicy(capacity, max_slots)
        case _:
            raise AssertionError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")


__all__ = [
    "POLICY_NAMES",
    "ArcPolicy",
    "Evictable",
    "EvictionPolicy",
    "LruPolicy",
    "S3FifoPolicy",
    "make_policy",
]
