"""Where an engine's scheduler and ranks meet, in any order: who may come, and what follows.

One start of an engine holds its id as long as its scheduler lives (before there is one, as long as
any of its workers does). A second live start is refused. One that follows a dead start waits until
the dead one's movers have ended, so that no late copy of theirs is under way.

Nothing here waits or asks the system: who lives is told with the question, the ends of movers are
told, and what is to be done comes back as orders.
"""

from __future__ import annotations

import enum
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvd.core.engines.layouts import (
    RankLayout,
    RankPlacement,
    check_layout,
    check_writers,
    guessed_wrong,
)
from kvd.core.errors import EngineAlreadyLives, RankTaken
from kvd.core.keys import MoverId, SessionId
from kvd.core.lifecycle import SESSION_ENDED, step
from kvd.core.shares import Bound, Shares
from kvd.core.spec import NamespaceSpec

MAX_ENGINES = 1024
MAX_ENGINES_OF_A_USER = 512

# -- who meets ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientProcess:
    """One process of an engine, by its connection."""

    token: str
    pid: int  # 0 where the daemon can't see its PID namespace
    program: str
    number: int = 0  # another process has another one; 0: not known

    def may_be(self, other: ClientProcess) -> bool:
        """Whether both are one process, as far as is known."""
        if self.token == other.token:
            return True
        if self.number and other.number:
            return self.number == other.number
        return self.pid == other.pid


class RegistrationState(enum.Enum):
    SEATED = "its mover runs"
    ANSWERED = "and its worker knows of it"
    LEFT = "it has no place any more; its mover may still run"
    GONE = "its mover has ended"


REGISTRATION_STEPS: frozenset[tuple[RegistrationState, RegistrationState]] = frozenset(
    {
        (RegistrationState.SEATED, RegistrationState.ANSWERED),
        (RegistrationState.SEATED, RegistrationState.LEFT),
        (RegistrationState.ANSWERED, RegistrationState.LEFT),
        (RegistrationState.LEFT, RegistrationState.GONE),
    }
)


@dataclass(slots=True, eq=False)
class RankRegistration:
    """A rank, and the mover that was started for it."""

    start: EngineStart
    mover: MoverId
    process: ClientProcess
    layout: RankLayout
    state: RegistrationState = RegistrationState.SEATED

    @property
    def rank(self) -> int:
        return self.layout.placement.rank

    def move(self, new: RegistrationState) -> None:
        """Take a step of the table."""
        self.state = step(REGISTRATION_STEPS, self.state, new)


class Readiness(enum.Enum):
    GATHERING = "a rank lacks, or its worker does not know of its mover yet"
    READY = "all are there, and the scheduler was told"


READINESS_STEPS: frozenset[tuple[Readiness, Readiness]] = frozenset(
    {(Readiness.GATHERING, Readiness.READY), (Readiness.READY, Readiness.GATHERING)}
)


@dataclass(slots=True, eq=False)
class SchedulerSide:
    """The session of an engine's scheduler, and what its ranks must agree with."""

    session: SessionId
    process: ClientProcess
    spec: NamespaceSpec
    world_size: int
    readiness: Readiness = Readiness.GATHERING

    @property
    def shards(self) -> int:
        return len(self.spec.groups[0].shard_bytes)

    def move(self, new: Readiness) -> None:
        """Take a step of the table."""
        self.readiness = step(READINESS_STEPS, self.readiness, new)


@dataclass(slots=True, eq=False)
class EngineStart:
    """One start of one engine: its scheduler's session and its ranks, as far as they have come."""

    uid: int
    engine_id: str
    nonce: bytes
    session: SchedulerSide | None = None
    ranks: dict[int, RankRegistration] = field(default_factory=dict)  # that have their place
    movers: dict[MoverId, RankRegistration] = field(default_factory=dict)  # that may still run

    @property
    def name(self) -> tuple[int, str]:
        return self.uid, self.engine_id

    def holder(self, living: AbstractSet[str]) -> ClientProcess | None:
        """The live process that holds the engine id."""
        if self.session is not None:
            processes = [self.session.process]
        else:
            processes = [registration.process for registration in self.ranks.values()]
        return next((process for process in processes if process.token in living), None)

    def processes(self) -> list[ClientProcess]:
        """All that have to do with it: of these it matters whether they live."""
        scheduler = [] if self.session is None else [self.session.process]
        return [*scheduler, *(registration.process for registration in self.ranks.values())]


# -- orders -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttachRank:
    """Make the mover serve this rank of the session."""

    session: SessionId
    mover: MoverId
    placement: RankPlacement


@dataclass(frozen=True, slots=True)
class TellRanksReady:
    """Every rank is attached, and every worker knows of its mover."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class EndSession:
    """Close the session; `leave` follows from that."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class EndRank:
    """Nobody needs this mover any more; `mover_gone` follows."""

    mover: MoverId
    reason: str


@dataclass(frozen=True, slots=True)
class EndUnattached:
    """The same, unless it was attached to its session: the machine ends that one with it."""

    mover: MoverId
    reason: str


@dataclass(frozen=True, slots=True)
class NoteRankGone:
    """Tell operators that a rank has lost its place."""

    uid: int
    engine_id: str
    rank: int


MeetingOrder = AttachRank | TellRanksReady | EndSession | EndRank | EndUnattached | NoteRankGone


# -- decisions ----------------------------------------------------------------------------------


class Meeting:
    """Every engine start that has a session, a rank, or a mover that has not ended.

    An error means that nothing was changed. `living` are the tokens of the start's processes that
    live.
    """

    def __init__(self) -> None:
        self.starts: dict[tuple[int, str], EngineStart] = {}
        self.registrations: dict[MoverId, RankRegistration] = {}  # of all movers that may still run
        self.shares = Shares(
            Bound("engines", MAX_ENGINES, MAX_ENGINES_OF_A_USER, field="identity.engine_id")
        )

    def claim(
        self, uid: int, engine_id: str, nonce: bytes, living: AbstractSet[str]
    ) -> EngineStart | list[EndRank]:
        """The record of this start; or the movers of a dead one that have to end before.

        EngineAlreadyLives where a live process of another start holds the id. Whoever claims
        releases.
        """
        start = self.starts.get((uid, engine_id))
        if start is not None and start.nonce == nonce:
            return start
        if start is not None:
            holder = start.holder(living)
            if holder is not None:
                raise EngineAlreadyLives(
                    f"engine id {engine_id!r} is held by the live process {holder.pid}"
                    f" ({holder.program}); end it or choose another id",
                    "identity.engine_id",
                )
            if start.movers:
                return [EndRank(mover, "its engine started anew") for mover in start.movers]
            self._forget(start)
        self.shares.take(uid)
        start = self.starts[uid, engine_id] = EngineStart(uid, engine_id, nonce)
        return start

    def release(self, start: EngineStart) -> None:
        """Keep no record of a start that has neither session nor mover."""
        if start.session is None and not start.movers:
            self._forget(start)

    def _forget(self, start: EngineStart) -> None:
        if self.starts.get(start.name) is start:
            del self.starts[start.name]
            self.shares.give_back(start.uid)

    # -- the scheduler ----------------------------------------------------------------------

    def check_scheduler(
        self, start: EngineStart, process: ClientProcess, living: AbstractSet[str]
    ) -> list[MeetingOrder]:
        """Refuse a second live scheduler of one start; end the session of an earlier stream."""
        held = start.session
        if held is None:
            return []
        other = held.process
        if not other.may_be(process) and other.token in living:
            raise EngineAlreadyLives(
                f"the live process {other.pid} is the scheduler of this engine start",
                "identity.boot_nonce",
            )
        return [EndSession(held.session, "a newer session of the same scheduler came")]

    def check_ranks(self, start: EngineStart, spec: NamespaceSpec, world_size: int) -> None:
        """Refuse a scheduler that disagrees with a rank that came before it."""
        layouts = [registration.layout for registration in start.ranks.values()]
        for layout in layouts:
            check_layout(layout, spec, world_size)
        if len(layouts) == world_size:
            check_writers(layouts, len(spec.groups[0].shard_bytes))

    def join(self, start: EngineStart, scheduler: SchedulerSide) -> list[MeetingOrder]:
        """The scheduler is there: attach the ranks that came before it.

        A rank for which the blocks' size had to be guessed, wrongly, is ended; its worker
        registers again, and by then the size is known.
        """
        assert self.starts.get(start.name) is start, "a start that was forgotten"
        assert start.session is None, "two sessions of one start"
        start.session = scheduler
        orders: list[MeetingOrder] = []
        for _, registration in sorted(start.ranks.items()):
            if guessed_wrong(registration.layout, scheduler.spec):
                orders += self._unseat(registration)
                orders.append(EndRank(registration.mover, "its blocks have another size"))
            else:
                orders.append(_attach(registration, scheduler))
        return orders + _announce_ready(start)

    def leave(self, start: EngineStart, session: SessionId) -> list[MeetingOrder]:
        """The session is over, and its ranks must register again."""
        orders: list[MeetingOrder] = []
        if start.session is not None and start.session.session == session:
            for registration in list(start.ranks.values()):
                orders += self._unseat(registration)
            start.session = None
            orders += [EndUnattached(mover, SESSION_ENDED) for mover in start.movers]
        self.release(start)
        return orders

    # -- ranks ------------------------------------------------------------------------------

    def check_place(
        self,
        start: EngineStart,
        process: ClientProcess,
        layout: RankLayout,
        living: AbstractSet[str],
    ) -> None:
        """Refuse a rank that is taken, or that disagrees with the session where there is one."""
        number = layout.placement.rank
        old = start.ranks.get(number)
        if old is not None and old.process.token != process.token and old.process.token in living:
            raise RankTaken(
                f"rank {number} is registered by the live process {old.process.pid}", "rank"
            )
        if start.session is not None:
            check_layout(layout, start.session.spec, start.session.world_size)
            others = [other.layout for n, other in start.ranks.items() if n != number]
            if len(others) + 1 == start.session.world_size:
                check_writers([*others, layout], start.session.shards)

    def occupants(self, start: EngineStart, rank: int) -> list[EndRank]:
        """Movers of earlier registrations of this rank: they end before another is started."""
        return [
            EndRank(registration.mover, "its rank registered again")
            for registration in start.movers.values()
            if registration.rank == rank
        ]

    def seat(
        self, start: EngineStart, mover: MoverId, process: ClientProcess, layout: RankLayout
    ) -> list[MeetingOrder]:
        """The rank's mover runs: from now on it belongs to the engine's start.

        Its scheduler hears that the ranks are ready only after `answered`.
        """
        assert self.starts.get(start.name) is start, "a start that was forgotten"
        assert mover not in self.registrations, "a mover has its place already"
        assert not self.occupants(start, layout.placement.rank), "two movers of one place"
        registration = RankRegistration(start, mover, process, layout)
        start.ranks[registration.rank] = registration
        start.movers[mover] = self.registrations[mover] = registration
        return [] if start.session is None else [_attach(registration, start.session)]

    def answered(self, mover: MoverId) -> list[MeetingOrder]:
        """The worker of this rank was sent its channel and the answer to its registration.

        Told before that, a scheduler could name jobs to a worker that has no mover yet.
        """
        registration = self.registrations.get(mover)
        if registration is None or registration.state is not RegistrationState.SEATED:
            return []
        registration.move(RegistrationState.ANSWERED)
        return _announce_ready(registration.start)

    def worker_ended(self, mover: MoverId) -> list[MeetingOrder]:
        """The process whose memory the mover maps is gone."""
        if mover not in self.registrations:
            return []
        return [EndRank(mover, "its worker process is gone")]

    def mover_gone(self, mover: MoverId) -> list[MeetingOrder]:
        """With the last mover of a start that has no session its record goes."""
        registration = self.registrations.pop(mover, None)
        if registration is None:
            return []  # it ended before it had a place
        start = registration.start
        orders: list[MeetingOrder] = []
        if registration.state is not RegistrationState.LEFT:
            orders = self._unseat(registration)
        registration.move(RegistrationState.GONE)
        del start.movers[mover]
        self.release(start)
        return orders

    def _unseat(self, registration: RankRegistration) -> list[MeetingOrder]:
        start = registration.start
        assert start.ranks.pop(registration.rank) is registration, "another has its place"
        registration.move(RegistrationState.LEFT)
        if start.session is not None and start.session.readiness is Readiness.READY:
            start.session.move(Readiness.GATHERING)
        return [NoteRankGone(start.uid, start.engine_id, registration.rank)]


def _attach(registration: RankRegistration, scheduler: SchedulerSide) -> AttachRank:
    return AttachRank(scheduler.session, registration.mover, registration.layout.placement)


def _announce_ready(start: EngineStart) -> list[MeetingOrder]:
    scheduler = start.session
    if scheduler is None or set(start.ranks) != set(range(scheduler.world_size)):
        return []
    if any(rank.state is not RegistrationState.ANSWERED for rank in start.ranks.values()):
        return []
    scheduler.move(Readiness.READY)
    return [TellRanksReady(scheduler.session)]
