"""Jobs: one store or load of many blocks, and the transfers that carry it out.

A job has one piece for each event that fed it; a piece has one transfer for each rank that
copies. A piece's blocks become readable together; the job ends with its last piece. Small stores
of one step may share a piece (`kvd/core/jobs/together.py`), and then its fate.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from kvd.core.events import Advice, JobKind, JobStatus
from kvd.core.keys import (
    U32,
    U64,
    JobId,
    MoverId,
    RequestId,
    ScopeId,
    SessionId,
    Slots,
    TransferId,
)
from kvd.core.lifecycle import step
from kvd.core.model.size_class import Remembered, SizeClass

WAIT_BYTES = 1024  # of a Wait without the content of its arrays
JOBS_A_PART = 8  # end in the time that a part of a transfer takes


@dataclass(slots=True, eq=False)
class Offer:
    """Blocks of one group, in the caller's order. `slots` says NOWHERE for the unknown.

    `scope` is theirs, if it was open when they came. `blocks` are their places in the prompt.
    """

    size_class: SizeClass
    scope: ScopeId | None
    words: U64  # [n, width]
    tags: U64
    engine_blocks: U32  # [n, blocks_per_block]
    blocks: Slots
    slots: Slots

    @property
    def nbytes(self) -> int:
        arrays = (self.words, self.tags, self.engine_blocks, self.blocks, self.slots)
        return sum(array.nbytes for array in arrays)

    def rows(self, rows: Slots) -> Offer:
        return Offer(
            self.size_class,
            self.scope,
            self.words[rows],
            self.tags[rows],
            self.engine_blocks[rows],
            self.blocks[rows],
            self.slots[rows],
        )


@dataclass(slots=True, eq=False)
class Part:
    """Blocks of one group: `slots` to copy with their engine blocks, `pinned` without repeats.

    `scopes`: theirs, distinct. All were in force when the copy began, so a clear takes all or none.
    """

    size_class: SizeClass
    scopes: tuple[ScopeId, ...]
    slots: Slots
    pinned: Slots
    engine_blocks: U32

    @property
    def scope(self) -> ScopeId:
        """The only one, or any of them."""
        return self.scopes[0]


class Used(NamedTuple):
    """Slots that one request has used in one scope, and the places of their blocks, ascending."""

    slots: Slots
    blocks: Slots


@dataclass(slots=True, eq=False)
class Prefix:
    """What one request has used, by scope."""

    remembered: Remembered = field(default_factory=Remembered)  # of its session
    used: dict[ScopeId, Used] = field(default_factory=dict)
    renewed: dict[ScopeId, int] = field(default_factory=dict)  # blocks that last became young
    is_forgotten: bool = False
    number: int = 0  # rises from request to request
    advice: Advice | None = None  # for its end

    def set(self, scope: ScopeId, used: Used) -> None:
        before = self.used.get(scope)
        self.remembered.add(len(used.slots) - (0 if before is None else len(before.slots)))
        self.used[scope] = used

    def drop(self, scope: ScopeId) -> int:
        """Remember nothing of this scope any more. How many blocks that was."""
        blocks = len(self.used.pop(scope).slots)
        self.renewed.pop(scope, None)
        self.remembered.add(-blocks)
        return blocks

    def forget(self) -> None:
        """Remember nothing any more, whoever still has it."""
        self.remembered.add(-sum(len(used.slots) for used in self.used.values()))
        self.used.clear()
        self.is_forgotten = True


class JobState(enum.Enum):
    """How far a job has come."""

    OPEN = "further pieces may come"
    WHOLE = "its last piece has come"
    ENDED = "on every rank"


JOB_STEPS: frozenset[tuple[JobState, JobState]] = frozenset(
    {(JobState.OPEN, JobState.WHOLE), (JobState.WHOLE, JobState.ENDED)}
)

# What a job will end with, as far as is known, and how that may change.
OUTCOME_STEPS: frozenset[tuple[JobStatus, JobStatus]] = frozenset(
    {
        (JobStatus.DONE, JobStatus.REFUSED),  # before anything of it began
        (JobStatus.DONE, JobStatus.FAILED),
        (JobStatus.REFUSED, JobStatus.FAILED),  # its session closed before its last piece came
        (JobStatus.DONE, JobStatus.PARTIAL),  # at its end
    }
)


@dataclass(slots=True, eq=False)
class Job:
    """One store or load of one request, on all its ranks."""

    session: SessionId
    job: JobId
    kind: JobKind
    request: RequestId
    prefix: Prefix = field(default_factory=Prefix)
    state: JobState = JobState.OPEN
    status: JobStatus = JobStatus.DONE  # what it will end with, as far as is known
    reason: str = ""  # of a status other than DONE and PARTIAL; the first one
    blocks: int = 0  # copied
    pieces: int = 0  # that still run
    pieces_begun: int = 0  # that run or ran
    followed: int = 0  # keys that another job is storing for it
    left: int = 0  # keys that it neither copies, nor follows, nor found readable
    bytes_by_mover: dict[MoverId, int] = field(default_factory=dict)
    duration_ns: dict[MoverId, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.state is JobState.OPEN

    def move(self, new: JobState) -> None:
        """Take a step of the table."""
        self.state = step(JOB_STEPS, self.state, new)

    def will_end_as(self, status: JobStatus, reason: str = "") -> None:
        """Take a step of the outcomes' table; the first reason stands."""
        if status is not self.status:
            self.status = step(OUTCOME_STEPS, self.status, status)
        self.reason = self.reason or reason


@dataclass(slots=True, eq=False, kw_only=True)
class Filling:
    """Blocks that are copied together, and who waits for them.

    `number` is what SlotTable.fillings says of slots that it fills; 0: it fills none.
    """

    parts: tuple[Part, ...]
    number: int = 0
    waits: dict[Wait, None] = field(default_factory=dict)  # in the order in which they came
    failed: bool = False

    def end_waits(self, *, done: bool) -> list[Wait]:
        """Those who waited, who know now how it ended."""
        ended = list(self.waits)
        for wait in ended:
            wait.leader, wait.done = None, done
        self.waits = {}
        return ended


class JobShare(NamedTuple):
    """What of a piece is one job's."""

    job: Job
    blocks: int
    bytes: int = 0  # where there are other shares: what its blocks have


@dataclass(slots=True, eq=False, kw_only=True)
class Piece(Filling):
    """What one event brought of a job, or of several stores, with a transfer for each rank."""

    shares: tuple[JobShare, ...]  # of one session and kind
    transfers: dict[TransferId, Transfer] = field(default_factory=dict)

    @property
    def session(self) -> SessionId:
        return self.shares[0].job.session

    @property
    def kind(self) -> JobKind:
        return self.shares[0].job.kind

    @property
    def work(self) -> int:
        """How long it takes to end one of its transfers, in parts of a transfer."""
        return len(self.parts) + len(self.shares) // JOBS_A_PART

    def has(self, job: Job) -> bool:
        """Whether some of it is this job's."""
        return any(share.job is job for share in self.shares)

    def divide(self, amount: int) -> list[int]:
        """What of bytes or time falls to each share; their sum is the amount."""
        if len(self.shares) == 1:
            return [amount]
        ends = list(accumulate(share.bytes for share in self.shares))
        cuts = [amount * end // ends[-1] for end in ends]
        return [cut - before for before, cut in pairwise([0, *cuts])]


class TransferStage(enum.Enum):
    """How far a transfer has come, as control knows it."""

    WANTED = "it waits in its mover or is copied"
    CALLED_OFF = "its mover was asked to give it up if it has not begun"
    ENDED = "no copy of it runs or will run"


TRANSFER_STEPS: frozenset[tuple[TransferStage, TransferStage]] = frozenset(
    {
        (TransferStage.WANTED, TransferStage.CALLED_OFF),
        (TransferStage.WANTED, TransferStage.ENDED),
        (TransferStage.CALLED_OFF, TransferStage.ENDED),
    }
)


@dataclass(slots=True, eq=False)
class Transfer:
    """What one mover copies of one piece of a job."""

    transfer: TransferId
    mover: MoverId
    piece: Piece
    submitted_ns: int
    state: TransferStage = TransferStage.WANTED
    reason: str = ""  # why it was called off

    def call_off(self, reason: str) -> None:
        """Nobody wants it any more. Once."""
        self.state = step(TRANSFER_STEPS, self.state, TransferStage.CALLED_OFF)
        self.reason = reason

    def end(self) -> None:
        """Its copy has ended, or never will start. Once."""
        self.state = step(TRANSFER_STEPS, self.state, TransferStage.ENDED)


@dataclass(slots=True, eq=False)
class Wait:
    """Keys of a request-level job that a piece of another job is storing for it."""

    job: Job
    offer: Offer  # in one scope
    scope: ScopeId
    leader: Filling | None  # None: it has ended, and the wait stands in `State.released`
    done: bool = False  # how it ended

    @property
    def nbytes(self) -> int:
        return WAIT_BYTES + self.offer.nbytes
