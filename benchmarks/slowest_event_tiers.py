"""What `slowest_event` has happen to a tier: all of it that one event may bring, and its end."""

from __future__ import annotations

import numpy as np

from benchmarks.slowest_event_rig import Rig
from kvd.core import actions, events, keys
from kvd.runtime.batching import PIECE_KEYS

TIER = keys.TierId(0)
SEARCHES = 64  # of one request, under way when the tier goes
FORGOTTEN = 8192  # blocks, in one word of a tier


def drive_tiers(rig: Rig, session: keys.SessionId) -> None:
    """A tier comes, is written, asked and read, forgets, is cleared, and goes."""
    rig.movers += 1
    rig.call(events.TierStarted(TIER, keys.MoverId(rig.movers)))
    written = rig.run(PIECE_KEYS)
    rig.store(session, (written,), f"{PIECE_KEYS} keys, written to a tier")
    rig.finish(f"store of {PIECE_KEYS}, written to a tier")
    end_copies(rig, "down")
    for mode in (events.LeaseMode.PREFIX, events.LeaseMode.ALL):
        seek(rig, session, mode)
    name = keys.ScopeName(rig.driver.sessions[session].namespace, "", "", 0, 0)
    rig.call(events.TierForgot(TIER, name, rig.fresh_keys(FORGOTTEN)), f"{FORGOTTEN} keys")
    rig.call(events.TierDoubted(TIER), "all that it holds")
    while rig.machine.has_work():
        rig.call(events.WorkContinued())
    context = events.RequestContext(keys.RequestId("lost"))
    for number in range(SEARCHES):
        first = number * PIECE_KEYS
        query = events.Query(
            context, 0, rig.fresh_keys(PIECE_KEYS), events.LeaseMode.ALL, first_block=first
        )
        rig.call(events.LookupRequested(session, (query,)), f"{PIECE_KEYS} keys, sought")
    rig.tiers.orders.clear()
    rig.store(session, (rig.run(PIECE_KEYS),), f"{PIECE_KEYS} keys, written to a tier")
    rig.finish(f"store of {PIECE_KEYS}, written to a tier")
    rig.call(events.TierGone(TIER), f"{SEARCHES} searches, and copies")
    rig.call(events.TierCleared(TIER, "another"))
    while rig.machine.has_work():
        rig.call(events.WorkContinued())
    rig.tiers.orders.clear()
    ended = events.RequestsEnded(session, (context.request,))
    rig.call(ended, f"{SEARCHES} searches")


def seek(rig: Rig, session: keys.SessionId, mode: events.LeaseMode) -> None:
    """Keys of one piece are sought, found and brought up."""
    context = events.RequestContext(keys.RequestId(f"sought {mode.name}"))
    query = events.Query(context, 0, rig.fresh_keys(PIECE_KEYS), mode)
    looked_up = events.LookupRequested(session, (query,))
    rig.call(looked_up, f"{PIECE_KEYS} keys, sought")
    rig.call(looked_up, f"{PIECE_KEYS} keys, being sought")
    for order in rig.tiers.take(actions.AskTier):
        held = np.ones(len(order.keys), dtype=np.bool_)
        rig.call(events.TierAnswered(TIER, order.search, held), f"{len(held)} keys")
    rig.call(events.StepEnded(session))
    while rig.machine.has_work():
        rig.call(events.WorkContinued())
    rig.call(looked_up, f"{PIECE_KEYS} keys, on their way")
    end_copies(rig, "up")
    rig.call(events.RequestsEnded(session, (context.request,)))


def end_copies(rig: Rig, way: str) -> None:
    """Tell the end of every copy, and of those that follow."""
    while copies := rig.tiers.take(actions.WriteToTier) + rig.tiers.take(actions.ReadFromTier):
        for order in copies:
            done = np.ones(len(order.keys), dtype=np.bool_)
            rig.call(events.TierCopyEnded(TIER, order.copy, done), f"{way}, {len(done)} keys")
