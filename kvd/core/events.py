"""What happened: the inputs of the machine, in the past tense. Frozen; a closed union.

What says `Reply:` is answered by an action `Reply`. A `token` names long work; an action `TellDone`
with that token comes at its end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvd.core.keys import (
    NODE_UNKNOWN,
    U32,
    U64,
    Bools,
    CopyId,
    JobId,
    KeyBatch,
    LeaseId,
    MoverId,
    NamespaceId,
    RequestId,
    RowId,
    ScopeId,
    ScopeName,
    SearchId,
    SessionId,
    TenantId,
    TierId,
    TransferId,
)
from kvd.core.spec import NamespaceSpec
from kvd.core.told import ToldRequest


class LeaseMode(enum.Enum):
    """Which blocks that a lookup finds it also leases."""

    NONE = 0
    PREFIX = 1
    ALL = 2


class JobKind(enum.IntEnum):
    """Whether a job stores or loads."""

    STORE = 1
    LOAD = 2


class JobStatus(enum.IntEnum):
    """How a job has ended; see decision 0016 for PARTIAL."""

    DONE = 1
    FAILED = 2
    REFUSED = 3
    PARTIAL = 4  # a store that left keys to others: see EndJob.left


# -- life of the pool -------------------------------------------------------------------------


class RecoveredScope(NamedTuple):
    """A scope as the registry knows it; `own` as in OpenScope."""

    scope: ScopeId
    epoch: str
    account: str
    group: int
    own: bool = False


@dataclass(frozen=True, slots=True)
class ScopesRecovered:
    """Scopes of one namespace read back from the registry, before its rows."""

    namespace: NamespaceId
    spec: NamespaceSpec
    scopes: tuple[RecoveredScope, ...]


class RecoveredRow(NamedTuple):
    """A granted row of an earlier incarnation; `quarantined`: an orphaned mover may write to it."""

    row: RowId
    extents: tuple[int, ...]  # by shard; extents[0] == row
    ready: int  # of its slots
    quarantined: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RowsRecovered:
    """Rows of one class with their READY slots (possibly none).

    The arrays run along the READY slots of one row after the other; `ordinals` are their places in
    the row, ascending.
    """

    namespace: NamespaceId
    group: int
    rows: tuple[RecoveredRow, ...]
    ordinals: U32
    scopes: U32
    keys: KeyBatch
    stamps: U64  # coarse recency as last written


@dataclass(frozen=True, slots=True)
class PoolRecovered:
    """Ends recovery. Extents named by no RowsRecovered are free.

    Numbers of new namespaces and scopes start no lower than these: the pool's files may still
    name what had lower ones and is forgotten.
    """

    next_namespace: int = 1
    next_scope: int = 1


@dataclass(frozen=True, slots=True)
class RowUnmapped:
    """This mover has unmapped the row."""

    mover: MoverId
    row: RowId


@dataclass(frozen=True, slots=True)
class RowRefused:
    """The pool has no memory for this row's records: it was not granted, no mover maps it.

    Said after the end of every transfer that was to write to it. Reply: whether the row is given
    back; False while a slot of it is in use, to be said again.
    """

    row: RowId


@dataclass(frozen=True, slots=True)
class RowZeroed:
    """The row's extents hold zeros now."""

    row: RowId


# -- sessions and ranks -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An engine's scheduler came. Reply: SessionAccepted, or the error raised."""

    session: SessionId
    spec: NamespaceSpec
    epoch: str  # "" = the namespace's shared epoch
    world_size: int
    own_epoch: bool = False  # the epoch came of an EpochChanged of this engine
    engine: str = ""  # names this start of the engine, the same over all of its sessions
    payer: str = ""  # whose shares of namespaces and scopes count; "" = the tenant


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The scheduler is gone or said goodbye: leases end, unsubmitted jobs are revoked.

    `gone`: its engine has ended, so what only that could use goes too. May be said later.
    """

    session: SessionId
    gone: bool = False


@dataclass(frozen=True, slots=True)
class RankAttached:
    """A rank's mover stands and agrees on the layout."""

    session: SessionId
    mover: MoverId
    rank: int
    shard: int
    writer: bool
    node: int = NODE_UNKNOWN  # the memory node next to the rank's device
    engine_blocks: tuple[int, ...] = ()  # by group: their ids are below this; () = not known


@dataclass(frozen=True, slots=True)
class RankEnding:
    """Nobody needs the rank's mover any more, or its worker is gone: it is to end.

    No new transfer goes to it; what it was copying is quarantined until MoverGone.
    """

    mover: MoverId
    reason: str


@dataclass(frozen=True, slots=True)
class MoverGone:
    """The mover process has ended, and every copy of it; those not reported before have failed."""

    mover: MoverId
    reason: str


@dataclass(frozen=True, slots=True)
class EpochChanged:
    """The engine reset its cache: its session goes on in another epoch. Reply: EpochOpened."""

    session: SessionId
    epoch: str


# -- what clients tell ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RequestsTold:
    """A client tells what its requests found; it is remembered, and decides nothing."""

    session: SessionId
    requests: tuple[ToldRequest, ...]
    engine: str = ""  # its name, for people


# -- verbs ------------------------------------------------------------------------------------


class Hint(enum.Enum):
    """What an application advises for a request's blocks: PREFETCH when it names them, the others
    once it has ended."""

    RETAIN = "retain"  # for a while: it will come back
    DEMOTE = "demote"  # it will be long: others need host memory more
    RELEASE = "release"  # it will not come back
    PREFETCH = "prefetch"  # it comes soon; not in an Advice: see RequestContext


@dataclass(frozen=True, slots=True)
class Advice:
    """One hint; `lasting_ns` of what is to be retained."""

    hint: Hint
    lasting_ns: int = 0


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a request-bound verb knows of its request.

    `tiers_allowed` numbers tiers as kvd.v1 does; none means all. With `awaits` another node may be
    about to write its blocks to a tier that nodes share. With `prefetch` what tiers hold of the
    blocks that it touches is brought up.
    """

    request: RequestId
    account: str = ""
    tiers_allowed: tuple[int, ...] = ()
    awaits: bool = False
    advice: Advice | None = None
    prefetch: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """`extends` names a lease of the same session and group that the hits are to join: how the
    later pieces of a large query share one lease. `first_block` is the place of the first key in
    the request's prompt, in blocks."""

    context: RequestContext
    group: int
    keys: KeyBatch
    lease: LeaseMode
    extends: LeaseId | None = None
    first_block: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LookupRequested:
    """Reply: tuple[Answer, …] in their order. Not `counted`: LookupAnswered follows for that."""

    session: SessionId
    queries: tuple[Query, ...]
    counted: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class LookupAnswered:
    """A client is given these answers' statuses, which were not counted yet."""

    statuses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Blocks of one group to copy. engine_blocks: [n, blocks_per_block], NULL allowed."""

    group: int
    keys: KeyBatch
    engine_blocks: U32
    first_block: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StoreRequested:
    """Reply: Verdict. `last` is False while further pieces of the same job follow: the driver
    cuts large jobs so that small calls are not held up; the job ends only after its last.

    `ready_together`: workers are ready at the same moment for all stores of the step that have the
    same number; 0: not known."""

    session: SessionId
    job: JobId
    context: RequestContext
    runs: tuple[Run, ...]
    request_level: bool = False
    last: bool = True
    ready_together: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StoresRequested:
    """Small stores of one step, each whole, none `request_level`.

    Reply: a Verdict for each that began, all of them together; None where an event of its own must
    say what becomes of it. Nothing has changed for those.
    """

    session: SessionId
    stores: tuple[StoreRequested, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequested:
    """Reply: Verdict. All or nothing: one missing key refuses the job. Never in pieces."""

    session: SessionId
    job: JobId
    context: RequestContext
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """A request has used these blocks without a copy, or is about to: see RequestContext.prefetch.

    `first_block` as in Query.
    """

    session: SessionId
    context: RequestContext
    group: int
    keys: KeyBatch
    first_block: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class HandOffRequested:
    """The request has ended here and goes on in another engine, which shall find these blocks:
    they stay, whatever becomes of the session, until loaded there or until `lasting_ns` from now.

    Another event of the same session and request adds to the same hand-off.
    """

    session: SessionId
    context: RequestContext
    group: int
    keys: KeyBatch
    lasting_ns: int


@dataclass(frozen=True, slots=True)
class LeasesReleased:
    session: SessionId
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class RequestsEnded:
    """Requests finished or were preempted: their leases end.

    Where that is long work there is a reply: those of them for which the event is to come again.
    """

    session: SessionId
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class StepEnded:
    """Exactly once a step, last. Renews the session's leases."""

    session: SessionId


# -- transfers --------------------------------------------------------------------------------


class TransferOutcome(enum.Enum):
    """How a transfer has ended in its mover."""

    DONE = "done"
    FAILED = "failed"  # ended; some bytes may have been written
    REVOKED = "revoked"  # never started, never will
    ABANDONED = "abandoned"  # a store that its engine gave up; some bytes may have been written


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """A mover's word that a copy has ended, or never will start.

    `damaged`: slots of a failed load whose bytes are not those that were stored there.
    `reason`: why it never started, where that was not the mover's full queue.
    """

    mover: MoverId
    transfer: TransferId
    outcome: TransferOutcome
    bytes_copied: int
    duration_ns: int
    damaged: tuple[int, ...] = ()
    reason: str = ""


# -- operator and time ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamespaceCleared:
    """No block is found any more. TellDone, with their number, when their records are FREE.

    Pinned blocks' slots are free once their pins end.
    """

    token: int
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """TellDone, with the blocks evicted, once it is kept but for pinned ones. 0 bytes = none."""

    token: int
    tenant: TenantId
    quota_bytes: int
    named: bool | None = None  # by a rule; False: forgotten once nothing is its; None: as before


@dataclass(frozen=True, slots=True)
class TermsChanged:
    """Decisions follow these from now on; what is leased, or lasts until a time, stays so."""

    lease_share: float
    submit_deadline_ns: int
    copy_deadline_ns: int
    private_grace_ns: int


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """No new store is admitted from now on."""


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """Stores are admitted again."""


@dataclass(frozen=True, slots=True)
class TimerTicked:
    """Expires leases, revokes and kills what is past its deadline. About every 250 ms."""


@dataclass(frozen=True, slots=True)
class WorkContinued:
    """The next piece of work that is too long for one event; see `backlog`."""


# -- tiers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierStarted:
    """A process serves the tier; it maps rows as this mover."""

    tier: TierId
    mover: MoverId


@dataclass(frozen=True, slots=True)
class TierGone:
    """The tier's process has ended, so has every copy of it."""

    tier: TierId


def _none_of_them() -> Bools:
    return np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class TierAnswered:
    """Which of the blocks that the tier was asked for it holds, in their order.

    `refused`: none, since its process took no further question. `failed`: it said nothing of them
    in time. `unknown`: of which of them it did not say; empty where it said of all.
    """

    tier: TierId
    search: SearchId
    held: Bools
    refused: bool = False
    failed: bool = False
    unknown: Bools = field(default_factory=_none_of_them)


@dataclass(frozen=True, slots=True, eq=False)
class TierCopyEnded:
    """A copy of the tier has ended: none of its bytes is written or read any more.

    `done`: of which blocks it has done all, in their order. `damaged`, of a write: which of them
    have other bytes in their slots than were stored. `missing`, of a read: which the tier lacks.
    Either may be empty: none has, or that is not known. `refused`: its process took no more copies.
    """

    tier: TierId
    copy: CopyId
    done: Bools
    damaged: Bools = field(default_factory=_none_of_them)
    refused: bool = False
    missing: Bools = field(default_factory=_none_of_them)


@dataclass(frozen=True, slots=True, eq=False)
class TierForgot:
    """The tier holds these blocks no longer: they left by themselves."""

    tier: TierId
    name: ScopeName
    keys: KeyBatch


@dataclass(frozen=True, slots=True)
class TierDoubted:
    """Of all that the tier was known to hold some is gone, and nobody can say which."""

    tier: TierId


@dataclass(frozen=True, slots=True)
class TierCleared:
    """The tier holds nothing of this namespace that it held when it was asked to clear it."""

    tier: TierId
    fingerprint: str


Event = (
    ScopesRecovered
    | RowsRecovered
    | PoolRecovered
    | RowUnmapped
    | RowRefused
    | RowZeroed
    | SessionOpened
    | SessionClosed
    | RankAttached
    | RankEnding
    | MoverGone
    | EpochChanged
    | RequestsTold
    | LookupRequested
    | LookupAnswered
    | StoreRequested
    | StoresRequested
    | LoadRequested
    | Touched
    | HandOffRequested
    | LeasesReleased
    | RequestsEnded
    | StepEnded
    | TransferFinished
    | NamespaceCleared
    | QuotaSet
    | TermsChanged
    | DrainStarted
    | DrainEnded
    | TimerTicked
    | WorkContinued
    | TierStarted
    | TierGone
    | TierAnswered
    | TierCopyEnded
    | TierForgot
    | TierDoubted
    | TierCleared
)
