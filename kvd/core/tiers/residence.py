"""Watchers are told what tiers hold, as far as it is learned.

A tier may hold millions of blocks and can't name them. So a block is told of when it was written
there, or found there by a request. It is told as gone when the tier says that it has left, and when
the tier is asked for it, or to read it, and lacks it. Where nodes share a store nobody says what
leaves: what watchers know of that is a hint, until somebody asks. A tier that has lost its process,
or can't say what has left, has lost all, until it is told of anew.

What was told is a mark by tag, in a table of one size. Blocks that share a mark may be told as gone
though nobody heard of them, or found and not told: a router is wrong about one block at worst.

The core's own bits, which say of a slot that a tier has its block, are only there to spare a write.
When a tier's content is in doubt they go, some rows at a time.
"""

from __future__ import annotations

import numpy as np

from kvd.core.actions import AnnounceRemoved, AnnounceStored, AnnounceTierLost
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.keys import U64, KeyBatch, NamespaceId, ScopeName, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.marks import TagMarks
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import Scope, State
from kvd.core.model.tiers import Tier, TierCopy
from kvd.core.model.turn import Turn
from kvd.core.tiers import coldest
from kvd_proto.tags import tags_of

DOUBTED_ROWS_AT_ONCE = 128
DOUBTED_SLOTS_AT_ONCE = 1 << 18  # of those, but for the last one's


def written(turn: Turn, tier: Tier, scope: Scope, slots: Slots, *, again: bool = False) -> None:
    """The tier has taken these slots' blocks, all of one scope.

    `again`: or had them already, which is news only where nobody was told of them.
    """
    if again:
        slots = slots[~tier.told.has(turn.state.slots.tags[slots])]
        if not len(slots):
            return
    tier.told.set(turn.state.slots.tags[slots])
    where = (scope.namespace, scope.epoch, scope.account, scope.group)
    owner = turn.state.namespaces[scope.namespace].classes[scope.group]
    keys = slot_lifecycle.keys_of(turn.state, owner, slots)
    turn.orders.append(AnnounceStored(*where, keys, tier.tier))


def found(turn: Turn, tier: Tier, name: ScopeName, words: U64, tags: U64) -> None:
    """The tier says that it holds these: news where nobody was told of them."""
    if not _is_of_now(turn.state, name):
        return
    news = ~tier.told.has(tags)
    if news.any():
        tier.told.set(tags[news])
        keys = _keys(turn.state, name.namespace, words[news])
        turn.orders.append(AnnounceStored(*_where(name), keys, tier.tier))


def lacking(turn: Turn, tier: Tier, name: ScopeName, words: U64, tags: U64) -> None:
    """The tier says that it lacks these: news where watchers were told that it holds them."""
    if tier.told.any and _is_of_now(turn.state, name):
        news = tier.told.has(tags)
        _tell_gone(turn, tier, name, words[news], tags[news])


def _tell_gone(turn: Turn, tier: Tier, name: ScopeName, words: U64, tags: U64) -> None:
    if len(tags):
        tier.told.clear(tags)
        keys = _keys(turn.state, name.namespace, words)
        turn.orders.append(AnnounceRemoved(*_where(name), keys, tier.tier))


def not_read(turn: Turn, copy: TierCopy, slots: Slots) -> None:
    """The tier lacks these blocks, which it was asked to read into the slots."""
    (part,) = copy.parts
    if len(slots) and copy.sought is not None:
        words = slot_lifecycle.keys_of(turn.state, part.size_class, slots).words
        lacking(turn, copy.tier, copy.sought.name, words, turn.state.slots.tags[slots])


def left(turn: Turn, tier: Tier, name: ScopeName, keys: KeyBatch) -> None:
    """The tier says that these have left it; a tier of a site's own may name what never was."""
    state = turn.state
    namespace = state.namespaces.get(name.namespace)
    if namespace is None or not _is_of_now(state, name):
        return
    if keys.hash_bytes != namespace.spec.hash_bytes:
        return
    seed = namespaces.scope_seed(state, namespace, name.epoch, name.account, name.group)
    tags = tags_of(keys.words, seed)
    _, firsts = np.unique(tags, return_index=True)
    words, tags = keys.words[firsts], tags[firsts]
    if tier.told.any:
        # Those too that have no mark: it may have gone with that of a block which shared the bit.
        _tell_gone(turn, tier, name, words, tags)
    scope = namespaces.find_named(state, name.scope)
    if scope is not None:
        slots = state.index.find(tags, words, scope.scope)
        slots = slots[slots != NOWHERE]
        slots = slots[(state.slots.below[slots] & tier.bit) != 0]
        slots = _worth_writing(state, namespace.classes[name.group], slots)
        state.slots.below[slots] &= ~np.uint8(tier.bit)


def _worth_writing(state: State, owner: SizeClass, slots: Slots) -> Slots:
    """Those that host memory will still hold for a while, so that they are written when it doesn't.

    What is about to leave it was written just for that. A tier with less room than such blocks
    take would be given one of them for another, for ever.
    """
    if not len(slots) or not coldest.is_nearly_full(state, owner):
        return slots
    return state.slots.without(slots, coldest.next_to_go(owner))


def lost(turn: Turn, tier: Tier) -> None:
    """Nothing of the tier can be found any more, or nobody knows what can."""
    if tier.told.any:
        tier.told = TagMarks()
        turn.orders.append(AnnounceTierLost(tier.tier))
    tier.doubted.clear()
    tier.doubted.extend(turn.state.rows)


def forget_some_doubted(turn: Turn) -> None:
    """Of some rows' blocks it is not known any more that the tier has them."""
    state = turn.state
    slots = 0
    tier = next(tier for tier in state.below.tiers if tier.doubted)
    for _ in range(min(len(tier.doubted), DOUBTED_ROWS_AT_ONCE)):
        row = state.rows.get(tier.doubted.popleft())
        if row is not None:
            state.slots.below[row.span] &= ~np.uint8(tier.bit)
            slots += row.slots
        if slots >= DOUBTED_SLOTS_AT_ONCE:
            return


def told(state: State, tier: Tier, slots: Slots) -> Slots:
    """Those of the slots' blocks of which watchers know that the tier holds them, too."""
    if not tier.told.any:
        return slots[:0]
    there = (state.slots.below[slots] & tier.bit) != 0
    known: Slots = slots[there & tier.told.has(state.slots.tags[slots])]
    return known


def _is_of_now(state: State, name: ScopeName) -> bool:
    """Whether nobody has been told that all of it was cleared."""
    namespace = state.namespaces.get(name.namespace)
    return namespace is not None and namespace.cleared_below == name.generation


def _where(name: ScopeName) -> tuple[NamespaceId, str, str, int]:
    return name.namespace, name.epoch, name.account, name.group


def _keys(state: State, namespace: NamespaceId, words: U64) -> KeyBatch:
    return KeyBatch(words, state.namespaces[namespace].spec.hash_bytes)
