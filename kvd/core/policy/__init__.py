"""Who leaves when the pool is full: eviction policies behind one seam (`base`)."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.policy.base import Evictable, EvictionPolicy
from kvd.core.policy.lru import LruPolicy

POLICY_NAMES = ("lru",)


def make_policy(name: str, capacity: Callable[[], int], max_slots: int) -> EvictionPolicy:
    """A policy for one size class.

    `capacity` answers with the slots that the class owns now; `max_slots` bounds the slot
    numbers. A name outside POLICY_NAMES is a broken invariant: the configuration checks it.
    """
    match name:
        case "lru":
            return LruPolicy(max_slots)
        case _:
            raise AssertionError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")


__all__ = ["POLICY_NAMES", "Evictable", "EvictionPolicy", "LruPolicy", "make_policy"]
