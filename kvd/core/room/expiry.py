"""What no session uses any more: namespaces and epochs, until they are used again or forgotten.

A namespace that engines share outlives them all: the next one finds its blocks. It is forgotten
only without a block, the one longest without a session first, when there are so many that new
ones need the room. What is one engine's own (a namespace that nobody else can open, an epoch after
a cache reset) is of no use without that engine: it goes at once when the engine is known to have
ended, else after a grace in which it may come back, as it does when its stream broke or the
daemon was started anew.

Going takes several events, a few rows each, so that others wait for no more than that. A session
that comes meanwhile ends it, and has what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from kvd.core.actions import ForgetNamespace, ForgetScopes, OpenScope
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.blocks.slot_lifecycle import first_of
from kvd.core.claims import hand_off
from kvd.core.keys import NO_SLOTS, ScopeId, SessionId, Slots, are_among
from kvd.core.model import backlog
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.size_class import Row, SizeClass
from kvd.core.model.slots import READY
from kvd.core.model.state import (
    MAX_NAMESPACES,
    NEVER,
    Departure,
    EpochName,
    EpochSweep,
    Namespace,
    Session,
    State,
)
from kvd.core.model.turn import Turn
from kvd.core.room.reclaim import give_up_copied, give_up_left, retire_row

ROWS_AT_ONCE = 8  # on their way back: zeroing them takes time and bandwidth
ROWS_TO_GO_AT_ONCE = 64  # looked at in one event
ROWS_SWEPT_AT_ONCE = 32
SLOTS_SWEPT_AT_ONCE = 16384  # read in one event, but for those of its first row
# Epochs of one sweep, and their scopes, but for those of the first.
EPOCHS_SWEPT_AT_ONCE = 256
SCOPES_SWEPT_AT_ONCE = 16384
# What takes about as long as so many blocks that are given up.
LOOK_COST = 4
SCOPE_COST = 2
ROW_COST = 128  # each gives up its blocks by orders of its own
FORGET_COST = 256  # a namespace, or a row
# With less room in its share a payer's namespaces without sessions and blocks are taken apart.
ROOM_KEPT = MAX_NAMESPACES // 64
SCOPES_SHARED_AT_ONCE = 256  # one of them with a block is enough: see `read_back`
NAMESPACES_WEIGHED = 256  # for their room, in one event
MAX_ROWS_FORGOTTEN = 64  # with a namespace whose room is needed in this very event
UNUSABLE = WhyGone(Fate.UNUSABLE)


# -- use and its end ------------------------------------------------------------------------------


def enter(turn: Turn, session: Session, *, own: bool) -> None:
    """The session uses its namespace and its epoch from now on: neither goes.

    An `own` epoch is of use to this session's engine alone: one that is new, or is its own already.
    Once another engine has come to it, or it was shared before, it outlives them all.
    """
    state = turn.state
    expiring = state.expiring
    expiring.namespaces.pop(session.namespace, None)
    expiring.ending.pop(session.namespace, None)
    epoch = (session.namespace, session.epoch)
    if expiring.epochs.pop(epoch, None) is not None and expiring.sweep is not None:
        kept = [name for name in expiring.sweep.epochs if name != epoch]
        expiring.sweep.epochs, expiring.sweep.scopes = kept, _scopes_of(state, kept)
    owned = state.namespaces[session.namespace].own_epochs
    owner = owned.get(session.epoch)
    if own and (owner in {"", session.engine} or not _is_known(state, session)):
        if session.epoch:
            owned[session.epoch] = session.engine
    elif owner is not None:
        del owned[session.epoch]
        _write_shared(turn, session)


def _is_known(state: State, session: Session) -> bool:
    """Whether anybody else is in the session's epoch, or has left anything there."""
    if session.epoch in state.namespaces[session.namespace].scopes:
        return True
    others = (s for s in state.sessions.values() if s is not session)
    return any((s.namespace, s.epoch) == (session.namespace, session.epoch) for s in others)


def _write_shared(turn: Turn, session: Session) -> None:
    """Have the pool remember that the session's epoch is nobody's own; see `read_back`."""
    state = turn.state
    numbers = state.namespaces[session.namespace].scopes.get(session.epoch, ())
    some = [state.scopes[number] for number in islice(numbers, SCOPES_SHARED_AT_ONCE)]
    turn.orders.extend(
        OpenScope(s.scope, s.namespace, s.epoch, s.account, s.group, own=False) for s in some
    )


def leave(turn: Turn, session: Session, *, departed: bool) -> None:
    """The session is forgotten: nothing of it runs any more. `departed`: its engine has ended."""
    state = turn.state
    until_ns = turn.now_ns if departed else turn.now_ns + state.config.private_grace_ns
    leave_epoch(state, session, session.epoch, until_ns)
    if not any(s.namespace == session.namespace for s in state.sessions.values()):
        private = state.namespaces[session.namespace].spec.unshared
        departure = Departure(until_ns if private else NEVER, session.session)
        state.expiring.namespaces[session.namespace] = departure
    look(turn)


def leave_epoch(state: State, session: Session, epoch: str, until_ns: int) -> None:
    """The session is in this epoch no longer. An own one with nobody in it goes at that time."""
    if epoch not in state.namespaces[session.namespace].own_epochs:
        return
    name = (session.namespace, epoch)
    others = (s for s in state.sessions.values() if s is not session)
    if not any((s.namespace, s.epoch) == name for s in others):
        state.expiring.epochs[name] = Departure(until_ns, session.session)


def engine_gone(turn: Turn, session: SessionId) -> None:
    """The engine of a session that is forgotten has ended: it won't come back for its own."""
    expiring = turn.state.expiring
    for departure in (*expiring.namespaces.values(), *expiring.epochs.values()):
        if departure.session == session and departure.until_ns != NEVER:
            departure.until_ns = turn.now_ns
    look(turn)


def read_back(state: State, namespace: Namespace, epoch: str, *, own: bool) -> None:
    """The pool knows of these; nobody uses them until somebody comes.

    An epoch is somebody's own if all of its scopes say so; only those with blocks come back.
    """
    state.expiring.namespaces[namespace.namespace] = Departure(NEVER, None)
    if own and epoch not in namespace.shared_epochs:
        namespace.own_epochs[epoch] = ""
        state.expiring.epochs[namespace.namespace, epoch] = Departure(NEVER, None)
    elif not own:
        namespace.shared_epochs.add(epoch)
        namespace.own_epochs.pop(epoch, None)
        state.expiring.epochs.pop((namespace.namespace, epoch), None)


def begin(turn: Turn) -> None:
    """All of the pool was read back: what is an engine's own waits for it from now on."""
    state = turn.state
    until_ns = turn.now_ns + state.config.private_grace_ns
    for number, departure in state.expiring.namespaces.items():
        if state.namespaces[number].spec.unshared:
            departure.until_ns = until_ns
    for departure in state.expiring.epochs.values():
        departure.until_ns = until_ns


# -- namespaces -----------------------------------------------------------------------------------


def look(turn: Turn) -> None:
    """What is due by now begins to go, or goes on; `chores` does it."""
    expiring = turn.state.expiring
    due = [n for n, departure in expiring.namespaces.items() if departure.until_ns <= turn.now_ns]
    expiring.ending.update(dict.fromkeys(due))
    if not expiring.turn:
        expiring.turn.extend(expiring.ending)
    if expiring.sweep is None and any(d.until_ns <= turn.now_ns for d in expiring.epochs.values()):
        _begin_sweep(turn)


def take_back_some(turn: Turn) -> None:
    """A piece of the way of namespaces that end, those first that have waited longest.

    One whose rows are to be zeroed before the next ones may go has its turn after that.
    """
    state = turn.state
    expiring, left = state.expiring, backlog.DROPPED_AT_ONCE
    while expiring.turn and left > 0:
        number = expiring.turn.popleft()
        if number in expiring.ending:
            left -= LOOK_COST + _take_back(turn, state.namespaces[number], left)


def prepare_room(state: State) -> None:
    """Begin to take namespaces without sessions and blocks apart before their room is needed."""
    expiring = state.expiring
    kept = min(ROOM_KEPT, namespaces.most_namespaces(state) // 4)
    # Of thousands of payers most have as many.
    left = {has: namespaces.left_with(state, has) for has in set(state.namespaces_of.values())}
    if min(left.values(), default=kept) >= kept:
        return
    spare = {payer: left[has] for payer, has in state.namespaces_of.items()}
    wanted = {payer: kept - some for payer, some in spare.items() if some < kept}
    for number in expiring.ending:
        payer = state.namespaces[number].payer
        wanted[payer] = wanted.get(payer, 0) - 1
    for number in expiring.namespaces:
        namespace = state.namespaces[number]
        more = wanted.get(namespace.payer, 0) > 0 and number not in expiring.ending
        if more and _is_empty(namespace):
            wanted[namespace.payer] -= 1
            expiring.ending[number] = None


def forgettable(state: State, payer: str) -> Namespace | None:
    """The namespace longest without a session that holds nothing and can be forgotten now.

    One of this payer's, or anybody's where it has none. Where the first ones can't be forgotten
    so quickly, none: `prepare_room` has them taken apart.
    """
    few = islice(_idle(state, payer), NAMESPACES_WEIGHED)
    return next((namespace for namespace in few if _is_small(state, namespace)), None)


def _idle(state: State, payer: str) -> Iterator[Namespace]:
    """Namespaces without a session that hold nothing: this payer's, then those of others."""
    for its_own in (True, False):
        for number in state.expiring.namespaces:
            namespace = state.namespaces[number]
            if (namespace.payer == payer) is its_own and _is_empty(namespace):
                yield namespace


def _is_small(state: State, namespace: Namespace) -> bool:
    """Whether the namespace, which holds nothing, can be forgotten in one event."""
    rows = (row for owner in namespace.classes for row in owner.rows.values())
    some = list(islice(rows, MAX_ROWS_FORGOTTEN + 1))
    return (
        len(some) <= MAX_ROWS_FORGOTTEN
        and _has_few_scopes(namespace)
        and namespace.namespace not in state.backlog.clears
        and not any(row.orphaned for row in some)  # nothing else keeps a row without a block
    )


def _has_few_scopes(namespace: Namespace) -> bool:
    left = backlog.SCOPES_AT_ONCE
    for numbers in namespace.scopes.values():
        left -= len(numbers)
        if left < 0:
            return False
    return True


def forget(turn: Turn, namespace: Namespace) -> None:
    """Make a namespace that holds nothing, and has few scopes and none that were cleared, unknown.

    The same engine would make it anew.
    """
    state = turn.state
    number = namespace.namespace
    for owner in namespace.classes:
        for row in list(owner.rows.values()):
            retire_row(turn, row)
        state.claims.drop(owner)
        del state.classes[number, owner.group]
        state.count_policy(owner, -1)
    for scope in [each for numbers in namespace.scopes.values() for each in numbers]:
        namespaces.forget_scope(state, scope)
    for epoch in namespace.own_epochs:
        state.expiring.epochs.pop((number, epoch), None)
    del state.expiring.namespaces[number]
    state.expiring.ending.pop(number, None)
    del state.by_fingerprint[namespace.spec.fingerprint]
    del state.namespaces[number]
    namespace.tenant.namespaces -= 1
    state.namespaces_of[namespace.payer] -= 1
    if not state.namespaces_of[namespace.payer]:
        del state.namespaces_of[namespace.payer]
    state.counters.namespaces_forgotten += 1
    turn.orders.append(ForgetNamespace(number))


def _take_back(turn: Turn, namespace: Namespace, most: int) -> int:
    """Give up that many of its blocks at most, and take back the rows that are empty; after the
    last one forget it. How much of that was done; what could go on at once has the next turn.
    """
    state = turn.state
    done = 0
    if namespace.copies_below:
        return done  # its slots are in use; the next tick looks again
    for row in _rows_to_go(namespace):
        if not row.orphaned and len(state.retiring) >= ROWS_AT_ONCE:
            continue
        if done < most:
            given_up, empty = _give_up_some(turn, row, most - done)
            done += given_up
        if done >= most or not empty:
            state.expiring.turn.appendleft(namespace.namespace)
            return max(done, most)
        if row.orphaned:  # it stays; the next incarnation of the pool takes it back
            row.drained = True
        else:
            retire_row(turn, row)
            done += FORGET_COST
    if any(owner.rows for owner in namespace.classes):
        return done
    if namespace.namespace in state.backlog.clears:
        return done  # it goes after what was cleared
    if _has_few_scopes(namespace):
        forget(turn, namespace)
        return done + FORGET_COST
    state.expiring.turn.appendleft(namespace.namespace)
    return done + SCOPE_COST * _forget_some_scopes(turn, namespace.scopes.values())


def _rows_to_go(namespace: Namespace) -> list[Row]:
    """As many as can be dealt with in one event."""
    rows = (row for owner in namespace.classes for row in owner.rows.values() if not row.drained)
    return list(islice(rows, ROWS_TO_GO_AT_ONCE))


def _forget_some_scopes(turn: Turn, of_epochs: Iterable[set[ScopeId]]) -> int:
    """Of those that hold nothing; how many."""
    some = list(
        islice((number for several in of_epochs for number in several), backlog.SCOPES_AT_ONCE)
    )
    for number in some:
        namespaces.forget_scope(turn.state, number)
    if some:
        turn.orders.append(ForgetScopes(tuple(some)))
    return len(some)


def _is_empty(namespace: Namespace) -> bool:
    """Whether it holds nothing."""
    tally = namespace.tally
    return not (tally.ready or tally.reserved or tally.quarantined)


# -- epochs ---------------------------------------------------------------------------------------


def _begin_sweep(turn: Turn) -> None:
    """Of epochs that are due, as many as one sweep takes; the others have the next one."""
    state = turn.state
    due: list[EpochName] = []
    scopes = 0
    for name, departure in state.expiring.epochs.items():
        if departure.until_ns > turn.now_ns:
            continue
        namespace = state.namespaces[name[0]]
        of_epoch = namespace.scopes.get(name[1], set())
        if namespace.ended_leases or not state.in_flight.keys().isdisjoint(of_epoch):
            continue
        if due and scopes + len(of_epoch) > SCOPES_SWEPT_AT_ONCE:
            break
        due.append(name)
        scopes += len(of_epoch)
        if len(due) >= EPOCHS_SWEPT_AT_ONCE:
            break
    numbers = sorted({number for number, _ in due})
    owners = (owner.name for number in numbers for owner in state.namespaces[number].classes)
    state.expiring.sweep = EpochSweep(due, _scopes_of(state, due), deque(owners))


def sweep_some(turn: Turn) -> None:
    """Give up some blocks of epochs that are due, row by row; at the end some of their scopes."""
    state = turn.state
    sweep = state.expiring.sweep
    assert sweep is not None, "no epoch is being swept"
    _sweep_rows(turn, sweep)
    if not _has_rows(state, sweep) and _forget_epochs(turn, sweep.epochs):
        state.expiring.sweep = None


def _sweep_rows(turn: Turn, sweep: EpochSweep) -> None:
    state = turn.state
    left, slots = backlog.DROPPED_AT_ONCE, 0
    for _ in range(ROWS_SWEPT_AT_ONCE):
        if not _has_rows(state, sweep):
            return
        row = state.rows.get(sweep.rows[0])
        if row is not None:
            given_up, done = _give_up_some(turn, row, left, sweep.scopes)
            left -= given_up + (ROW_COST if given_up else 0)
            slots += row.slots
            if not done:
                return
        sweep.rows.popleft()
        if slots >= SLOTS_SWEPT_AT_ONCE or left <= 0:
            return


def _has_rows(state: State, sweep: EpochSweep) -> bool:
    """Whether there are rows left; those of the next class then stand in `rows`."""
    while not sweep.rows and sweep.owners:
        owner = state.classes.get(sweep.owners.popleft())
        if owner is not None:
            sweep.rows.extend(owner.rows)
    return bool(sweep.rows)


def _forget_epochs(turn: Turn, names: Iterable[EpochName]) -> bool:
    """Some of their scopes, and with the last ones the epochs; whether that was all."""
    state = turn.state
    known = [(number, epoch) for number, epoch in names if number in state.namespaces]
    scopes = (state.namespaces[number].scopes.get(epoch, set()) for number, epoch in known)
    if _forget_some_scopes(turn, scopes) >= backlog.SCOPES_AT_ONCE:
        return False
    for namespace, epoch in known:
        del state.namespaces[namespace].own_epochs[epoch]
        del state.expiring.epochs[namespace, epoch]
    return True


def _scopes_of(state: State, names: Iterable[EpochName]) -> Slots:
    known = [(state.namespaces[n], epoch) for n, epoch in set(names) if n in state.namespaces]
    several = [namespace.scopes.get(epoch, set()) for namespace, epoch in known]
    found = [np.fromiter(numbers, np.int64, len(numbers)) for numbers in several]
    return np.sort(np.concatenate([NO_SLOTS, *found]))


# -- blocks ---------------------------------------------------------------------------------------


def _give_up_some(turn: Turn, row: Row, most: int, scopes: Slots | None = None) -> tuple[int, bool]:
    """Of the row's READY blocks, in these scopes; how many, and whether that was all.

    Those of a row that others wait for go first, whatever their scope.
    """
    state = turn.state
    give_up_copied(turn, row)
    some = len(first_of(state, row.left, most))
    give_up_left(turn, row, some)
    if len(row.left):
        return some, False
    ready = slot_lifecycle.ready_in(state, row)
    if scopes is not None:
        ready = ready[are_among(state.slots.scopes[ready], scopes)]
    if not len(ready):
        return some, True
    few = first_of(state, ready, most - some)
    _give_up(turn, row.size_class, few)
    stuck = len(few) > 0 and bool((state.slots.state[few] == READY).all())
    return some + len(few), stuck or len(few) == len(ready)


def _give_up(turn: Turn, owner: SizeClass, slots: Slots) -> None:
    """Nobody can use these READY blocks; whoever they were handed to can't either."""
    state = turn.state
    if not len(slots):
        return
    hand_off.blocks_lost(state, owner, slots)
    slots = slots[state.slots.pins[slots] == 0]
    owner.policy.remove(slots)
    state.counters.dropped += len(slots)
    slot_lifecycle.forget_ready(turn, owner, slots, UNUSABLE)
