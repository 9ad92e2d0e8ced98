"""The one writer: takes events to the pure machine and carries its orders out.

Everything here runs on the event loop. `Driver.call` handles one event and performs all its
actions before it returns, in their order, with no `await` between; what threads and movers have
to say comes back as further events.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from kvd.config.tiers import TierRule
from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.actions import Action, Answer, EndJob, SessionAccepted, Verdict
from kvd.core.engines.layouts import RankPlacement
from kvd.core.errors import NO_ROOM, RANKS_MISSING, KvdError, LimitExceeded
from kvd.core.events import Event, JobKind, JobStatus, Query
from kvd.core.keys import NODE_UNKNOWN, JobId, MoverId, NamespaceId, SessionId
from kvd.core.machine import Machine
from kvd.core.spec import NamespaceSpec
from kvd.core.upkeep.statistics import Statistics
from kvd.mover.process import MoverProcess
from kvd.pool.config import PoolError
from kvd.pool.pool import Pool
from kvd.runtime.batching import answer_in_pieces, run_pieces
from kvd.runtime.clock import AwakeClock, Clock
from kvd.runtime.event_log import EventLog, change_of, resident_changes
from kvd.runtime.fleet import MoverFleet, MoverLauncher
from kvd.runtime.listeners import DriverObserver, SessionSink
from kvd.runtime.long_work import LongWork
from kvd.runtime.page_mending import PageMending
from kvd.runtime.pending_jobs import PendingJobs
from kvd.runtime.refused_rows import RefusedRows
from kvd.runtime.row_teller import RowTeller
from kvd.runtime.threads import to_its_end
from kvd.runtime.tiers import Tiers
from kvd.runtime.turns import TURNS_BETWEEN_PIECES, FairQueue

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
ROOMS_AT_ONCE = 128  # groups whose room is published in one turn of the event loop
ZERO_AGAIN_SECONDS = 1.0  # after a row could not be zeroed
MOVERS_END_S = 5.0  # for the movers to end when the daemon does


@dataclass(frozen=True, slots=True)
class OpenSessionRecord:
    """What the driver knows of an open session: its namespace, and who takes its news."""

    namespace: NamespaceId
    sink: SessionSink
    user: int  # whose large calls take turns with other users'


BrokenInvariantHook = Callable[[Event, Exception, list[str]], None]


def exit_on_broken_invariant(event: Event, error: Exception, story: list[str]) -> None:
    """Tell the story and end: a daemon that doubts its own state serves nothing."""
    log.critical("broken invariant while handling %r", event, exc_info=error)
    log.critical("its slots and its job, from the oldest known event on:\n%s", "\n".join(story))
    logging.shutdown()
    os._exit(70)


class Driver:
    """The one writer: it owns the machine, the pool and the movers; see the module's docstring."""

    def __init__(
        self,
        machine: Machine,
        pool: Pool,
        observer: DriverObserver,
        clock: Clock | None = None,
        launch: MoverLauncher = MoverProcess.start,
        tiers: Sequence[TierRule] = (),
    ) -> None:
        self.machine = machine
        self.pool = pool
        self.incarnation = pool.incarnation
        self.on_broken_invariant: BrokenInvariantHook = exit_on_broken_invariant
        self.sessions: dict[SessionId, OpenSessionRecord] = {}
        self.jobs = PendingJobs()
        self.turns = FairQueue()
        self.event_log = EventLog(pool.incarnation, partial(resident_changes, machine), self.turns)
        self.clock = clock or AwakeClock()
        self.began_ns = self.clock.now_ns()
        self._observer = observer
        self.fleet = MoverFleet(pool, self.post, self._observer, self.turns, launch)
        self.fleet.on_rank_lost = self._rank_lost
        self.tiers = Tiers(
            tiers,
            pool,
            machine.fingerprint_of,
            machine.tenant_of,
            self.fleet.report,
            self.allocate_mover_id,
        )
        self._fields: dict[str, dict[str, str]] = {}  # by fingerprint, for the registry
        self._next_session = 0
        self._next_mover = 0
        self._follow_ups: deque[Event] = deque()
        self._refused = RefusedRows()
        self._handling = False
        self._teller = RowTeller(machine, self.fleet, self.turns, self._refused)
        self._mending = PageMending(machine, pool)
        self._rooms_scheduled = False
        self._rooms_stale = False  # something has happened since the turns were dealt
        self._room_turns: deque[NamespaceId] = deque()
        self._rooms: dict[NamespaceId, tuple[int, ...]] = {}  # as they were published last
        self._working: asyncio.Task[None] | None = None
        self._is_recovering = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.long_work = LongWork(machine.knows, self.call, self._spawn)

    def statistics(self, **which: Any) -> Statistics:
        """The machine's figures, with what is known of tiers' processes besides."""
        return self.tiers.seen(self.machine.statistics(**which))

    # -- events in --------------------------------------------------------------------------

    def call(self, event: Event) -> Any:
        """Handle the event and carry out its actions. The Reply's payload, or None.

        Raises KvdError when the event broke a rule; nothing has changed then.
        """
        assert not self._handling, "the driver was entered while it carried out actions"
        try:
            return self._handle(event)
        finally:
            self._follow_up()

    def post(self, event: Event) -> None:
        """Handle an event that nobody waits for, now or right after the present one."""
        self._follow_ups.append(event)
        if not self._handling:
            self._follow_up()

    def _follow_up(self) -> None:
        while self._follow_ups:
            self._handle_unasked(self._follow_ups.popleft())
        if self._refused:
            self._tell_refused_rows()

    def _handle_unasked(self, event: Event) -> None:
        """Handle what nobody waits for: a broken rule can only be logged."""
        try:
            self._handle(event)
        except KvdError as error:
            log.warning("refused %s: %s", type(event).__name__, error)

    def _handle(self, event: Event) -> Any:
        self._handling = True
        payload, is_decided = None, False
        try:
            orders = self.machine.handle(event, self.clock.now_ns())
            is_decided = True
            for order in orders:
                if isinstance(order, act.Reply):
                    payload = order.payload
                else:
                    self._carry_out(order)
        except Exception as error:
            if isinstance(error, KvdError) and not is_decided:
                raise  # it refused, and nothing has changed
            # The machine believes in what was not carried out: nothing may be served on that.
            self.on_broken_invariant(event, error, self._story(error))
            raise
        finally:
            self._handling = False
        self._schedule_rooms()
        self._schedule_work()
        return payload

    def _story(self, error: Exception) -> list[str]:
        try:
            return self.machine.story(error)
        except Exception as untold:  # noqa: BLE001 - the state is in doubt; this hides no error
            return [f"it can't be told: {untold!r}"]

    # -- orders out -------------------------------------------------------------------------

    def _carry_out(self, order: Action) -> None:
        match order:
            case act.StartTransfer():
                self._start_transfer(order)
            case act.WriteReady():
                self.pool.write_ready(order)
            case act.WriteStamps():
                self.pool.write_stamps(order)
            case act.WriteFree():
                self.pool.write_free(order)
            case act.PublishTags():
                if spilled := self.pool.publish(order):
                    self._observer.tags_spilled(spilled)
            case act.RetractTags():
                self.pool.retract(order)
            case (
                act.AnnounceStored()
                | act.AnnounceRemoved()
                | act.AnnounceCleared()
                | act.AnnounceTierLost()
            ):
                terms_of = self.machine.terms_of
                self.event_log.append(change_of(order, self.pool.tenant_of, terms_of))
            case act.NotePolicySwitch():
                log.info("%s", order)
            case act.UnmapRow() | act.ZeroRow() | act.ReleaseRow() if order.row in self._refused:
                self._follow_ups.extend(self._refused.take_back(order))
            case act.UnmapRow() if self.tiers.maps_as(order.mover):
                self.tiers.unmap_row(order)
            case act.RevokeTransfer() | act.KillMover() | act.PostBoard() | act.UnmapRow():
                self.fleet.carry_out(order)
            case act.AskTier() | act.WriteToTier() | act.ReadFromTier() | act.ClearTier():
                self.tiers.carry_out(order)
            case act.EndJob():
                self._end_job(order)
            case act.OpenNamespace():
                fields = self._fields.pop(order.spec.fingerprint, {})
                self.pool.open_namespace(order, fields)
            case act.OpenScope():
                self.pool.open_scope(order)
            case act.ClearScopes():
                self.pool.clear_scopes(order)
                self.tiers.scopes_cleared(order.namespace)
            case act.ForgetScopes():
                self.pool.forget_scopes(order)
            case act.ForgetNamespace():
                self.pool.forget_namespace(order)
            case act.GrantRow():
                self._grant_row(order)
            case act.ZeroRow():
                self._spawn(self._zero_row(order))
            case act.ReleaseRow():
                self.pool.release_row(order)
            case act.TellDone():
                self.long_work.tell_done(order)
            case act.Reply():
                raise AssertionError("a reply is no order")
            case _:
                assert_never(order)

    def _grant_row(self, order: act.GrantRow) -> None:
        try:
            self.pool.grant_row(order)
        except PoolError as error:
            log.warning("row %d can't be granted: %s", order.row, error)
            self._refused.add(order.row)
            return
        self.fleet.map_row(order)

    def _start_transfer(self, order: act.StartTransfer) -> None:
        if self._refused and not all(self.pool.has(part.slots) for part in order.parts):
            self._revoke(order, NO_ROOM)
        elif not self._teller.tell_rows_of(order):
            self._revoke(order, RANKS_MISSING)
        else:
            self.fleet.start_transfer(order)

    def _revoke(self, order: act.StartTransfer, reason: str) -> None:
        revoked = ev.TransferOutcome.REVOKED
        self._follow_ups.append(
            ev.TransferFinished(order.mover, order.transfer, revoked, 0, 0, reason=reason)
        )

    def _tell_refused_rows(self) -> None:
        """The core gives back what was not granted, once nothing uses its slots."""
        self._refused -= {row for row in sorted(self._refused) if self._handle(ev.RowRefused(row))}

    def _end_job(self, order: EndJob) -> None:
        self.jobs.ended(order)
        self._observer.job_ended(order)
        record = self.sessions.get(order.session)
        if record is not None:
            record.sink.job_ended(order)
        else:
            self.jobs.forget_if_idle(order.session)

    async def _zero_row(self, order: act.ZeroRow) -> None:
        while True:
            try:
                await to_its_end(self.pool.zero_row, order)
                break
            # Of descriptors, memory or threads (a RuntimeError) there may be more later.
            except (OSError, MemoryError, RuntimeError) as error:
                log.warning("row %d can't be zeroed yet: %s", order.row, error)
                await asyncio.sleep(ZERO_AGAIN_SECONDS)
        self.post(ev.RowZeroed(order.row))

    def _schedule_rooms(self) -> None:
        if not self.sessions:
            return
        self._rooms_stale = True
        self._schedule_room_turn()

    def _schedule_room_turn(self) -> None:
        if not self._rooms_scheduled:
            self._rooms_scheduled = True
            loop = asyncio.get_running_loop()
            # Behind the answer, if there is one.
            loop.call_soon(loop.call_soon, self._publish_rooms)

    def _publish_rooms(self) -> None:
        """Tell clients what they could store: of some namespaces now, of the next ones next.

        Goes on until all were told since the last event.
        """
        self._rooms_scheduled = False
        turns = self._room_turns
        if not turns:
            self._rooms_stale = False
            live = {record.namespace for record in self.sessions.values()}
            turns.extend(live)
            self._rooms = {n: room for n, room in self._rooms.items() if n in live}
        groups = 0
        while turns and groups < ROOMS_AT_ONCE:
            namespace = turns.popleft()
            if self.machine.knows(namespace):
                groups += self._publish_room(namespace)
        if turns or (self._rooms_stale and self.sessions):
            self._schedule_room_turn()

    def _publish_room(self, namespace: NamespaceId) -> int:
        """How many groups it has."""
        room = self.machine.room(namespace)
        if self._rooms.get(namespace) != room:
            self._rooms[namespace] = room
            self.pool.set_room(namespace, room)
        return len(room)

    # -- sessions ---------------------------------------------------------------------------

    def allocate_session_id(self) -> SessionId:
        self._next_session += 1
        return SessionId(self._next_session)

    def open_session(
        self, event: ev.SessionOpened, fields: dict[str, str], sink: SessionSink, user: int = 0
    ) -> SessionAccepted:
        """Open a user's session; `fields` describe its namespace to operators.

        LimitExceeded, and nothing has changed, where its namespace can't have an index page.
        """
        try:
            self._prepare_page(event.spec)
        except PoolError as error:
            log.warning("a session of uid %d is refused: %s", user, error, extra={"user": user})
            raise LimitExceeded(str(error), "namespace") from error
        self._fields[event.spec.fingerprint] = fields
        try:
            accepted: SessionAccepted = self.call(event)
        finally:
            self._fields.pop(event.spec.fingerprint, None)
        self.sessions[event.session] = OpenSessionRecord(accepted.namespace, sink, user)
        self._schedule_rooms()
        return accepted

    def _prepare_page(self, spec: NamespaceSpec) -> None:
        """What an order to open this namespace will take is had before the core decides."""
        blocks = self.machine.blocks_of_new(spec)
        if blocks is not None:
            self.pool.prepare_page(blocks)

    def close_session(self, session: SessionId, *, gone: bool = False) -> None:
        """End a session: its claims go at once, its submitted copies may end, then its movers do.

        `gone`: its engine has ended, and with it all use of what was its own.
        """
        record = self.sessions.pop(session, None)
        if record is None:
            return
        self.call(ev.SessionClosed(session, gone))
        self.jobs.forget_if_idle(session)

    # -- verbs in pieces --------------------------------------------------------------------

    async def lookup(self, session: SessionId, queries: Sequence[Query]) -> tuple[Answer, ...]:
        """Answers in the order of the queries; yields to other calls between pieces.

        What a tier had to be asked for, and says at once, is part of them. They count once.
        """
        record = self.sessions.get(session)
        tenant = None if record is None else self.machine.tenant_of(record.namespace)
        once = not self.tiers.may_answer_soon(tenant or "")

        def ask(some: tuple[Query, ...]) -> tuple[Answer, ...]:
            found: tuple[Answer, ...] = self.call(ev.LookupRequested(session, some, once))
            return found

        let_others_in = partial(self.let_others_in, session)
        asked = self.tiers.questions
        answers = await answer_in_pieces(queries, ask, let_others_in)
        if once:
            return answers
        is_new = self.tiers.questions > asked and all(each.lease is None for each in answers)
        if is_new and await self.tiers.answered_soon():
            answers = await answer_in_pieces(queries, ask, let_others_in)
        self.call(ev.LookupAnswered(tuple(each.statuses for each in answers)))
        return answers

    async def let_others_in(self, session: SessionId) -> None:
        """Between the pieces of a session's call: leave the loop to other calls."""
        record = self.sessions.get(session)
        await self.turns.let_others_in(None if record is None else record.user)

    async def store(self, event: ev.StoreRequested) -> Verdict:
        """Store in pieces of at most PIECE_KEYS keys; the verdict covers them all."""
        pieces = list(run_pieces(event.runs))
        verdicts: list[Verdict] = []
        fresh = self.jobs.started(event.session, event.job)
        try:
            for number, runs in enumerate(pieces):
                if number:
                    await self.let_others_in(event.session)
                verdicts.append(
                    self.call(
                        ev.StoreRequested(
                            event.session,
                            event.job,
                            event.context,
                            runs,
                            event.request_level,
                            last=number == len(pieces) - 1,
                        )
                    )
                )
        except KvdError as error:
            if fresh and not verdicts:
                self.refuse(event.session, event.job, JobKind.STORE, error)
            raise
        refused = next((v for v in verdicts if not v.accepted), None)
        return Verdict(
            job=event.job,
            kind=JobKind.STORE,
            accepted=any(v.accepted for v in verdicts),
            reason=refused.reason if refused else "",
            blocks=sum(v.blocks for v in verdicts),
            message=refused.message if refused else "",
        )

    def load(self, event: ev.LoadRequested) -> Verdict:
        """Start a load; all or nothing."""
        fresh = self.jobs.started(event.session, event.job)
        try:
            verdict: Verdict = self.call(event)
        except KvdError as error:
            if fresh:
                self.refuse(event.session, event.job, JobKind.LOAD, error)
            raise
        return verdict

    def refuse(self, session: SessionId, job: JobId, kind: JobKind, error: KvdError) -> None:
        """End a job that broke a rule: its ranks were told of it by their engine, and wait."""
        for mover in self.fleet.of_session(session):
            self.fleet.carry_out(act.PostBoard(mover, job, kind, JobStatus.REFUSED, 0, 0))
        self._end_job(EndJob(session, job, kind, JobStatus.REFUSED, error.reason, 0, 0))

    # -- movers -----------------------------------------------------------------------------

    def allocate_mover_id(self) -> MoverId:
        self._next_mover += 1
        return MoverId(self._next_mover)

    def has_ends_to_come(self, session: SessionId) -> bool:
        """Whether the end of a former mover's copies goes on in pieces: attach none before."""
        return self.machine.has_ends_to_come(session)

    def attach_rank(
        self, session: SessionId, placement: RankPlacement, process: MoverProcess
    ) -> None:
        """Make the mover serve a session's rank; it maps the namespace's rows a few at a time.

        Transfers may follow at once.
        """
        record = self.sessions[session]
        mover = self.fleet.attach(process, placement, session, record.namespace)
        gpu = process.facts.gpu
        attached = ev.RankAttached(
            session,
            process.mover,
            placement.rank,
            placement.shard,
            placement.writer,
            NODE_UNKNOWN if gpu is None else gpu.numa_node,
            process.engine_blocks,
        )
        try:
            self.call(attached)
        except KvdError:
            self.fleet.detach(process.mover)
            raise
        self._spawn(self._teller.tell_all(mover, record.user))

    async def end_rank(self, mover: MoverId, reason: str) -> None:
        """Have the rank's mover ended; returns when no copy can touch the rank's memory."""
        if mover in self.fleet.attached:
            self.call(ev.RankEnding(mover, reason))  # the core orders its end
        else:
            self.fleet.kill_unattached(mover, reason)
        await self.fleet.wait_gone(mover)

    def _rank_lost(self, session: SessionId, rank: int, reason: str) -> None:
        record = self.sessions.get(session)
        if record is not None:
            record.sink.rank_lost(rank, reason)

    # -- life -------------------------------------------------------------------------------

    def recover(self) -> Iterator[None]:
        """Tell the core what the pool holds, in pieces. PoolError: no index page can be made."""
        self._is_recovering = True  # long work begins after the last piece
        for event in self.pool.recovered():
            if isinstance(event, ev.ScopesRecovered):
                self._prepare_page(event.spec)
            self.call(event)
            yield
        self._is_recovering = False
        self._schedule_work()

    async def run(self) -> None:
        """Tick the machine until cancelled.

        Before a tick finds anything late, what movers have said by then is handled, as far as that
        takes no long time.
        """
        self.tiers.begin()
        while await asyncio.sleep(TICK_SECONDS, result=True):
            for _ in range(TURNS_BETWEEN_PIECES):  # after a sleep the loop looks at its sockets
                await asyncio.sleep(0)
            await self.fleet.handle_reports()
            self.call(ev.TimerTicked())
            self.pool.upkeep()
            self._mending.go_on()

    def _schedule_work(self) -> None:
        if self._working is None and not self._is_recovering and self.machine.has_work():
            self._working = self._spawn(self._work())

    async def _work(self) -> None:
        """Go on with long work, a piece at a time, while there is any."""
        try:
            while self.machine.has_work():
                await self.turns.let_others_in(None)
                self.call(ev.WorkContinued())
        finally:
            self._working = None

    async def drain(self, deadline_s: float) -> int:
        """Take no more stores and wait for the jobs under way; the number still running."""
        self.call(ev.DrainStarted())
        return await self.jobs.wait_for_all(deadline_s, lambda: self.machine.state.draining)

    def undrain(self) -> None:
        """Take stores again. Whoever waits for a drain does so no longer."""
        self.call(ev.DrainEnded())
        self.jobs.look_again()

    async def close(self) -> None:
        """End every mover, then the pool's mappings. The cache itself stays in its files.

        A mover that the kernel does not end in time, as where it waits for a device, stays noted
        for the pool's next owner.
        """
        ends = [
            self._spawn(self.end_rank(mover, "the daemon is stopping"))
            for mover in self.fleet.running()
        ]
        # Whoever started these has given them up, and the kernel ends their processes.
        ends += [self._spawn(self.fleet.wait_gone(mover)) for mover in self.fleet.starting()]
        if ends:
            _, left = await asyncio.wait(ends, timeout=MOVERS_END_S)
            if left:
                log.warning("%d movers can't be ended now", len(left))
        await self.tiers.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pool.close()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(_report_failure, self._tasks))
        return task


def _report_failure(tasks: set[asyncio.Task[Any]], task: asyncio.Task[Any]) -> None:
    tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        log.error("a background task failed", exc_info=task.exception())
