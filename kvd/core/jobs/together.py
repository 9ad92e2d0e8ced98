"""Small stores of one step that begin together: one piece, and so one transfer a rank, for all.

While many requests decode, a step brings a store of a block or two for each that has filled one.
A store takes a hundred small operations on arrays, however few its blocks are; together they take
little more than one. Each job still has its verdict, its end and its bytes.

Taken is only what nothing stands against: new keys, whole blocks, engine blocks that no copy uses,
and room for all. Whatever else is asked for has an event of its own, which says what becomes of it;
nothing has changed for it here. See decision 0037.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvd.core.actions import Reply, Verdict
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.blocks.reading import locate_each
from kvd.core.blocks.row_grants import grant_spare
from kvd.core.claims import prefix
from kvd.core.errors import KvdError
from kvd.core.events import JobKind, Run, StoreRequested, StoresRequested
from kvd.core.jobs import transfer
from kvd.core.jobs.offer import check_runs, joined, whole_rows
from kvd.core.jobs.store import can_store, in_flight
from kvd.core.keys import NO_SCOPE, U32, Bools, JobId, ScopeId, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.job import Job, JobShare, JobState, Offer, Part, Prefix
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import Session, State
from kvd.core.model.turn import Turn
from kvd.core.policy.base import Sight
from kvd.core.room.eviction import make_room
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.limits import MAX_JOBS_IN_FLIGHT

# Runs of all the stores in one event, where the policy of each group is told of each request by
# itself.
TOLD_ONE_BY_ONE = 8
BOARDS_TOLD = 256  # of ends, in one event: each rank hears of each job
MAX_KEPT_BLOCKS = 32_768  # of all the requests, which are not to make room for their own tails


@dataclass(slots=True, eq=False)
class Rows:
    """An offer of several stores, whose own `scope` says nothing.

    `stores`: the number of each row's, ascending. `scopes`: each row's, of its store's account;
    NO_SCOPE where it is yet to be opened.
    """

    offer: Offer
    stores: Slots
    scopes: U32

    def of(self, wanted: Bools) -> Rows:
        """The rows of the wanted stores."""
        mine = wanted[self.stores]
        if np.count_nonzero(mine) == len(mine):
            return self
        rows = np.flatnonzero(mine)
        return Rows(self.offer.rows(rows), self.stores[rows], self.scopes[rows])

    def by_store(self) -> Iterator[tuple[int, ScopeId, slice]]:
        """Each store that has any, the scope of its rows, and which they are."""
        starts = np.flatnonzero(np.diff(self.stores, prepend=-1))
        ends = [*starts[1:].tolist(), len(self.stores)]
        firsts = (self.stores[starts].tolist(), self.scopes[starts].tolist(), starts.tolist())
        for number, scope, start, end in zip(*firsts, ends, strict=True):
            yield number, ScopeId(scope), slice(start, end)


def store_together(turn: Turn, event: StoresRequested) -> None:
    """Start copying those that nothing stands against, unless there are fewer than two."""
    session = turn.state.require_session(event.session)
    begun = _begin(turn, session, event.stores)
    verdicts = tuple(
        Verdict(each.job, JobKind.STORE, accepted=True, reason="", blocks=begun[number])
        if number in begun
        else None
        for number, each in enumerate(event.stores)
    )
    turn.orders.append(Reply(verdicts))


def _begin(turn: Turn, session: Session, stores: Sequence[StoreRequested]) -> dict[int, int]:
    """Blocks that will go, by the number of each store that began."""
    state = turn.state
    if state.draining or state.admission.threshold > 1 or not can_store(state, session):
        return {}
    wanted = _may_begin(session, stores[: _most(state, session, stores)])
    try:
        several = _read(state, session, stores[: len(wanted)])
    except KvdError:
        return {}
    for rows in several:
        wanted[rows.stores[_obstructed(session, rows.offer)]] = False
    _keep_order(wanted, stores)
    several = [rows for rows in (each.of(wanted) for each in several) if len(rows.stores)]
    if np.count_nonzero(wanted) < 2 or not _may_open_scopes(state, session, stores, several):
        return {}
    prefixes = {
        number: prefix.of_context(state, session, stores[number].context)
        for number in np.flatnonzero(wanted).tolist()
    }
    needs = [(rows.offer.size_class, len(rows.stores)) for rows in several]
    if make_room(turn, needs, lambda: _kept(state, prefixes, several)):
        return {}
    parts = [_reserve(turn, session, stores, rows, prefixes) for rows in several]
    shares = _shares(session, stores, prefixes, several)
    transfer.start_shared(turn, tuple(shares.values()), tuple(parts))
    grant_spare(turn, [part.size_class for part in parts])
    return {number: share.blocks for number, share in shares.items()}


def _most(state: State, session: Session, stores: Sequence[StoreRequested]) -> int:
    """How many of the first ones may begin in one event, and so end in one."""
    most = BOARDS_TOLD // len(session.movers)
    if not any(each.policy.heeds_requests for each in state.namespace_of(session).classes):
        return most
    told = list(accumulate(len(each.runs) for each in stores))
    return min(most, bisect_right(told, TOLD_ONE_BY_ONE))


def _may_begin(session: Session, stores: Sequence[StoreRequested]) -> Bools:
    """Which of them are jobs that the session may start now, with something to store.

    As many as their requests have few blocks: those are held while room is made for all.
    """
    may = np.zeros(len(stores), dtype=np.bool_)
    named, kept = set[JobId](), 0
    for number, each in enumerate(stores):
        assert each.last, "a store that began before"
        assert not each.request_level, "a store that may wait for others"
        if len(session.jobs) + len(named) >= MAX_JOBS_IN_FLIGHT:
            break
        is_new = each.job > 0 and each.job not in session.jobs and each.job not in named
        named.add(each.job)
        found = session.prefixes.get(each.context.request)
        blocks = 0 if found is None else sum(len(used.slots) for used in found.used.values())
        if is_new and kept + blocks <= MAX_KEPT_BLOCKS and any(len(run.keys) for run in each.runs):
            may[number] = True
            kept += blocks
    return may


def _keep_order(wanted: Bools, stores: Sequence[StoreRequested]) -> None:
    """A request's tail begins no earlier than its head: without that it is of no use."""
    alone = set()
    for number, may in enumerate(wanted.tolist()):
        request = stores[number].context.request
        if not may:
            alone.add(request)
        elif request in alone:
            wanted[number] = False


def _read(state: State, session: Session, stores: Sequence[StoreRequested]) -> list[Rows]:
    """Of each group its blocks. Raises InvalidArgument where a run can't be meant."""
    for account in {each.context.account for each in stores}:
        namespaces.check_name(account, "account")
    check_runs(state, session, [run for each in stores for run in each.runs])
    by_group: dict[int, list[tuple[int, Run]]] = {}
    for number, each in enumerate(stores):
        for run in each.runs:
            if len(run.keys):
                by_group.setdefault(run.group, []).append((number, run))
    return [_read_group(state, session, stores, group, has) for group, has in by_group.items()]


def _read_group(
    state: State,
    session: Session,
    stores: Sequence[StoreRequested],
    group: int,
    numbered: list[tuple[int, Run]],
) -> Rows:
    runs = [run for _, run in numbered]
    words, engine_blocks, blocks = joined(runs)
    numbers = np.array([number for number, _ in numbered]).repeat([len(run.keys) for run in runs])
    accounts = [stores[number].context.account for number in numbers.tolist()]
    scopes, tags, slots = locate_each(state, session, accounts, group, words)
    owner = state.namespace_of(session).classes[group]
    offer = Offer(owner, None, words, tags, engine_blocks, blocks, slots)
    return Rows(offer, numbers, scopes)


def _may_open_scopes(
    state: State, session: Session, stores: Sequence[StoreRequested], several: list[Rows]
) -> bool:
    """Whether every account may have its scopes in all groups, and no other scope goes for it:
    that might be one of theirs."""
    new = {
        stores[number].context.account
        for rows in several
        for number in rows.stores[rows.scopes == NO_SCOPE].tolist()
    }
    groups = len(state.namespace_of(session).classes)
    return not new or namespaces.may_open(state, session.payer, len(new) * groups)


def _obstructed(session: Session, offer: Offer) -> Bools:
    """Which blocks are no new ones, or not to be copied now."""
    obstructed: Bools = offer.slots != NOWHERE
    obstructed |= ~whole_rows(offer)
    obstructed |= _repeated(offer.tags)
    obstructed |= in_flight(session, offer, np.arange(len(offer.tags)))
    blocks = offer.engine_blocks
    again = _repeated(blocks.ravel()).reshape(blocks.shape)
    if np.count_nonzero(again):
        obstructed |= (again & (blocks != NULL_ENGINE_BLOCK)).any(axis=1)
    return obstructed


def _repeated(values: npt.NDArray[np.unsignedinteger]) -> Bools:
    """Which of them equal an earlier one."""
    repeated = np.zeros(len(values), dtype=np.bool_)
    order = np.argsort(values, kind="stable")
    ordered = values.take(order)
    repeated[order[1:][ordered[1:] == ordered[:-1]]] = True
    return repeated


def _kept(
    state: State, prefixes: dict[int, Prefix], several: list[Rows]
) -> list[tuple[SizeClass, Slots]]:
    """What these requests have used: a tail is worth nothing without its head."""
    kept = []
    for rows in several:
        asked = [(prefixes[number], scope) for number, scope, _ in rows.by_store()]
        kept.append((rows.offer.size_class, prefix.held_together(state, asked)))
    return kept


def _reserve(
    turn: Turn,
    session: Session,
    stores: Sequence[StoreRequested],
    rows: Rows,
    prefixes: dict[int, Prefix],
) -> Part:
    """Slots for them, for which there is room; their requests have used them."""
    offer, owner = rows.offer, rows.offer.size_class
    turn.state.reuse.use(offer.tags, owner.spec.block_bytes, turn.now_ns)
    _open_scopes(turn, session, stores, rows)
    slots = slot_lifecycle.occupy(turn, offer, rows.scopes)
    _tell_policy(turn, rows, prefixes, slots)
    used = [
        prefix.Growth(prefixes[number], scope, slots[some], offer.blocks[some])
        for number, scope, some in rows.by_store()
    ]
    prefix.grow_together(turn, session, owner, used)
    scopes = tuple(dict.fromkeys(each.scope for each in used))
    return Part(owner, scopes, slots, slots, offer.engine_blocks)


def _open_scopes(
    turn: Turn, session: Session, stores: Sequence[StoreRequested], rows: Rows
) -> None:
    """From now on each row has one. `_may_open_scopes` has said that none goes for it."""
    group = rows.offer.size_class.group
    for number, scope, some in rows.by_store():
        if scope == NO_SCOPE:
            account = stores[number].context.account
            rows.scopes[some] = namespaces.open_scope(turn, session, account, group).scope


def _tell_policy(turn: Turn, rows: Rows, prefixes: dict[int, Prefix], slots: Slots) -> None:
    offer, policy = rows.offer, rows.offer.size_class.policy
    if not policy.heeds_requests:
        policy.insert(slots, offer.tags, Sight(turn.now_ns))
        return
    for number, scope, some in rows.by_store():
        sight = prefix.sight(turn, prefixes[number], scope, int(offer.blocks[some][0]))
        policy.insert(slots[some], offer.tags[some], sight)


def _shares(
    session: Session,
    stores: Sequence[StoreRequested],
    prefixes: dict[int, Prefix],
    several: list[Rows],
) -> dict[int, JobShare]:
    """A job for each store, and what of the piece is the job's."""
    blocks = np.zeros(len(stores), dtype=np.int64)
    filled = np.zeros(len(stores), dtype=np.int64)  # bytes
    for rows in several:
        offer, spec = rows.offer, rows.offer.size_class.spec
        given = np.count_nonzero(offer.engine_blocks != NULL_ENGINE_BLOCK, axis=1)
        blocks += np.bincount(rows.stores, minlength=len(stores))
        block_bytes = spec.block_bytes // spec.blocks_per_block
        np.add.at(filled, rows.stores, given * block_bytes)
    shares = {}
    for number, used in prefixes.items():
        store = stores[number]
        job = Job(session.session, store.job, JobKind.STORE, store.context.request, used)
        job.move(JobState.WHOLE)
        session.jobs[store.job] = job
        shares[number] = JobShare(job, int(blocks[number]), int(filled[number]))
    return shares
