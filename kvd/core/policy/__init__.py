"""Who leaves when the pool is full: eviction policies behind one seam (`base`)."""

from __future__ import annotations

from kvd.core.policy.arc import ArcPolicy
from kvd.core.policy.auto import AutoPolicy
from kvd.core.policy.base import UNKNOWN, Evictable, EvictionPolicy, MakeGhostProbe, Sight
from kvd.core.policy.lru import LruPolicy
from kvd.core.policy.s3fifo import S3FifoPolicy
from kvd.core.policy.slot_queue import Capacity, PolicyMemory
from kvd.core.policy.turns import TurnsPolicy

POLICY_NAMES = ("lru", "arc", "s3fifo", "turns", "auto")


def make_policy(name: str, capacity: Capacity, memory: PolicyMemory) -> EvictionPolicy:
    """A policy for one size class.

    `capacity` answers with the slots that the class may have in use now; `memory` is shared by
    all policies of the pool. A name outside POLICY_NAMES is a broken invariant: the
    configuration checks it.
    """
    match name:
        case "lru":
            return LruPolicy(memory)
        case "arc":
            return ArcPolicy(capacity, memory)
        case "s3fifo":
            return S3FifoPolicy(capacity, memory)
        case "turns":
            return TurnsPolicy(capacity, memory)
        case "auto":
            return AutoPolicy(capacity, memory, make_policy)
        case _:
            raise AssertionError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")


__all__ = [
    "POLICY_NAMES",
    "UNKNOWN",
    "ArcPolicy",
    "AutoPolicy",
    "Evictable",
    "EvictionPolicy",
    "LruPolicy",
    "MakeGhostProbe",
    "PolicyMemory",
    "S3FifoPolicy",
    "Sight",
    "TurnsPolicy",
    "make_policy",
]
