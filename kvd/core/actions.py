"""What is to be done: the outputs of the machine, as orders. Carried out in list order.

The order is part of the promise: a tag is retracted before its slot's record is freed, the
record is freed before the slot is given to a new transfer, a READY record is written before
its tag is published, the tag before the board says done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvd.core.events import JobKind, JobStatus
from kvd.core.keys import (
    U32,
    U64,
    CopyId,
    JobId,
    KeyBatch,
    LeaseId,
    MoverId,
    NamespaceId,
    RowId,
    ScopeId,
    ScopeName,
    SearchId,
    SessionId,
    Slots,
    TierId,
    TransferId,
)
from kvd.core.spec import NamespaceSpec

# -- answers, as the payload of Reply -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochOpened:
    """The epoch that a session is in, with its scopes and tag seeds."""

    epoch: str
    scopes: tuple[ScopeId, ...]  # by group
    seeds: tuple[int, ...]  # 64-bit tag seeds by group


@dataclass(frozen=True, slots=True)
class SessionAccepted:
    """The answer to a session that may open."""

    namespace: NamespaceId
    epoch: EpochOpened


@dataclass(frozen=True, slots=True)
class Answer:
    """statuses, sources: one byte a key, as in kvd.v1 Answer; no sources: all are 0."""

    statuses: bytes
    lease: LeaseId | None
    sources: bytes = b""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one job: whether it was accepted, and why not."""

    job: JobId
    kind: JobKind
    accepted: bool
    reason: str  # "" when accepted
    blocks: int  # blocks that will be copied
    message: str = ""  # which rule was broken, for people


# -- orders -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the event; at most one."""

    payload: Any


@dataclass(frozen=True, slots=True)
class TellDone:
    """Long work that was asked for under this token is done; it took so many blocks away."""

    token: int
    blocks: int


@dataclass(frozen=True, slots=True)
class OpenNamespace:
    """Make the namespace known to the registry and give it an index page."""

    namespace: NamespaceId
    spec: NamespaceSpec
    page_blocks: int  # most blocks that the page will hold


@dataclass(frozen=True, slots=True)
class OpenScope:
    """Write the scope to the registry, before any record names it.

    `own`: its epoch is of use to one engine alone.
    """

    scope: ScopeId
    namespace: NamespaceId
    epoch: str
    account: str
    group: int
    own: bool = False


@dataclass(frozen=True, slots=True)
class ClearScopes:
    """Have the registry say that the namespace's scopes below this number mean nothing.

    Records still name them: those are of blocks that nobody finds any more, as if they were FREE.
    """

    namespace: NamespaceId
    below: ScopeId


@dataclass(frozen=True, slots=True)
class ForgetScopes:
    """Take these scopes out of the registry: no record names them, and none ever will."""

    scopes: tuple[ScopeId, ...]


@dataclass(frozen=True, slots=True)
class ForgetNamespace:
    """Close the namespace's index page, and take it and its scopes out of the registry.

    No row of it is granted any more; some may still have to be zeroed and released.
    """

    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class GrantRow:
    """Extents become a row: slot numbers first_slot .. first_slot + slots - 1."""

    row: RowId
    namespace: NamespaceId
    group: int
    extents: tuple[int, ...]  # by shard; extents[0] == row
    part_bytes: tuple[int, ...]  # by shard
    first_slot: int
    slots: int


@dataclass(frozen=True, slots=True)
class UnmapRow:
    """Tell this mover to unmap the row; answer RowUnmapped."""

    mover: MoverId
    row: RowId


@dataclass(frozen=True, slots=True)
class ZeroRow:
    """Overwrite the row's extents with zeros; answer RowZeroed."""

    row: RowId


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """Erase the row's header; its extents are free. No slot of it is READY."""

    row: RowId


@dataclass(frozen=True, slots=True, eq=False)
class WriteReady:
    """Write READY records. Arrays run along; keys all have the namespace's length."""

    slots: Slots
    scopes: U32
    keys: KeyBatch
    stamps: U64


@dataclass(frozen=True, slots=True, eq=False)
class WriteStamps:
    """Write down when these READY blocks were last used, beside their records."""

    slots: Slots
    stamps: U64


@dataclass(frozen=True, slots=True, eq=False)
class WriteFree:
    """Write FREE records for these slots."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class PublishTags:
    """Put these tags into the namespace's index page."""

    namespace: NamespaceId
    tags: U64


@dataclass(frozen=True, slots=True, eq=False)
class RetractTags:
    """Take these tags out of the namespace's index page."""

    namespace: NamespaceId
    tags: U64


@dataclass(frozen=True, slots=True, eq=False)
class TransferPart:
    """Blocks of one group. engine_blocks: [n, blocks_per_block]; slots: [n]."""

    group: int
    slots: Slots
    engine_blocks: U32


@dataclass(frozen=True, slots=True, eq=False)
class StartTransfer:
    """Have a mover copy its rank's share of a piece: of one job, or of stores that began together.

    It begins when the rank's worker is ready for all of them.
    """

    mover: MoverId
    transfer: TransferId
    jobs: tuple[JobId, ...]
    kind: JobKind
    parts: tuple[TransferPart, ...]


@dataclass(frozen=True, slots=True)
class RevokeTransfer:
    """Ask the mover to give up a transfer it has not started; answer TransferFinished."""

    mover: MoverId
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class KillMover:
    """End the mover process; answer MoverGone. Asked once."""

    mover: MoverId
    reason: str
    is_late: bool = False  # a copy of its took too long


@dataclass(frozen=True, slots=True)
class PostBoard:
    """Write control's lane of this rank's board. Only for what the mover doesn't post itself:
    every store, and loads that no transfer was started for (the mover posts the others)."""

    mover: MoverId
    job: JobId
    kind: JobKind
    status: JobStatus
    bytes_copied: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job has ended on every rank: tell the session and whoever flushes."""

    session: SessionId
    job: JobId
    kind: JobKind
    status: JobStatus
    reason: str
    blocks: int
    bytes_copied: int
    left: int = 0  # keys that a PARTIAL store neither copied nor found readable


@dataclass(frozen=True, slots=True, eq=False)
class AnnounceStored:
    """Tell watchers that these blocks are readable, or that this tier holds them."""

    namespace: NamespaceId
    epoch: str
    account: str
    group: int
    keys: KeyBatch
    tier: TierId | None = None  # None: host memory


@dataclass(frozen=True, slots=True, eq=False)
class AnnounceRemoved:
    """Tell watchers that these blocks are gone; `tier` as in AnnounceStored."""

    namespace: NamespaceId
    epoch: str
    account: str
    group: int
    keys: KeyBatch
    tier: TierId | None = None


@dataclass(frozen=True, slots=True)
class AnnounceCleared:
    """Tell watchers that all blocks of an epoch are gone."""

    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class AnnounceTierLost:
    """Tell watchers that no block of the tier can be found, until they are told of it anew."""

    tier: TierId


@dataclass(frozen=True, slots=True)
class NotePolicySwitch:
    """A class evicts by another policy from now on: say so in the log."""

    namespace: NamespaceId
    group: int
    before: str
    after: str

    def __str__(self) -> str:
        whose = f"namespace {self.namespace}, group {self.group}"
        return f"{whose}: evicts by {self.after} now, which finds more than {self.before}"


# -- orders for tiers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class AskTier:
    """Ask which of these blocks the tier holds; answer TierAnswered."""

    tier: TierId
    search: SearchId
    name: ScopeName
    keys: KeyBatch


@dataclass(frozen=True, slots=True, eq=False)
class WriteToTier:
    """Have the tier copy these slots' blocks down; answer TierCopyEnded.

    again: it had them when it was heard of last.
    """

    tier: TierId
    copy: CopyId
    name: ScopeName
    keys: KeyBatch
    slots: Slots
    again: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ReadFromTier:
    """Have the tier copy these blocks up into these slots; answer TierCopyEnded."""

    tier: TierId
    copy: CopyId
    name: ScopeName
    keys: KeyBatch
    slots: Slots


@dataclass(frozen=True, slots=True)
class ClearTier:
    """Have the tier delete all that it holds of the namespace, once it can; answer TierCleared."""

    tier: TierId
    fingerprint: str


Action = (
    Reply
    | TellDone
    | OpenNamespace
    | OpenScope
    | ClearScopes
    | ForgetScopes
    | ForgetNamespace
    | GrantRow
    | UnmapRow
    | ZeroRow
    | ReleaseRow
    | WriteReady
    | WriteStamps
    | WriteFree
    | PublishTags
    | RetractTags
    | StartTransfer
    | RevokeTransfer
    | KillMover
    | PostBoard
    | EndJob
    | AnnounceStored
    | AnnounceRemoved
    | AnnounceCleared
    | AnnounceTierLost
    | NotePolicySwitch
    | AskTier
    | WriteToTier
    | ReadFromTier
    | ClearTier
)
