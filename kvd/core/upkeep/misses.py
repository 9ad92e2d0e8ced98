"""Why requests missed: what clients tell of them, and what became of the blocks they lacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from kvd.core.blocks import namespaces
from kvd.core.blocks.reading import number_and_seed
from kvd.core.events import RequestsTold
from kvd.core.keys import U64, NamespaceId, RequestId, TenantId
from kvd.core.model.gone import GoneRing, Recalled
from kvd.core.model.index import NOWHERE
from kvd.core.model.slots import READY
from kvd.core.model.state import Namespace, Scope, State
from kvd.core.model.turn import Turn
from kvd.core.told import MissedBlock
from kvd_proto.tags import tags_of

MAX_REQUESTS_EXPLAINED = 64  # in one answer
MAX_SCOPES_SEARCHED = 64  # of a namespace, for the block under another name
MAX_SCOPES_PASSED = 1024  # of a namespace, of whatever group
MAX_NAMESPACES_SEARCHED = 16


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A readable block with the same key that the request did not use."""

    namespace: NamespaceId
    epoch: str
    account: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A request, and what became of its first missing block."""

    recalled: Recalled
    is_all_known: bool  # of its tenant nothing was forgotten yet


def requests_told(turn: Turn, event: RequestsTold) -> None:
    """Remember the requests; what became of their blocks is sought when somebody asks."""
    state = turn.state
    session = state.require_session(event.session)
    namespace = state.namespace_of(session)
    tenant = namespace.spec.tenant
    share = state.gone.share_of(tenant)
    for told in event.requests:
        recalled = Recalled(
            told, tenant, session.namespace, session.epoch, turn.now_ns, event.engine
        )
        recalled.gone_before = share.blocks
        recalled.hash_bytes = namespace.spec.hash_bytes
        recalled.epoch_entered_ns = session.epoch_entered_ns
        recalled.cleared_ns = namespace.cleared_ns
        missed = told.missed
        if missed is not None and missed.group < len(namespace.classes):
            _, seed = number_and_seed(state, session, told.account, missed.group)
            recalled.tag = int(tags_of(missed.words, seed)[0])
        share.requests.append(recalled)


def explain(state: State, request: str, may_see: Callable[[TenantId], bool]) -> list[Explained]:
    """Requests of this name, or whose names begin with it, the last first; "": that missed any."""
    gone = state.gone
    found: list[tuple[GoneRing, Recalled]] = []
    for share in gone.all_shares():
        asked = [each for each in share.requests if may_see(each.tenant) and _fits(each, request)]
        if asked:
            gone.search(share)
        exact = [each for each in asked if each.told.request == RequestId(request)]
        found += [(share, each) for each in exact or asked]
    found.sort(key=lambda pair: pair[1].at_ns, reverse=True)
    return [Explained(each, share.is_whole) for share, each in found[:MAX_REQUESTS_EXPLAINED]]


def _fits(each: Recalled, request: str) -> bool:
    if not request:
        return each.told.missed is not None
    return each.told.request.startswith(request)


def elsewhere(state: State, each: Recalled, family: Iterable[NamespaceId]) -> tuple[Elsewhere, ...]:
    """Where a readable block of the key that was missing lies now; first, under its own name.

    `family`: namespaces of the same tenant in which to look beside its own.
    """
    missed = each.told.missed
    if missed is None:
        return ()
    found = []
    own = (each.namespace, each.epoch, each.told.account)
    itself = namespaces.find_named(state, (*own, missed.group))
    if itself is not None and _first_with(state, [itself], missed.words) is not None:
        found.append(Elsewhere(*own))
    others = (n for n in family if n != each.namespace)
    for number in chain([each.namespace], islice(others, MAX_NAMESPACES_SEARCHED)):
        scopes = _scopes(state, state.namespaces.get(number), missed)
        scopes = [s for s in scopes if (number, s.epoch, s.account) != own]
        has = _first_with(state, scopes, missed.words)
        if has is not None:
            found.append(Elsewhere(number, has.epoch, has.account))
    return tuple(found)


def _scopes(state: State, namespace: Namespace | None, missed: MissedBlock) -> list[Scope]:
    """Scopes of the namespace in which such a key may stand, as many as are looked at."""
    if namespace is None or missed.group >= len(namespace.classes):
        return []
    if namespace.classes[missed.group].width != missed.words.shape[1]:
        return []
    numbers = islice(chain.from_iterable(namespace.scopes.values()), MAX_SCOPES_PASSED)
    scopes = (state.scopes[number] for number in numbers)
    return list(islice((s for s in scopes if s.group == missed.group), MAX_SCOPES_SEARCHED))


def _first_with(state: State, scopes: list[Scope], words: U64) -> Scope | None:
    """The first of them in which a block of this key is readable."""
    if not scopes:
        return None
    all_words = np.repeat(words, len(scopes), axis=0)
    seeds = np.array([scope.seed for scope in scopes], dtype=np.uint64)
    numbers = np.array([scope.scope for scope in scopes], dtype=np.uint32)
    slots = state.index.find(tags_of(all_words, seeds), all_words, numbers)
    has = (slots != NOWHERE) & (state.slots.state[slots] == READY)
    return scopes[int(has.argmax())] if has.any() else None
