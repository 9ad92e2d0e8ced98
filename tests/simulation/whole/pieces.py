"""Bounds on how much one event does, made so small that a small world meets them.

A real pool's long work takes many pieces, and anything may come between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from random import Random
from typing import Any

from kvd.core.claims import hand_off, lease
from kvd.core.jobs import waiters
from kvd.core.model import backlog
from kvd.core.room import eviction, expiry, reclaim
from kvd.core.tiers import promotion, service, writing
from kvd.core.upkeep import recency
from kvd.pool import recovery, registry
from kvd.runtime import batching, driver, page_mending, row_teller
from kvd.runtime.turns import FairQueue

_BOUNDS: list[tuple[Any, str]] = [
    (backlog, "LEASES_AT_ONCE"),
    (backlog, "LEASED_BLOCKS_AT_ONCE"),
    (backlog, "PARTS_AT_ONCE"),
    (backlog, "BLOCKS_AT_ONCE"),
    (backlog, "SCOPES_CHANGED_AT_ONCE"),
    (backlog, "CLAIMED_AT_ONCE"),
    (backlog, "STORES_LOOKED_AT"),
    (backlog, "ROWS_LOOKED_AT"),
    (backlog, "SLOTS_LOOKED_AT"),
    (backlog, "SCOPES_AT_ONCE"),
    (backlog, "EMPTIED_AT_ONCE"),
    (backlog, "EMPTIED_IN_PASSING"),
    (backlog, "DROPPED_AT_ONCE"),
    (backlog, "EVICTED_AT_ONCE"),
    (backlog, "LATE_AT_ONCE"),
    (backlog, "EVICTED_FOR_A_STORE"),
    (backlog, "EVICTED_IN_A_BATCH"),
    (backlog, "NEWS_AT_ONCE"),
    (batching, "PIECE_QUERIES"),
    (batching, "LOOKUP_PIECE_KEYS"),
    (driver, "ROOMS_AT_ONCE"),
    (eviction, "CLASSES_WEIGHED"),
    (expiry, "ROWS_AT_ONCE"),
    (expiry, "ROWS_TO_GO_AT_ONCE"),
    (hand_off, "MAX_EXPIRED_AT_ONCE"),
    (hand_off, "MAX_LATE_AT_ONCE"),
    (lease, "EXPIRED_AT_ONCE"),
    (lease, "LEASES_LOOKED_AT"),
    (page_mending, "PIECES_AT_ONCE"),
    (page_mending, "TAGS_AT_ONCE"),
    (promotion, "LATE_AT_ONCE"),
    (promotion, "PROMOTED_AT_ONCE"),
    (promotion, "WOKEN_AT_ONCE"),
    (recency, "ROWS_LOOKED_AT"),
    (reclaim, "MAX_EMPTYING"),
    (reclaim, "ROWS_LOOKED_AT"),
    (reclaim, "ROWS_WEIGHED"),
    (recovery, "_BATCH_SCOPES"),
    (recovery, "_BATCH_SLOTS"),
    (registry, "PIECE_LINES"),
    (registry, "SLACK_LINES"),
    (row_teller, "ROWS_TOLD_AT_ONCE"),
    (service, "LOST_AT_ONCE"),
    (waiters, "KEYS_AT_ONCE"),
    (waiters, "WAITS_AT_ONCE"),
    (writing, "CAUGHT_UP_AT_ONCE"),
    (writing, "DEMOTED_AT_ONCE"),
]
_SHARES = (0.0, 0.3, 0.8)  # of them that are small in a world
SMALL = (1, 1, 2, 3)
_PAUSES_S = (0.0, 0.0, 0.002, 0.01)


def drawn(random: Random) -> list[tuple[Any, str, Any]]:
    """Each bound as this world has it."""
    share = random.choice(_SHARES)
    stores = (batching, "PIECE_KEYS", random.choice([2, 3, batching.PIECE_KEYS]))
    return [
        stores,
        *(
            (owner, name, random.choice(SMALL) if random.random() < share else getattr(owner, name))
            for owner, name in _BOUNDS
        ),
    ]


def pause(random: Random) -> tuple[Any, str, Any]:
    """Before each piece of the daemon's own work others may have turns for so long."""
    longest = random.choice(_PAUSES_S)
    let_others_in = FairQueue.let_others_in

    async def after_a_pause(turns: FairQueue, user: Hashable = None) -> None:
        if user is None and longest:
            await asyncio.sleep(random.random() * longest)
        await let_others_in(turns, user)

    return FairQueue, "let_others_in", after_a_pause
