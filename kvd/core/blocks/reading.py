"""Which size class and which slots a session's keys mean."""

from __future__ import annotations

import numpy as np

from kvd.core.blocks import namespaces
from kvd.core.errors import InvalidArgument
from kvd.core.keys import U64, KeyBatch, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import Session, State
from kvd_proto.layout import MAX_KEYS_PER_MESSAGE
from kvd_proto.tags import tags_of


def check_keys(state: State, session: Session, group: int, keys: KeyBatch) -> SizeClass:
    """The size class that these keys name blocks of; raises InvalidArgument otherwise."""
    namespace = state.namespace_of(session)
    if not 0 <= group < len(namespace.classes):
        raise InvalidArgument(f"group {group} of {len(namespace.classes)}", "group", "GROUP_COUNT")
    owner = namespace.classes[group]
    hash_bytes = namespace.spec.hash_bytes
    if keys.hash_bytes != hash_bytes or keys.words.shape[1:] != (owner.width,):
        raise InvalidArgument(
            f"hashes of {keys.hash_bytes} bytes in a namespace of {hash_bytes}",
            "hashes",
            "HASH_BYTES",
        )
    return owner


def check_key_count(count: int) -> None:
    if count > MAX_KEYS_PER_MESSAGE:
        raise InvalidArgument(
            f"{count} keys in one message, at most {MAX_KEYS_PER_MESSAGE}",
            "hashes",
            "TOO_MANY_KEYS",
        )


def read_keys(
    state: State, session: Session, account: str, group: int, words: U64
) -> tuple[U64, Slots]:
    """Tags and slots of the keys; a scope that nobody has opened holds nothing."""
    scope = namespaces.find_scope(state, session, account, group)
    if scope is not None:
        tags = tags_of(words, scope.seed)
        return tags, state.index.find(tags, words, scope.scope)
    namespace = state.namespace_of(session)
    seed = namespaces.scope_seed(state, namespace, session.epoch, account, group)
    return tags_of(words, seed), np.full(len(words), NOWHERE, dtype=np.int64)
