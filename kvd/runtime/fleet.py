"""The movers that run: one process per registered rank.

Turns the core's orders into words to mover processes, and what the movers say into events.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.engines.layouts import RankPlacement
from kvd.core.errors import LimitExceeded, UnknownRegistration
from kvd.core.events import Event, JobKind, TransferOutcome
from kvd.core.in_turn import InTurn
from kvd.core.keys import MoverId, NamespaceId, RowId, SessionId, Slots, TransferId
from kvd.core.lifecycle import step
from kvd.core.shares import Bound, Shares
from kvd.mover.process import Finished, LocatedPart, MoverConfig, MoverProcess, MoverSink
from kvd.pool.pool import Pool
from kvd.processes.parent import KILLED, STOPPED
from kvd.runtime.damage import log_damage
from kvd.runtime.starts import StartsInTurn
from kvd.runtime.told_rows import ToldRows
from kvd.runtime.turns import FairQueue

log = logging.getLogger(__name__)

# Starts a mover process and returns when it has said hello.
MoverLauncher = Callable[[MoverConfig, MoverSink], Awaitable[MoverProcess]]
# Each takes tens of MiB. Those that start and those that end count too, so that nobody has more by
# letting them go and come.
MAX_MOVERS = 128
MAX_MOVERS_OF_USER = 64
MAX_MOVERS_OF_WORKER = 4  # one, and while it changes registrations one or two more
REPORTS_WAIT_S = 1.0  # most that a tick waits for what movers have said before it
MOVERS = "movers that start, run or end"
Report = Event | asyncio.Future[None]
MoverOrder = act.RevokeTransfer | act.KillMover | act.PostBoard | act.UnmapRow


class TransferObserver(Protocol):
    """Counts transfers, for metrics."""

    def transfer_finished(
        self, kind: JobKind, outcome: TransferOutcome, bytes_copied: int, duration_ns: int
    ) -> None:
        """One rank's copy has ended."""


class MoverOwner(NamedTuple):
    """For whom a mover runs: a user, and one of the user's worker connections."""

    uid: int
    worker: str


class FleetStage(enum.Enum):
    """How far a mover's life in the fleet has come."""

    STARTING = "it counts for its owner, and takes no orders yet"
    RUNNING = "it takes orders"
    ENDED = "its process is gone; what it said before is being handled"
    GONE = "it has ended, or never came up"


FLEET_STEPS: frozenset[tuple[FleetStage, FleetStage]] = frozenset(
    {
        (FleetStage.STARTING, FleetStage.RUNNING),
        (FleetStage.STARTING, FleetStage.GONE),
        (FleetStage.RUNNING, FleetStage.ENDED),
        (FleetStage.ENDED, FleetStage.GONE),
    }
)


@dataclass(slots=True, eq=False)
class FleetMover:
    """One mover, from before its start until its end."""

    owner: MoverOwner
    process: MoverProcess | None = None  # while it is RUNNING
    stage: FleetStage = FleetStage.STARTING
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # and told of to everybody

    def move(self, new: FleetStage) -> None:
        """Take a step of the table."""
        self.stage = step(FLEET_STEPS, self.stage, new)


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """A transfer that a mover was given."""

    kind: JobKind
    slots: Slots  # of all its parts, in their order


@dataclass(slots=True)
class AttachedMover:
    """A mover whose rank belongs to a session, and what it has done."""

    process: MoverProcess
    placement: RankPlacement
    session: SessionId
    namespace: NamespaceId
    submitted: dict[TransferId, Submitted] = field(default_factory=dict)  # and not ended
    bytes_by_kind: Counter[JobKind] = field(default_factory=Counter)
    busy_ns_by_kind: Counter[JobKind] = field(default_factory=Counter)
    rows: ToldRows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = ToldRows(self.process, self.placement.shard)

    async def warm(self, within_s: float) -> bool:
        """Wait until it knows all rows and has made them fast; False: not yet."""
        try:
            async with asyncio.timeout(within_s):
                await self.rows.wait()
                return await self.process.warm(within_s)
        except TimeoutError:
            return False


class MoverFleet:
    """Every mover process of this daemon. Lives on the event loop; is the movers' sink."""

    def __init__(
        self,
        pool: Pool,
        post: Callable[[Event], None],
        observer: TransferObserver,
        turns: FairQueue,
        launch: MoverLauncher = MoverProcess.start,
    ) -> None:
        self._turns = turns
        self.attached: dict[MoverId, AttachedMover] = {}
        self._pool = pool
        self._post = post
        # Told of every attached rank whose mover ended: session, rank, reason.
        self.on_rank_lost: Callable[[SessionId, int, str], None] = lambda *_: None
        # Told of every mover that has ended, before that. It serves whoever keeps a record of it.
        self.on_mover_gone: Callable[[MoverId], None] = lambda _mover: None
        self._observer = observer
        self._launch = launch
        self._movers: dict[MoverId, FleetMover] = {}  # but for those that are GONE
        self._shares = Shares(Bound(MOVERS, MAX_MOVERS, MAX_MOVERS_OF_USER, field="rank"))
        self._starts = StartsInTurn()
        # Of users; tiers' of None. A future among them is somebody who waits until those before it
        # are handled.
        self._reports: InTurn[int | None, Report] = InTurn()

    async def start(
        self,
        config: MoverConfig,
        owner: MoverOwner,
        check: Callable[[], None] = lambda: None,
    ) -> MoverProcess:
        """Start a rank's mover process; from its first moment the pool's next owner knows of it.

        A few start at a time. LimitExceeded where there are as many as there may be. `check` is
        called when it is this one's turn, with nothing between it and the start; what it raises
        ends that.
        """
        if sum(mover.owner == owner for mover in self._movers.values()) >= MAX_MOVERS_OF_WORKER:
            raise LimitExceeded(
                f"this worker's connection has {MAX_MOVERS_OF_WORKER} {MOVERS}, as many as one may:"
                " a rank has one; unregister ranks",
                "rank",
            )
        self._shares.take(owner.uid)
        mover = self._movers[config.mover] = FleetMover(owner)
        try:
            async with self._starts.hold(owner.uid):
                check()
                mover.process = await self._launch(config, self)
        except BaseException:
            self._forget(config.mover)
            mover.gone.set()
            raise
        mover.move(FleetStage.RUNNING)
        return mover.process

    def _forget(self, mover: MoverId) -> None:
        """It is GONE: whoever waits for that has yet to be told."""
        gone = self._movers.pop(mover)
        gone.move(FleetStage.GONE)
        self._shares.give_back(gone.owner.uid)

    def attach(
        self,
        process: MoverProcess,
        placement: RankPlacement,
        session: SessionId,
        namespace: NamespaceId,
    ) -> AttachedMover:
        """From now on the mover serves this rank of this session.

        It is told of rows that are granted from now on; of those there are, by who calls.
        """
        attached = AttachedMover(process, placement, session, namespace)
        self.attached[process.mover] = attached
        return attached

    def detach(self, mover: MoverId) -> None:
        """The core would not have it: the mover serves no rank."""
        self.attached.pop(mover, None)

    def running(self) -> list[MoverId]:
        """Movers whose process has not ended."""
        return [m for m, mover in self._movers.items() if mover.stage is FleetStage.RUNNING]

    def starting(self) -> list[MoverId]:
        """Movers that are being started; there may be a process of each."""
        return [m for m, mover in self._movers.items() if mover.stage is FleetStage.STARTING]

    def of_session(self, session: SessionId) -> list[MoverId]:
        """Movers attached to the session's ranks."""
        return [m for m, attached in self.attached.items() if attached.session == session]

    def process_of(self, mover: MoverId) -> MoverProcess:
        """The running mover process of a registration."""
        found = self._movers.get(mover)
        if found is None or found.process is None:
            raise UnknownRegistration(
                f"registration {mover} is not known or its mover has ended", "registration_id"
            )
        return found.process

    async def warm(self, session: SessionId, within_s: float) -> bool:
        """Wait until the session's movers have made their mapped rows fast; False: not yet."""
        movers = [self.attached[mover] for mover in self.of_session(session)]
        return all(await asyncio.gather(*(mover.warm(within_s) for mover in movers)))

    def kill_unattached(self, mover: MoverId, reason: str) -> None:
        """End a mover that serves no session: of those that do, the core decides."""
        assert mover not in self.attached, "a mover of a session is ended by the core"
        self.carry_out(act.KillMover(mover, reason))

    async def wait_gone(self, mover: MoverId) -> None:
        """Returns when the mover's process is gone, at once where it is."""
        found = self._movers.get(mover)
        if found is not None:
            await found.gone.wait()

    # -- orders -----------------------------------------------------------------------------

    def map_row(self, order: act.GrantRow) -> None:
        """Tell every mover of the row's namespace to map its shard of it."""
        for attached in self.attached.values():
            if attached.namespace == order.namespace:
                attached.rows.tell((order,))

    def knows_rows(self, mover: MoverId) -> bool:
        """Whether the mover was told of all of its namespace's rows."""
        attached = self.attached.get(mover)
        return attached is None or attached.rows.complete

    def start_transfer(self, order: act.StartTransfer) -> None:
        """Give the mover its half of a piece; a full queue comes back as a revoked transfer."""
        attached = self.attached[order.mover]
        shard = attached.placement.shard
        parts = []
        for part in order.parts:
            extents, offsets = self._pool.locate(part.slots, shard)
            checksums = None
            if order.kind is JobKind.LOAD:
                checksums = self._pool.checksums(part.slots, shard)
                if checksums is not None and not checksums.any():  # NO_SUM: they are all unknown
                    checksums = None
            parts.append(LocatedPart(part.group, extents, offsets, part.engine_blocks, checksums))
        slots = np.concatenate([part.slots for part in order.parts])
        attached.submitted[order.transfer] = Submitted(order.kind, slots)
        if not attached.process.start_transfer(order.transfer, order.jobs, order.kind, parts):
            refused = Finished(order.transfer, TransferOutcome.REVOKED)
            self.transfer_finished(order.mover, refused)

    def carry_out(self, order: MoverOrder) -> None:
        """Pass an order on. A mover that has ended needs none: MoverGone says the rest."""
        mover = self._movers.get(order.mover)
        process = None if mover is None else mover.process
        if mover is None or process is None:
            return
        match order:
            case act.RevokeTransfer():
                process.revoke(order.transfer)
            case act.KillMover():
                log.log(
                    logging.WARNING if order.is_late else logging.INFO,
                    "ending mover %d (pid %d): %s",
                    order.mover,
                    process.pid,
                    order.reason,
                    extra={"user": mover.owner.uid, "mover": order.mover},
                )
                process.kill()
            case act.PostBoard():
                process.post(
                    order.job, order.kind, order.status, order.bytes_copied, order.duration_ns
                )
            case act.UnmapRow():
                process.unmap_row(order.row)
                if order.mover in self.attached:
                    self.attached[order.mover].rows.taken_back(order.row)

    # -- what movers report (MoverSink) -------------------------------------------------------

    def process_started(self, mover: MoverId, pid: int, start_time: int) -> None:  # noqa: ARG002
        """Note it for the pool's next owner, or let it not begin."""
        self._pool.record_mover(pid, start_time)

    def process_ended(self, mover: MoverId, pid: int) -> None:
        """Nobody has to end it any more."""
        try:
            self._pool.forget_mover(pid)
        except OSError:  # the next owner looks at the process and finds that it is another
            log.exception("mover %d (pid %d) ended and stays noted", mover, pid)

    def transfer_finished(self, mover: MoverId, finished: Finished) -> None:
        """A mover's word on one transfer."""
        attached = self.attached.get(mover)
        submitted = attached.submitted.pop(finished.transfer, None) if attached else None
        damaged: tuple[int, ...] = ()
        if attached is not None and submitted is not None:
            kind, copied, spent = submitted.kind, finished.bytes_copied, finished.duration_ns
            attached.bytes_by_kind[kind] += copied
            attached.busy_ns_by_kind[kind] += spent
            self._observer.transfer_finished(kind, finished.outcome, copied, spent)
            shard = attached.placement.shard
            if len(finished.checksums):
                self._pool.note_checksums(submitted.slots, shard, finished.checksums)
            if len(finished.damaged):
                damaged = tuple(submitted.slots[finished.damaged.astype(np.int64)].tolist())
                log_damage(self._pool, np.array(damaged), attached.namespace, shard)
        self.report(
            ev.TransferFinished(
                mover,
                finished.transfer,
                finished.outcome,
                finished.bytes_copied,
                finished.duration_ns,
                damaged,
            ),
            self._user_of(mover),
        )

    def row_unmapped(self, mover: MoverId, row: RowId) -> None:
        """The mover no longer maps the row."""
        self.report(ev.RowUnmapped(mover, row), self._user_of(mover))

    def _user_of(self, mover: MoverId) -> int | None:
        found = self._movers.get(mover)
        return None if found is None else found.owner.uid

    async def handle_reports(self) -> None:
        """Wait until what movers have said so far is handled, REPORTS_WAIT_S at most.

        Users take turns: then only those who have much to wait for are not heard yet.
        """
        loop = asyncio.get_running_loop()
        handled = {user: loop.create_future() for user in self._reports.owners()}
        for user, each in handled.items():
            self.report(each, user)
        if handled:
            await asyncio.wait(handled.values(), timeout=REPORTS_WAIT_S)

    def report(self, event: Report, user: int | None = None) -> None:
        """Post events one by one, with turns of the loop between them: movers say much at once,
        and small calls must not wait for all of it, nor one user's movers for another's."""
        self._reports.add(user, [event])
        self._turns.do_in_turn(self._post_next)

    def _post_next(self) -> None:
        taken = self._reports.take()
        assert taken is not None, "each has asked for a turn"
        _, first = taken
        if isinstance(first, ev.MoverGone):
            self._bury(first)
        elif not isinstance(first, asyncio.Future):
            self._post(first)
        elif not first.done():
            first.set_result(None)

    def mover_gone(self, mover: MoverId, reason: str) -> None:
        """The mover process has ended, and with it every copy of its.

        What it said before comes before its end.
        """
        found = self._movers.get(mover)
        if found is None or found.process is None:
            return
        if reason not in (KILLED, STOPPED):
            log.warning(
                "mover %d (pid %d) has ended: %s",
                mover,
                found.process.pid,
                reason,
                extra={"user": found.owner.uid, "mover": mover},
            )
        found.move(FleetStage.ENDED)
        found.process = None
        gone = ev.MoverGone(mover, reason)
        if found.owner.uid in self._reports.owners():
            self.report(gone, found.owner.uid)
        else:
            self._bury(gone)

    def _bury(self, gone: ev.MoverGone) -> None:
        """The mover has ended, and all that it said is handled."""
        found = self._movers[gone.mover]
        self._forget(gone.mover)
        try:
            attached = self.attached.pop(gone.mover, None)
            if attached is not None:
                self._post(gone)
            self.on_mover_gone(gone.mover)
            if attached is not None:
                self.on_rank_lost(attached.session, attached.placement.rank, gone.reason)
        finally:  # whoever waits for the end must not wait for ever
            found.gone.set()
