"""Which size class and which slots a session's keys mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvd.core.blocks import namespaces
from kvd.core.errors import GROUP_COUNT, HASH_BYTES, TOO_MANY_KEYS, InvalidArgument
from kvd.core.keys import NO_SCOPE, U32, U64, KeyBatch, ScopeId, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import Namespace, Session, State
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE
from kvd_proto.tags import tags_of


class Located(NamedTuple):
    """Keys of one group: the scope in which they meet others, None where nobody has opened it."""

    scope: ScopeId | None
    tags: U64
    slots: Slots  # NOWHERE for the unknown


class LocatedEach(NamedTuple):
    """Keys of one group, each in the scope of an account: NO_SCOPE where nobody has opened it."""

    scopes: U32
    tags: U64
    slots: Slots  # NOWHERE for the unknown


def check_keys(
    state: State, session: Session, named: Sequence[tuple[int, KeyBatch]]
) -> list[SizeClass]:
    """The size class of each group and its keys; raises InvalidArgument where there is none."""
    count = sum(len(keys) for _, keys in named)
    if count > MAX_KEYS_PER_MESSAGE:
        raise InvalidArgument(
            f"{count} keys in one message, at most {MAX_KEYS_PER_MESSAGE}: send several",
            "hashes",
            TOO_MANY_KEYS,
        )
    namespace = state.namespace_of(session)
    return [_class_of(namespace, group, keys) for group, keys in named]


def _class_of(namespace: Namespace, group: int, keys: KeyBatch) -> SizeClass:
    if not 0 <= group < len(namespace.classes):
        raise InvalidArgument(f"group {group} of {len(namespace.classes)}", "group", GROUP_COUNT)
    owner = namespace.classes[group]
    hash_bytes = namespace.spec.hash_bytes
    if keys.hash_bytes != hash_bytes or keys.words.shape[1:] != (owner.width,):
        raise InvalidArgument(
            f"hashes of {keys.hash_bytes} bytes in a namespace of {hash_bytes}",
            "hashes",
            HASH_BYTES,
        )
    return owner


def locate(state: State, session: Session, account: str, group: int, words: U64) -> Located:
    """Tags and slots of the keys."""
    scope, seed = number_and_seed(state, session, account, group)
    if scope != NO_SCOPE:
        return Located(scope, *state.index.locate(words, seed, scope))
    return Located(None, tags_of(words, seed), np.full(len(words), NOWHERE, dtype=np.int64))


def locate_each(
    state: State, session: Session, accounts: Sequence[str], group: int, words: U64
) -> LocatedEach:
    """`locate` of keys of several accounts: `accounts[n]` is the n-th key's."""
    known = dict.fromkeys(accounts)
    if len(known) == 1:
        scope, tags, slots = locate(state, session, accounts[0], group, words)
        return LocatedEach(np.full(len(words), scope or NO_SCOPE, dtype=np.uint32), tags, slots)
    named = {account: number_and_seed(state, session, account, group) for account in known}
    numbers, seeds = zip(*(named[account] for account in accounts), strict=True)
    scopes, tags = np.array(numbers, dtype=np.uint32), tags_of(words, np.array(seeds, np.uint64))
    return LocatedEach(scopes, tags, state.index.find(tags, words, scopes))


def number_and_seed(
    state: State, session: Session, account: str, group: int
) -> tuple[ScopeId, int]:
    """Of the scope in which such keys meet others: NO_SCOPE, and the seed that it would have, where
    nobody has opened it."""
    scope = namespaces.find_scope(state, session, account, group)
    if scope is not None:
        return scope.scope, scope.seed
    namespace = state.namespace_of(session)
    return NO_SCOPE, namespaces.scope_seed(state, namespace, session.epoch, account, group)
