"""Tiers come and go, tell what they forgot, and hear of what is cleared."""

from __future__ import annotations

import numpy as np

from kvd.core.actions import ClearTier
from kvd.core.events import (
    TierAnswered,
    TierCleared,
    TierCopyEnded,
    TierDoubted,
    TierForgot,
    TierGone,
    TierStarted,
)
from kvd.core.keys import Bools
from kvd.core.model.state import Namespace
from kvd.core.model.tiers import CopyKind, Tier, TierCopy, TierPace, TierState
from kvd.core.model.turn import Turn
from kvd.core.room import reclaim
from kvd.core.tiers import pace, promotion, residence, search, writing

LOST_AT_ONCE = 4  # copies of a tier whose process has ended

TierEvent = (
    TierStarted | TierGone | TierAnswered | TierCopyEnded | TierForgot | TierDoubted | TierCleared
)


def handle(turn: Turn, event: TierEvent) -> None:
    """What a tier has to say."""
    match event:
        case TierStarted():
            _started(turn, event)
        case TierGone():
            _gone(turn, event)
        case TierAnswered():
            search.answered(turn, event)
        case TierCopyEnded():
            _copy_ended(turn, event)
        case TierForgot():
            residence.left(turn, turn.state.below.tiers[event.tier], event.name, event.keys)
        case TierDoubted():
            residence.lost(turn, turn.state.below.tiers[event.tier])
        case TierCleared():
            turn.state.below.tiers[event.tier].clearing.pop(event.fingerprint, None)


def _started(turn: Turn, event: TierStarted) -> None:
    tier = turn.state.below.tiers[event.tier]
    tier.move(TierState.SERVING)
    tier.mover = event.mover


def _gone(turn: Turn, event: TierGone) -> None:
    """No copy of it runs any more: all that it still had has failed, or soon will have."""
    state = turn.state
    tier = state.below.tiers[event.tier]
    tier.move(TierState.AWAY)
    residence.lost(turn, tier)
    search.tier_gone(turn, tier)
    state.below.lost.extend(tier.copies.values())
    tier.copies = {}
    writing.forget_late(tier)
    tier.pace, tier.paces = TierPace(), {}  # the next process has its own
    for row in list(state.retiring):
        reclaim.row_unmapped(turn, row, tier.mover)


def end_some_lost(turn: Turn) -> None:
    """A few copies of tiers that are gone."""
    lost = turn.state.below.lost
    for _ in range(min(len(lost), LOST_AT_ONCE)):
        copy = lost.popleft()
        (part,) = copy.parts
        _end(turn, copy, np.zeros(len(part.slots), dtype=np.bool_))


def _copy_ended(turn: Turn, event: TierCopyEnded) -> None:
    """Unknown ones were given up with the tier's former process."""
    tier = turn.state.below.tiers[event.tier]
    copy = tier.copies.get(event.copy)
    if copy is None:
        return
    (part,) = copy.parts
    if copy.kind is CopyKind.READ:
        _note_pace(turn, tier, copy, event)
        if len(event.missing) == len(part.slots):
            residence.not_read(turn, copy, part.slots[event.missing])
    done, damaged = event.done, event.damaged
    if len(done) != len(part.slots):  # a tier of a site's own may say anything
        done = np.zeros(len(part.slots), dtype=np.bool_)
    _end(turn, copy, done, damaged if len(damaged) == len(part.slots) else None)


def _note_pace(turn: Turn, tier: Tier, copy: TierCopy, event: TierCopyEnded) -> None:
    if event.refused:
        pace.read_refused(copy)
        tier.counters.refused += len(copy.parts[0].slots)
    else:
        pace.read_ended(copy, turn.now_ns, some_came=bool(event.done.any()))


def _end(
    turn: Turn,
    copy: TierCopy,
    done: Bools,
    damaged: Bools | None = None,
) -> None:
    copy.tier.copies.pop(copy.copy, None)
    if copy.kind is CopyKind.READ:
        promotion.ended(turn, copy, done)
    else:
        writing.ended(turn, copy, done, damaged)


def namespace_cleared(turn: Turn, namespace: Namespace) -> None:
    """No tier is asked for its blocks, or given any, until it has deleted those that it holds."""
    fingerprint = namespace.spec.fingerprint
    for tier in turn.state.below.tiers:
        tier.clearing[fingerprint] = None
        turn.orders.append(ClearTier(tier.tier, fingerprint))
