"""Watchers are told what tiers hold, as far as it is learned.

A tier may hold millions of blocks and can't name them. So a block is told of when it was written
there, or found there by a request, and told as gone when the tier is asked for it and lacks it. A
tier that has lost its process has lost all, until it is told of anew.

What was told is a mark by tag, in a table of one size. Blocks that share a mark may be told as gone
though nobody heard of them, or found and not told: a router is wrong about one block at worst.
"""

from __future__ import annotations

from kvd.core.actions import AnnounceRemoved, AnnounceStored, AnnounceTierLost
from kvd.core.blocks import slot_lifecycle
from kvd.core.keys import U64, KeyBatch, NamespaceId, ScopeName, Slots
from kvd.core.model.state import Scope, State
from kvd.core.model.tiers import TOLD_MARKS, Tier
from kvd.core.model.turn import Turn

_MASK = TOLD_MARKS - 1


def written(turn: Turn, tier: Tier, scope: Scope, slots: Slots) -> None:
    """The tier has taken these slots' blocks, all of one scope."""
    tier.told[turn.state.slots.tags[slots] & _MASK] = True
    tier.has_told = True
    where = (scope.namespace, scope.epoch, scope.account, scope.group)
    owner = turn.state.namespaces[scope.namespace].classes[scope.group]
    keys = slot_lifecycle.keys_of(turn.state, owner, slots)
    turn.orders.append(AnnounceStored(*where, keys, tier.tier))


def found(turn: Turn, tier: Tier, name: ScopeName, words: U64, tags: U64) -> None:
    """The tier says that it holds these: news where nobody was told of them."""
    if not _is_of_now(turn.state, name):
        return
    news = ~tier.told[tags & _MASK]
    if news.any():
        tier.told[tags & _MASK] = True
        tier.has_told = True
        keys = _keys(turn.state, name.namespace, words[news])
        turn.orders.append(AnnounceStored(*_where(name), keys, tier.tier))


def lacking(turn: Turn, tier: Tier, name: ScopeName, words: U64, tags: U64) -> None:
    """The tier says that it lacks these: news where watchers were told that it holds them."""
    if not tier.has_told or not _is_of_now(turn.state, name):
        return
    news = tier.told[tags & _MASK]
    if news.any():
        tier.told[tags & _MASK] = False
        keys = _keys(turn.state, name.namespace, words[news])
        turn.orders.append(AnnounceRemoved(*_where(name), keys, tier.tier))


def lost(turn: Turn, tier: Tier) -> None:
    """Nothing of the tier can be found any more."""
    if tier.has_told:
        tier.forget_told()
        turn.orders.append(AnnounceTierLost(tier.tier))


def told(state: State, tier: Tier, slots: Slots) -> Slots:
    """Those of the slots' blocks of which watchers know that the tier holds them, too."""
    if not tier.has_told:
        return slots[:0]
    there = (state.slots.below[slots] & tier.bit) != 0
    known: Slots = slots[there & tier.told[state.slots.tags[slots] & _MASK]]
    return known


def _is_of_now(state: State, name: ScopeName) -> bool:
    """Whether nobody has been told that all of it was cleared."""
    namespace = state.namespaces.get(name.namespace)
    return namespace is not None and namespace.cleared_below == name.generation


def _where(name: ScopeName) -> tuple[NamespaceId, str, str, int]:
    return name.namespace, name.epoch, name.account, name.group


def _keys(state: State, namespace: NamespaceId, words: U64) -> KeyBatch:
    return KeyBatch(words, state.namespaces[namespace].spec.hash_bytes)
