"""Namespaces, their size classes, and the scopes in which keys may meet."""

from __future__ import annotations

import hashlib

from kvd.core.actions import EpochOpened, ForgetScopes, OpenNamespace, OpenScope
from kvd.core.blocks.extent_fit import fitting_size, size, wasted_share
from kvd.core.blocks.row_grants import slots_per_row
from kvd.core.errors import STRING_TOO_LONG, InvalidArgument, LayoutMismatch, LimitExceeded
from kvd.core.keys import NamespaceId, ScopeId
from kvd.core.model.scope_shares import share_left
from kvd.core.model.size_class import SizeClass, Tally
from kvd.core.model.state import (
    LAST_SCOPE,
    MAX_NAMESPACES,
    MAX_SCOPES,
    Namespace,
    Scope,
    Session,
    State,
)
from kvd.core.model.turn import Turn
from kvd.core.policy import make_policy
from kvd.core.spec import NamespaceSpec
from kvd_proto.limits import MAX_GROUPS
from kvd_proto.tags import account_seed

MAX_NAME_BYTES = 256  # epochs, accounts


def check_spec(state: State, spec: NamespaceSpec) -> None:
    """Raise InvalidArgument, naming the field, for a namespace that can't be served."""
    spec.check()
    for number, group in enumerate(spec.groups):
        if slots_per_row(group, state.config.extent_bytes) < 1:
            raise InvalidArgument(
                f"a block's part of {max(group.part_bytes)} bytes is larger than an extent of "
                f"{state.config.extent_bytes} bytes: raise extent_bytes, to "
                f"{size(fitting_size((group,)))} or more",
                f"groups[{number}]",
            )


def lacks_room(state: State, spec: NamespaceSpec, payer: str) -> bool:
    """Whether this would be one namespace too many for the payer."""
    if spec.fingerprint in state.by_fingerprint:
        return False
    return not namespaces_left(state, payer)


def most_blocks(state: State, spec: NamespaceSpec) -> int:
    """How many blocks of a namespace of this spec, which was checked, the pool could hold."""
    config = state.config
    return max(
        config.extents // len(group.shard_bytes) * slots_per_row(group, config.extent_bytes)
        for group in spec.groups
    )


def most_namespaces(state: State) -> int:
    """How many there may be."""
    return min(MAX_NAMESPACES, state.config.namespaces)


def namespaces_left(state: State, payer: str, gone: Namespace | None = None) -> int:
    """How many more the payer may open, once the one that is to go has gone."""
    has, whole = state.namespaces_of[payer], len(state.namespaces)
    if gone is not None:
        has, whole = has - (gone.payer == payer), whole - 1
    return share_left(has, whole, most_namespaces(state))


def left_with(state: State, has: int) -> int:
    """How many more a payer may open that has so many."""
    return share_left(has, len(state.namespaces), most_namespaces(state))


def open_namespace(turn: Turn, spec: NamespaceSpec, payer: str) -> Namespace:
    """The namespace of this fingerprint, made if it is new; raises and changes nothing else."""
    state = turn.state
    found = state.by_fingerprint.get(spec.fingerprint)
    if found is not None:
        if found.spec != spec:
            raise LayoutMismatch(
                "another engine opened this fingerprint with other groups", "groups"
            )
        return found
    check_spec(state, spec)
    if lacks_room(state, spec, payer):
        raise LimitExceeded(
            f"{payer} has {state.namespaces_of[payer]} of {len(state.namespaces)} namespaces that"
            f" hold blocks or sessions, and others need what is left of {most_namespaces(state)}:"
            " end some sessions, or clear some namespaces (below 4096 raise LimitNOFILE)",
            "namespace",
        )
    number = NamespaceId(state.next_namespace)
    return add_namespace(turn, number, spec, payer)


def add_namespace(turn: Turn, number: NamespaceId, spec: NamespaceSpec, payer: str) -> Namespace:
    """Make a namespace whose spec was checked."""
    state = turn.state
    tenant = state.tenant(spec.tenant)
    tenant.namespaces += 1
    tally = Tally()
    tallies = (state.tally, tenant.tally, tally)
    groups = range(len(spec.groups))
    classes = tuple(_make_class(state, number, group, spec, tallies) for group in groups)
    page_blocks = most_blocks(state, spec)
    namespace = Namespace(number, spec, classes, tenant, page_blocks, tally, payer)
    namespace.wasted_shares = tuple(
        wasted_share(group, state.config.extent_bytes) for group in spec.groups
    )
    state.namespaces[number] = namespace
    state.namespaces_of[payer] += 1
    state.next_namespace = max(state.next_namespace, number + 1)
    state.by_fingerprint[spec.fingerprint] = namespace
    for owner in classes:
        state.classes[number, owner.group] = owner
        state.count_policy(owner, 1)
    turn.orders.append(OpenNamespace(number, spec, page_blocks))
    return namespace


def _make_class(
    state: State,
    number: NamespaceId,
    group: int,
    spec: NamespaceSpec,
    tallies: tuple[Tally, ...],
) -> SizeClass:
    found: list[SizeClass] = []

    def capacity() -> int:
        return found[0].slot_limit if found else 0

    groups = spec.groups
    owner = SizeClass(
        namespace=number,
        group=group,
        spec=groups[group],
        width=-(-spec.hash_bytes // 8),
        tenant=state.tenant(spec.tenant),
        policy=make_policy(state.config.policy, capacity, state.policy_memory),
        slots_per_row=slots_per_row(groups[group], state.config.extent_bytes),
        tallies=tallies,
    )
    found.append(owner)
    return owner


def check_name(name: str, field: str) -> None:
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(
            f"{field} is longer than {MAX_NAME_BYTES} bytes", field, STRING_TOO_LONG
        )


def scope_seed(state: State, namespace: Namespace, epoch: str, account: str, group: int) -> int:
    """Seed of the tags of a scope; the same in every incarnation of the pool."""
    return account_seed(group_seed(state, namespace, epoch, group), account)


def group_seed(state: State, namespace: Namespace, epoch: str, group: int) -> int:
    """`scope_seed` of the empty account; of all of them it is what takes longer."""
    digest = hashlib.blake2b(digest_size=8, key=state.config.tag_secret)
    for text in (namespace.spec.fingerprint, epoch, str(group)):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return int.from_bytes(digest.digest(), "little")


def find_scope(state: State, session: Session, account: str, group: int) -> Scope | None:
    """The scope in which this session's keys of a group meet others, if it was ever opened."""
    return find_named(state, (session.namespace, session.epoch, account, group))


def find_named(state: State, name: tuple[NamespaceId, str, str, int]) -> Scope | None:
    """The scope in force of this namespace, epoch, account and group."""
    number = state.scope_ids.get(name)
    if number is None or is_cleared(state, name[0], number):
        return None
    return state.scopes[number]


def is_cleared(state: State, namespace: NamespaceId, scope: ScopeId) -> bool:
    """Whether blocks of this scope of the namespace are of no use since it was cleared."""
    return scope < state.namespaces[namespace].cleared_below


def check_scopes(state: State, spec: NamespaceSpec, epoch: str, payer: str) -> None:
    """Raise LimitExceeded unless a session of this payer may go to this epoch."""
    if not numbers_left(state) and not scopes_fit(state, spec, payer, epoch, ""):
        raise LimitExceeded(
            f"the pool has given all {LAST_SCOPE} numbers of scopes: stop the daemon and remove the"
            " pool's files",
            "epoch",
        )
    if not scopes_fit(state, spec, payer, epoch, ""):
        raise LimitExceeded(
            f"{payer} has {state.scope_shares.taken[payer]} of {len(state.scopes)} scopes that hold"
            f" blocks, and others need what is left of {MAX_SCOPES}: use fewer epochs and cache"
            " salts",
            "epoch",
        )


def numbers_left(state: State, scopes: int = 0) -> bool:
    """Whether any scope, or so many, may be opened. Numbers only rise: what was cleared lies below
    one."""
    return state.next_scope + max(scopes, MAX_GROUPS) <= LAST_SCOPE + 1


def _has_no_number(state: State, name: tuple[NamespaceId, str, str, int]) -> bool:
    number = state.scope_ids.get(name)
    return number is None or is_cleared(state, name[0], number)


def scopes_fit(state: State, spec: NamespaceSpec, payer: str, epoch: str, account: str) -> bool:
    """Whether these names' scopes, in every group, are open or can be opened by the payer."""
    known = state.by_fingerprint.get(spec.fingerprint)
    if not numbers_left(state):
        return known is not None and not any(
            _has_no_number(state, (known.namespace, epoch, account, group))
            for group in range(len(spec.groups))
        )
    new = sum(
        known is None or (known.namespace, epoch, account, group) not in state.scope_ids
        for group in range(len(spec.groups))
    )
    if not new:
        return True
    taken, whole = state.scope_shares.taken[payer], len(state.scopes)
    if share_left(taken, whole, MAX_SCOPES) >= new:
        return True
    mine, others = _forgettable_scopes(state, payer, new)
    gone = len(mine) + len(others)
    return share_left(taken - len(mine), whole - gone, MAX_SCOPES) >= new


def may_open(state: State, payer: str, scopes: int) -> bool:
    """Whether the payer may open so many without any being forgotten for it."""
    taken = state.scope_shares.taken[payer]
    is_left = share_left(taken, len(state.scopes), MAX_SCOPES) >= scopes
    return is_left and numbers_left(state, scopes)


def _forgettable_scopes(
    state: State, payer: str, wanted: int
) -> tuple[list[ScopeId], list[ScopeId]]:
    """Scopes without a block that no session opened for itself: the payer's, and others'.

    Only where the payer has none they are of whoever has most of those, and then none with which
    an engine of theirs would come back to its blocks: it might not get them again. What was
    cleared goes with its clear.
    """
    epochs = {(session.namespace, session.epoch) for session in state.sessions.values()}

    def may_go(number: ScopeId) -> bool:
        scope = state.scopes[number]
        if is_cleared(state, scope.namespace, number):
            return False
        return bool(scope.account) or (scope.namespace, scope.epoch) not in epochs

    def may_go_for_others(number: ScopeId) -> bool:
        scope = state.scopes[number]
        return may_go(number) and (bool(scope.account) or not _may_hold_blocks(state, scope))

    shares = state.scope_shares
    mine = shares.forgettable(payer, wanted, may_go)
    others = [other for other in shares.empty if other != payer]
    if mine or not others:
        return mine, []
    most = max(others, key=lambda other: len(shares.empty[other]))
    return [], shares.forgettable(most, wanted, may_go_for_others)


def _may_hold_blocks(state: State, scope: Scope) -> bool:
    """Whether a scope of the same epoch has a block, as where it has accounts one may."""
    namespace = state.namespaces[scope.namespace]
    together = namespace.scopes[scope.epoch]
    if len(together) > len(namespace.classes):
        return True
    return not state.scope_shares.blocks.keys().isdisjoint(together)


def _forget_unused_scopes(turn: Turn, payer: str) -> None:
    """Their numbers never come back in this incarnation; their tags are the same when they do."""
    state = turn.state
    mine, others = _forgettable_scopes(state, payer, MAX_GROUPS)
    for number in (*mine, *others):
        forget_scope(state, number)
    turn.orders.append(ForgetScopes((*mine, *others)))


def forget_scope(state: State, number: ScopeId) -> None:
    """Nothing names it any more. A name that was opened anew since it was cleared stays."""
    scope = state.scopes.pop(number)
    name = (scope.namespace, scope.epoch, scope.account, scope.group)
    state.scope_shares.forgotten(number)
    if state.scope_ids.get(name) == number:
        del state.scope_ids[name]
    if not is_cleared(state, scope.namespace, number):
        siblings = state.namespaces[scope.namespace].scopes
        siblings[scope.epoch].remove(number)
        if not siblings[scope.epoch]:
            del siblings[scope.epoch]


def open_scope(turn: Turn, session: Session, account: str, group: int) -> Scope:
    """`find_scope`, opened when new; the caller has made sure that the limit allows it."""
    state = turn.state
    found = find_scope(state, session, account, group)
    if found is not None:
        return found
    payer = session.payer
    if not share_left(state.scope_shares.taken[payer], len(state.scopes), MAX_SCOPES):
        _forget_unused_scopes(turn, payer)
    return open_named(turn, (session.namespace, session.epoch, account, group), payer)


def open_named(turn: Turn, name: tuple[NamespaceId, str, str, int], payer: str) -> Scope:
    """A scope of this name that is new, or was cleared, under the next number."""
    state = turn.state
    number, namespace = ScopeId(state.next_scope), state.namespaces[name[0]]
    seed = scope_seed(state, namespace, *name[1:])
    scope = Scope(number, *name, seed)
    add_scope(state, scope, payer)
    own = scope.epoch in namespace.own_epochs
    turn.orders.append(
        OpenScope(number, scope.namespace, scope.epoch, scope.account, scope.group, own)
    )
    return scope


def add_scope(state: State, scope: Scope, payer: str) -> None:
    """Make a scope known, which counts against the payer's share."""
    number = scope.scope
    state.scopes[number] = scope
    state.scope_shares.opened(number, payer)
    state.namespaces[scope.namespace].scopes.setdefault(scope.epoch, set()).add(number)
    state.next_scope = max(state.next_scope, number + 1)
    state.scope_ids[scope.namespace, scope.epoch, scope.account, scope.group] = number


def open_epoch(turn: Turn, session: Session) -> EpochOpened:
    """Open the session's epoch for the empty account, in every group."""
    groups = range(len(turn.state.namespaces[session.namespace].classes))
    scopes = [open_scope(turn, session, "", group) for group in groups]
    return EpochOpened(session.epoch, tuple(s.scope for s in scopes), tuple(s.seed for s in scopes))
