"""All that the machine knows, and questions about it that change nothing."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.core.errors import UnknownNamespace, UnknownSession
from kvd.core.keys import (
    NO_SCOPE,
    JobId,
    LeaseId,
    MoverId,
    NamespaceId,
    RequestId,
    RowId,
    ScopeId,
    SessionId,
    Slots,
    TenantId,
    TierId,
    TransferId,
)
from kvd.core.lifecycle import step
from kvd.core.model.admission import ReuseFilter
from kvd.core.model.backlog import Backlog
from kvd.core.model.by_deadline import ByDeadline
from kvd.core.model.extents import FreeExtents
from kvd.core.model.gone import GoneBlocks
from kvd.core.model.index import Index
from kvd.core.model.job import Filling, Job, Prefix, Transfer, Wait
from kvd.core.model.leases import HandOff, Lease
from kvd.core.model.probes import BY_NUMPY, Probes
from kvd.core.model.reuse import ReuseSample
from kvd.core.model.rights import Rights
from kvd.core.model.row_claims import Claims
from kvd.core.model.scope_shares import ScopeShares
from kvd.core.model.size_class import (
    MIN_SLOT_BYTES,
    GrantPause,
    Remembered,
    Row,
    SizeClass,
    Tally,
    Tenant,
)
from kvd.core.model.slots import SlotTable
from kvd.core.model.story import Story
from kvd.core.model.tiers import Below, Sought, Tier, TierTerms
from kvd.core.policy import AutoPolicy
from kvd.core.policy.slot_queue import PolicyMemory
from kvd.core.spec import NamespaceSpec

MAX_NAMESPACES = 4096
MAX_SCOPES = 65536
LAST_SCOPE = (1 << 32) - 1  # a slot's record has 32 bits for its scope
MAX_SESSIONS = 1024
NEVER = 1 << 63  # as a time
# Engine blocks of one group, of all groups of a session, and of all sessions of a tenant: two bytes
# each, once used, in the map of those whose copy is in flight.
MAX_ENGINE_BLOCKS = 1 << 22
MAX_SESSION_ENGINE_BLOCKS = 1 << 24
MAX_TENANT_ENGINE_BLOCKS = 1 << 25


@dataclass(frozen=True)
class MachineConfig:
    """The settings that decisions depend on."""

    extents: int
    extent_bytes: int
    policy: str = "lru"
    store_threshold: int = 1  # store on the n-th sighting
    tracker_blocks: int = 65536  # sightings remembered
    lease_ttl_ns: int = 2_000_000_000
    lease_share: float = 0.25  # of the tenant's quota, or of the pool
    submit_deadline_ns: int = 30_000_000_000
    copy_deadline_ns: int = 30_000_000_000
    private_grace_ns: int = 60_000_000_000  # what only one engine can use outlives its session
    spare_bytes: int = 256 * 2**20  # granted ahead of need per class; see row_grants.grant_spare
    extent_nodes: tuple[int, ...] = ()  # the memory node of each extent; empty: there is one
    tag_secret: bytes = b""
    namespaces: int = MAX_NAMESPACES  # at most: each takes descriptors for its index page
    tiers: tuple[TierTerms, ...] = ()  # below host memory, in the order in which they are asked
    promotion_share: float = 0.25  # of the pool, for blocks on their way up


@dataclass(frozen=True, slots=True)
class Scope:
    """Keys of one scope meet; keys of two never do."""

    scope: ScopeId
    namespace: NamespaceId
    epoch: str
    account: str
    group: int
    seed: int


@dataclass(slots=True, eq=False)
class Namespace:
    """What the machine knows of one namespace."""

    namespace: NamespaceId
    spec: NamespaceSpec
    classes: tuple[SizeClass, ...]  # by group
    tenant: Tenant
    page_blocks: int
    tally: Tally
    payer: str
    ended_leases: int = 0  # of its sessions, in the backlog
    wasted_shares: tuple[float, ...] = ()  # of the extents of each group's rows
    shard_nodes: dict[int, int] = field(default_factory=dict)  # as far as ranks have told
    # In force, by epoch; what was cleared is in `Backlog.clears`, and numbered below the bound.
    scopes: dict[str, set[ScopeId]] = field(default_factory=dict)
    cleared_below: ScopeId = NO_SCOPE
    cleared_ns: int | None = None  # the last time
    copies_below: int = 0  # that tiers run
    doomed: int = 0  # READY blocks of cleared scopes, yet to be given up
    # Each of use to one start of an engine alone; by its name, "" where that is not known yet.
    own_epochs: dict[str, str] = field(default_factory=dict)
    shared_epochs: set[str] = field(default_factory=set)  # as they were read back from the pool


class MoverState(enum.Enum):
    """How far a mover's life has come."""

    SERVING = "transfers go to it"
    ENDING = "it was ordered to end; nothing new goes to it"
    GONE = "no copy of it runs"


MOVER_STEPS: frozenset[tuple[MoverState, MoverState]] = frozenset(
    {
        (MoverState.SERVING, MoverState.ENDING),
        (MoverState.SERVING, MoverState.GONE),  # by itself
        (MoverState.ENDING, MoverState.GONE),
    }
)


@dataclass(slots=True, eq=False)
class Mover:
    """What the machine knows of one mover process."""

    mover: MoverId
    session: SessionId
    rank: int
    shard: int
    writer: bool
    engine_blocks: tuple[int, ...] = ()  # by group, registered: ids are below this
    state: MoverState = MoverState.SERVING
    transfers: dict[TransferId, Transfer] = field(default_factory=dict)

    @property
    def is_serving(self) -> bool:
        return self.state is MoverState.SERVING

    def move(self, new: MoverState) -> None:
        """Take a step of the table."""
        self.state = step(MOVER_STEPS, self.state, new)


class SessionState(enum.Enum):
    """How far a session's life has come."""

    OPEN = "its engine's scheduler is connected"
    CLOSED = "its copies may end, then its movers do; its engine may come back"
    DEPARTED = "the same, but its engine has ended"
    FORGOTTEN = "nothing of it runs"


SESSION_STEPS: frozenset[tuple[SessionState, SessionState]] = frozenset(
    {
        (SessionState.OPEN, SessionState.CLOSED),
        (SessionState.OPEN, SessionState.DEPARTED),
        (SessionState.CLOSED, SessionState.DEPARTED),  # as is known later
        (SessionState.CLOSED, SessionState.FORGOTTEN),
        (SessionState.DEPARTED, SessionState.FORGOTTEN),
    }
)


@dataclass(slots=True, eq=False)
class Session:
    """What the machine knows of one session."""

    session: SessionId
    namespace: NamespaceId
    epoch: str
    world_size: int
    engine: str = ""  # as in SessionOpened
    payer: str = ""
    epoch_entered_ns: int | None = None  # by a reset of the engine's cache
    movers: dict[int, Mover] = field(default_factory=dict)  # by rank
    jobs: dict[JobId, Job] = field(default_factory=dict)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    by_request: dict[RequestId, set[LeaseId]] = field(default_factory=dict)
    prefixes: dict[RequestId, Prefix] = field(default_factory=dict)
    remembered: Remembered = field(default_factory=Remembered)  # of `prefixes`
    # What its requests seek in tiers, by request, then by account and group.
    sought: dict[RequestId, dict[tuple[str, int], Sought]] = field(default_factory=dict)
    sought_blocks: int = 0  # and their searches, see SEARCH_BLOCKS
    found_below: dict[Sought, None] = field(default_factory=dict)  # something, since the last step
    waits: dict[Wait, None] = field(default_factory=dict)
    waiting_bytes: int = 0  # of those
    busy: dict[int, npt.NDArray[np.int16]] = field(default_factory=dict)  # by group, by block
    renewed_ns: int = 0
    ended_leases: int = 0  # in the backlog
    state: SessionState = SessionState.OPEN

    @property
    def is_open(self) -> bool:
        return self.state is SessionState.OPEN

    @property
    def is_winding_up(self) -> bool:
        """Closed, and something of it still stands."""
        return self.state in {SessionState.CLOSED, SessionState.DEPARTED}

    def move(self, new: SessionState) -> None:
        """Take a step of the table."""
        self.state = step(SESSION_STEPS, self.state, new)

    def engine_blocks(self, group: int) -> int:
        """Ids of the group's engine blocks are below this on every rank."""
        said = [m.engine_blocks[group] for m in self.movers.values() if m.engine_blocks]
        return min(said, default=MAX_ENGINE_BLOCKS)

    def map_size(self, group: int) -> int:
        """Ids for which the group's map of blocks in flight has to have room, as far as is known;
        of its memory only what is written to is ever used.
        """
        said = [m.engine_blocks[group] for m in self.movers.values() if m.engine_blocks]
        return max(said, default=0)

    def usable(self) -> bool:
        """Every rank stands and none is about to end."""
        return len(self.movers) == self.world_size and all(
            mover.is_serving for mover in self.movers.values()
        )


EpochName = tuple[NamespaceId, str]


@dataclass(slots=True, eq=False)
class Departure:
    """When something that no session uses goes, and which session was the last to use it."""

    until_ns: int
    session: SessionId | None


@dataclass(slots=True, eq=False)
class EpochSweep:
    """Rows whose blocks of these epochs' scopes are still to be given up."""

    epochs: list[EpochName]
    scopes: Slots  # ascending
    owners: deque[tuple[NamespaceId, int]]  # classes that it has yet to come to
    rows: deque[RowId] = field(default_factory=deque)  # of the class that it is at


@dataclass(slots=True, eq=False)
class Expiring:
    """What no session uses."""

    # Every namespace without a session, the one longest without first.
    namespaces: dict[NamespaceId, Departure] = field(default_factory=dict)
    ending: dict[NamespaceId, None] = field(default_factory=dict)  # of those, being taken apart
    turn: deque[NamespaceId] = field(default_factory=deque)  # of those, to be looked at yet
    epochs: dict[EpochName, Departure] = field(default_factory=dict)  # own ones only
    sweep: EpochSweep | None = None


@dataclass(slots=True)
class Counters:
    """Blocks since the start, unless the name says otherwise."""

    hits: int = 0
    misses: int = 0
    pending: int = 0
    retries: int = 0
    stored: int = 0
    store_bytes: int = 0
    loaded: int = 0
    load_bytes: int = 0
    evicted: int = 0
    policy_switches: int = 0  # of classes whose policy is auto
    deduplicated: int = 0
    filtered: int = 0
    failed: int = 0
    damaged: int = 0  # found so by their checksums
    recovered: int = 0
    cleared: int = 0
    dropped: int = 0  # of no use to anybody any more
    namespaces_forgotten: int = 0  # namespaces
    rows_granted: int = 0  # rows
    rows_taken_back: int = 0  # rows
    rows_refused: int = 0  # rows that the pool had no memory for
    leases_expired: int = 0  # leases
    handed_off: int = 0  # claimed by a hand-off
    hand_off_taken: int = 0  # of those, loaded by another session
    hand_off_expired: int = 0  # of those, taken by nobody in time
    hand_off_unheld: int = 0  # named by a hand-off, but not there or beyond a cap
    movers_killed: int = 0  # movers, for a late copy or with copies under way
    refused: dict[str, int] = field(default_factory=dict)  # jobs by reason
    hinted: dict[tuple[str, str], int] = field(default_factory=dict)  # by hint and outcome


class State:
    """Plain tables. Changed only by the functions that `Machine.handle` calls."""

    def __init__(self, config: MachineConfig, probes: Probes = BY_NUMPY) -> None:
        self.config = config
        self.pool_bytes = config.extents * config.extent_bytes
        self.slots_per_extent = max(1, config.extent_bytes // MIN_SLOT_BYTES)
        self.story = Story()
        self.reuse = ReuseSample(self.pool_bytes)
        self.gone = GoneBlocks(self.reuse)
        self.slots = SlotTable(config.extents * self.slots_per_extent, self.story)
        self.policy_memory = PolicyMemory(self.slots.size, probes.ghosts)
        self.index = Index(self.slots, probes.keys)
        self.admission = ReuseFilter(config.store_threshold, config.tracker_blocks)
        self.free_extents = FreeExtents(config.extents, config.extent_nodes)
        # Those that a search for one to take back looks at next come first.
        self.rows: OrderedDict[RowId, Row] = OrderedDict()
        self.emptying: dict[RowId, Row] = {}  # of those, to be taken back when empty
        self.retiring: dict[RowId, Row] = {}
        self.grant_pause = GrantPause()
        self.unnoted: list[RowId] = []  # rows whose uses are to be written down, the last first
        self.spare_turns: deque[SizeClass] = deque()  # to be looked at by the next ticks
        self.tally = Tally()
        self.claims = Claims()
        self.usable_extents = config.extents  # but for those of rows that an orphaned mover maps
        self.rights = Rights()
        self.tenants: dict[TenantId, Tenant] = {}
        self.namespaces: dict[NamespaceId, Namespace] = {}
        self.namespaces_of: Counter[str] = Counter()  # by payer
        self.by_fingerprint: dict[str, Namespace] = {}
        self.classes: dict[tuple[NamespaceId, int], SizeClass] = {}
        self.live_policies: Counter[str] = Counter()  # classes by what auto has chosen for each
        self.scopes: dict[ScopeId, Scope] = {}
        self.scope_ids: dict[tuple[NamespaceId, str, str, int], ScopeId] = {}
        self.scope_shares = ScopeShares()
        self.sessions: dict[SessionId, Session] = {}
        self.movers: dict[MoverId, Mover] = {}
        self.transfers: dict[TransferId, Transfer] = {}
        # Of those, as they were submitted: until the first deadline, and then until the second one.
        self.in_time: OrderedDict[TransferId, Transfer] = OrderedDict()
        self.late: OrderedDict[TransferId, Transfer] = OrderedDict()
        self.hand_offs: dict[tuple[SessionId, RequestId], HandOff] = {}
        self.hand_off_ends: ByDeadline[HandOff] = ByDeadline()  # of those
        self.handed_off: dict[int, list[HandOff]] = {}  # by slot
        # How many running pieces and waits each has: it is not forgotten meanwhile.
        self.in_flight: dict[ScopeId, int] = {}
        self.fillings: dict[int, Filling] = {}  # stores' pieces and promotions that run, by number
        self.released: deque[Wait] = deque()  # whose leader has ended; they go on, some an event
        self.recovered: dict[tuple[NamespaceId, int], list[tuple[Slots, npt.NDArray[np.uint64]]]]
        self.recovered = {}
        self.recovered_scopes: tuple[Slots, npt.NDArray[np.uint64], Slots] | None = None
        self.below = Below(
            tuple(Tier(TierId(place), terms) for place, terms in enumerate(config.tiers))
        )
        self.expiring = Expiring()
        self.backlog = Backlog()
        self.counters = Counters()
        self.draining = False
        self.has_retained = False  # by hints
        self.next_namespace = self.next_scope = 1
        self.blocks_made_ready = 0  # by this incarnation and, as far as records say, by others
        self.requests = 0  # that were given a number
        self.next_transfer = self.next_filling = self.next_lease = 1

    def tenant(self, tenant: TenantId) -> Tenant:
        found = self.tenants.get(tenant)
        if found is None:
            found = self.tenants[tenant] = Tenant(tenant)
        return found

    def add_filling(self, filling: Filling) -> None:
        """It fills its parts' slots from now on, under a number of its own."""
        filling.number = self.next_filling
        self.next_filling += 1
        self.fillings[filling.number] = filling
        for part in filling.parts:
            self.slots.fillings[part.slots] = filling.number

    def count_in_flight(self, scopes: tuple[ScopeId, ...], step: int) -> None:
        """A part or a wait of these scopes begins (1) or has ended (-1)."""
        for scope in scopes:
            left = self.in_flight.get(scope, 0) + step
            assert left >= 0, "more of a scope has ended than began"
            if left:
                self.in_flight[scope] = left
            else:
                del self.in_flight[scope]

    def count_policy(self, owner: SizeClass, step: int) -> None:
        """A class comes (1) or goes (-1): it counts by what auto has chosen for it, if auto has."""
        if isinstance(owner.policy, AutoPolicy):
            self.live_policies[owner.policy.live_name] += step

    def is_there(self, owner: SizeClass) -> bool:
        """Whether the class is not gone; then another may have its name."""
        return self.classes.get(owner.name) is owner

    def require_session(self, session: SessionId) -> Session:
        found = self.sessions.get(session)
        if found is None or not found.is_open:
            raise UnknownSession(f"no session {session}", "session_id")
        return found

    def require_namespace(self, namespace: NamespaceId) -> Namespace:
        found = self.namespaces.get(namespace)
        if found is None:
            raise UnknownNamespace(f"no namespace {namespace}", "namespace_id")
        return found

    def namespace_of(self, session: Session) -> Namespace:
        return self.namespaces[session.namespace]

    def movers_of(self, namespace: NamespaceId) -> Iterator[MoverId]:
        """Movers, and tiers' processes, that map this namespace's rows."""
        for tier in self.below.tiers:
            if tier.is_serving:
                yield tier.mover
        for mover in self.movers.values():
            if self.sessions[mover.session].namespace == namespace:
                yield mover.mover

    def scope_of(self, slot: int) -> ScopeId:
        """The scope of the key that the slot holds."""
        return ScopeId(int(self.slots.scopes[slot]))
