"""Which prefixes several pools can restore together. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvd_client.scheduler.hits import Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHits:
    """What one pool has: a flag for each page of the chain (by groups: for each of its keys).

    `policy` is SGLang's: all_pages, trailing_pages or block_groups.
    """

    name: str
    policy: str
    flags: Flags
    trailing: int = 0  # pages of the window
    block_pages: int = 0  # pages that one group of keys stands for
    group_pages: int = 0  # keys of a group


def fold(kv_pages: int, pools: Iterable[PoolHits]) -> tuple[list[int], dict[str, int]]:
    """Every prefix length that all pools can restore, rising; and each pool's own longest.

    A pool by groups has a word of its own and stands in nobody's way.
    """
    legal = np.arange(kv_pages + 1) > 0
    boundaries: dict[str, int] = {}
    for pool in pools:
        match pool.policy:
            case "all_pages":
                boundary = leading(pool.flags[:kv_pages])
                own = np.arange(kv_pages + 1) <= boundary
            case "trailing_pages":
                own = _windows(pool.flags[:kv_pages], max(1, pool.trailing))
                boundary = int(np.flatnonzero(own)[-1])
            case "block_groups":
                groups = leading(pool.flags) // max(1, pool.group_pages)
                boundaries[pool.name] = groups * pool.block_pages
                continue
            case _:
                raise ValueError(f"unknown hit policy {pool.policy!r}")
        boundaries[pool.name] = boundary
        legal &= own
    return [int(length) for length in np.flatnonzero(legal)], boundaries


def _windows(flags: Flags, width: int) -> Flags:
    """For each prefix length, from none on, whether its last `width` pages are all there."""
    missing = np.concatenate([[0], np.cumsum(~flags)])
    ends = np.arange(len(flags) + 1)
    whole: Flags = missing[ends] == missing[np.maximum(0, ends - width)]
    return whole


def leading(flags: Flags) -> int:
    """How many flags are set, from the first on."""
    return len(flags) if flags.all() else int(np.argmin(flags))
