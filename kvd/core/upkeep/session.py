"""Sessions and ranks: they come, change their epoch, and end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvd.core.actions import KillMover, Reply, SessionAccepted
from kvd.core.blocks import extent_fit, namespaces
from kvd.core.blocks.row_grants import grant_spare
from kvd.core.claims import lease, prefix
from kvd.core.errors import (
    MOVER_GONE,
    RANK_COUNT,
    SESSION_CLOSED,
    InvalidArgument,
    LayoutMismatch,
    LimitExceeded,
    UnknownRegistration,
)
from kvd.core.events import (
    EpochChanged,
    MoverGone,
    RankAttached,
    RankEnding,
    SessionClosed,
    SessionOpened,
)
from kvd.core.jobs import transfer, waits
from kvd.core.keys import NODE_UNKNOWN
from kvd.core.lifecycle import SESSION_ENDED
from kvd.core.model.backlog import CallOff
from kvd.core.model.job import JobState
from kvd.core.model.state import (
    MAX_ENGINE_BLOCKS,
    MAX_SESSION_ENGINE_BLOCKS,
    MAX_SESSIONS,
    MAX_TENANT_ENGINE_BLOCKS,
    Mover,
    MoverState,
    Session,
    SessionState,
    State,
)
from kvd.core.model.turn import Turn
from kvd.core.room import expiry, row_rights
from kvd.core.room.reclaim import row_unmapped
from kvd.core.tiers import search
from kvd_proto.limits import MAX_RANKS

CLOSE_GRACE_NS = 1_000_000_000  # for submitted copies of a closed session
LINGERING_AT_ONCE = 16  # movers that one event ends then, but for those of the last session


def session_opened(turn: Turn, event: SessionOpened) -> None:
    """The session, its namespace and the scopes of its epoch."""
    state = turn.state
    if event.session in state.sessions:
        raise InvalidArgument(f"session {event.session} is open", "session_id")
    if len(state.sessions) >= MAX_SESSIONS:
        raise LimitExceeded(f"{MAX_SESSIONS} sessions are open", "session_id")
    if not 1 <= event.world_size <= MAX_RANKS:
        raise InvalidArgument(
            f"world_size is {event.world_size}, must be 1..{MAX_RANKS}",
            "world_size",
            RANK_COUNT,
        )
    namespaces.check_name(event.epoch, "epoch")
    namespaces.check_spec(state, event.spec)
    if event.spec.fingerprint not in state.by_fingerprint:
        extent_fit.require_fit(state, event.spec)
    payer = event.payer or event.spec.tenant
    namespaces.check_scopes(state, event.spec, event.epoch, payer)
    if namespaces.lacks_room(state, event.spec, payer):
        idle = expiry.forgettable(state, payer)
        if idle is not None and namespaces.namespaces_left(state, payer, idle):
            expiry.forget(turn, idle)
    namespace = namespaces.open_namespace(turn, event.spec, payer)
    session = Session(
        event.session, namespace.namespace, event.epoch, event.world_size, event.engine, payer
    )
    session.renewed_ns = turn.now_ns
    session.remembered.tenant = namespace.tenant.remembered
    state.sessions[event.session] = session
    expiry.enter(turn, session, own=event.own_epoch)
    row_rights.session_came(state, session)
    epoch = namespaces.open_epoch(turn, session)
    grant_spare(turn, namespace.classes)
    turn.orders.append(Reply(SessionAccepted(namespace.namespace, epoch)))


def session_closed(turn: Turn, event: SessionClosed) -> None:
    """Leases end, waits end, and movers are asked to give up what they have not started.

    A store whose ranks all report done becomes readable nevertheless. The movers end once no copy
    of the session runs, or when the grace for those has passed.
    """
    state = turn.state
    session = state.sessions.get(event.session)
    if session is None:
        if event.gone:
            expiry.engine_gone(turn, event.session)
        return
    was_open = session.is_open
    if event.gone and session.state is not SessionState.DEPARTED:
        session.move(SessionState.DEPARTED)
    elif was_open:
        session.move(SessionState.CLOSED)
    if not was_open:
        return
    lease.end_all(state, session)
    search.end_all(state, session)
    waits.drop(state, session)
    running = [each for mover in transfer.ranks(session) for each in mover.transfers.values()]
    few = state.backlog.call_off(running, CallOff.REVOKE, SESSION_CLOSED)
    transfer.revoke(turn, few, SESSION_CLOSED)
    for job in list(session.jobs.values()):
        if job.is_open:
            transfer.fail_job(job, SESSION_CLOSED)
            job.move(JobState.WHOLE)
            transfer.end_job_when_done(turn, job)
    wind_up(turn, session)
    if session.is_winding_up:
        state.backlog.lingering[session.session] = turn.now_ns


def wind_up(turn: Turn, session: Session) -> None:
    """End the movers of a closed session once no job of it is left; with the last one it is gone.

    What ended leases held is let go before that, too.
    """
    state = turn.state
    if not session.is_winding_up or session.jobs:
        return
    for mover in transfer.ranks(session):
        end_mover(turn, mover, SESSION_ENDED)
    if not (session.movers or session.ended_leases):
        departed = session.state is SessionState.DEPARTED
        session.move(SessionState.FORGOTTEN)
        del state.sessions[session.session]
        state.backlog.lingering.pop(session.session, None)
        row_rights.session_went(state, session)
        prefix.forget_all(state, session)
        expiry.leave(turn, session, departed=departed)


def rank_attached(turn: Turn, event: RankAttached) -> None:
    state = turn.state
    session = state.require_session(event.session)
    namespace = state.namespace_of(session)
    if event.mover in state.movers:
        raise InvalidArgument(f"mover {event.mover} is attached", "registration_id")
    if not 0 <= event.rank < session.world_size:
        raise InvalidArgument(f"rank {event.rank} of {session.world_size}", "rank", RANK_COUNT)
    if event.rank in session.movers:
        raise InvalidArgument(f"rank {event.rank} is registered", "rank")
    shards = namespace.classes[0].shards
    if not 0 <= event.shard < shards:
        raise LayoutMismatch(f"shard {event.shard} of {shards}", "shard")
    others = session.movers.values()
    if event.writer and any(m.writer and m.shard == event.shard for m in others):
        raise LayoutMismatch(f"shard {event.shard} has another writer", "writer")
    _check_engine_blocks(state, session, event.engine_blocks)
    mover = Mover(
        event.mover, event.session, event.rank, event.shard, event.writer, event.engine_blocks
    )
    transfer.end_those_of_gone_movers(turn, session)
    session.movers[event.rank] = mover
    state.movers[event.mover] = mover
    if event.node != NODE_UNKNOWN and (event.writer or event.shard not in namespace.shard_nodes):
        namespace.shard_nodes[event.shard] = event.node
    if state.free_extents.is_numa and session.usable():
        grant_spare(turn, namespace.classes)


def _check_engine_blocks(state: State, session: Session, said: tuple[int, ...]) -> None:
    """Raise LimitExceeded where the maps of engine blocks in flight could grow too large."""
    check_ranks_engine_blocks(said)
    tenant = state.namespace_of(session).tenant
    others = (
        s
        for s in state.sessions.values()
        if s is not session and state.namespace_of(s).tenant is tenant
    )
    _check_sum(
        sum(said) + sum(map(_engine_blocks, others)),
        MAX_TENANT_ENGINE_BLOCKS,
        f"of all engines of tenant {tenant.tenant!r}",
    )


def check_ranks_engine_blocks(said: Sequence[int]) -> None:
    """Raise LimitExceeded where a rank has more engine blocks than one may in any session."""
    for group, count in enumerate(said):
        if count > MAX_ENGINE_BLOCKS:
            raise LimitExceeded(
                f"group {group} has {count} engine blocks, at most {MAX_ENGINE_BLOCKS}",
                f"groups[{group}].num_blocks",
            )
    _check_sum(sum(said), MAX_SESSION_ENGINE_BLOCKS, "of an engine")


def _check_sum(count: int, most: int, whose: str) -> None:
    if count > most:
        raise LimitExceeded(
            f"{count} engine blocks in all groups {whose}, at most {most}", "groups.num_blocks"
        )


def _engine_blocks(session: Session) -> int:
    """In all groups, on the rank that has most."""
    return max((sum(mover.engine_blocks) for mover in session.movers.values()), default=0)


def rank_ending(turn: Turn, event: RankEnding) -> None:
    mover = turn.state.movers.get(event.mover)
    if mover is None:
        raise UnknownRegistration(f"no mover {event.mover}", "registration_id")
    end_mover(turn, mover, event.reason or MOVER_GONE)


def end_mover(turn: Turn, mover: Mover, reason: str, *, is_late: bool = False) -> None:
    """Have the mover killed: no new transfer goes to it, what it was storing won't be readable.

    Its stores' slots stay quarantined until it reports their end, or is gone.
    """
    if not mover.is_serving:
        return
    mover.move(MoverState.ENDING)
    # What of the others ends meanwhile fails all the same: its mover is ending.
    running = list(mover.transfers.values())
    for each in turn.state.backlog.call_off(running, CallOff.FAIL, MOVER_GONE):
        transfer.fail_running(turn, each, MOVER_GONE)
    turn.orders.append(KillMover(mover.mover, reason, is_late))


def end_lingering(turn: Turn) -> None:
    """Closed sessions whose copies still run though their grace has passed lose their movers.

    Some of them; what is left has its turn with the next piece of long work.
    """
    state = turn.state
    closed_by = turn.now_ns - CLOSE_GRACE_NS
    closed = state.backlog.lingering
    late = list(takewhile(lambda number: closed[number] <= closed_by, closed))
    left, state.backlog.has_lingering = LINGERING_AT_ONCE, False
    for number in late:
        if left <= 0:
            state.backlog.has_lingering = True
            return
        del closed[number]
        session = state.sessions[number]
        running = {mover.mover for mover in transfer.ranks(session) if mover.transfers}
        left -= max(1, len(session.movers))
        for mover in transfer.ranks(session):
            ran_on = mover.mover in running
            reason = f"{SESSION_ENDED}, and a copy ran on" if ran_on else SESSION_ENDED
            end_mover(turn, mover, reason, is_late=ran_on)


def mover_gone(turn: Turn, event: MoverGone) -> None:
    """Every copy of it has ended: pins, rows and slots that waited for it are free."""
    state = turn.state
    mover = state.movers.get(event.mover)
    if mover is None:
        return
    session = state.sessions[mover.session]
    if mover.is_serving and mover.transfers:  # nobody told us to end it: its worker did, or a crash
        state.counters.movers_killed += 1
    transfer.mover_gone(turn, mover)
    for row in list(state.retiring):
        row_unmapped(turn, row, event.mover)
    wind_up(turn, session)


def epoch_changed(turn: Turn, event: EpochChanged) -> None:
    """The session's keys meet those of another epoch from now on; its leases end.

    It won't come back to the epoch that it leaves.
    """
    state = turn.state
    session = state.require_session(event.session)
    namespaces.check_name(event.epoch, "epoch")
    namespaces.check_scopes(state, state.namespace_of(session).spec, event.epoch, session.payer)
    lease.end_all(state, session)
    search.end_all(state, session)
    left, session.epoch = session.epoch, event.epoch
    session.epoch_entered_ns = turn.now_ns
    expiry.enter(turn, session, own=True)
    turn.orders.append(Reply(namespaces.open_epoch(turn, session)))
    if left != session.epoch:
        expiry.leave_epoch(state, session, left, turn.now_ns)
        expiry.look(turn)
