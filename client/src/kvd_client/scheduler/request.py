"""What the scheduler side remembers of one live request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvd_client.draft import BlockRun
from kvd_client.scheduler.hits import Statuses
from kvd_client.scheduler.params import RequestParams, SchedulerOptions
from kvd_proto.key_status import HIT, STATUS_BITS
from kvd_proto.v1 import common_pb2

REFUSED_WITHIN_S = 1.0  # a load by the page's word that fails later had begun

Alone = tuple[int, bytes]  # group, block hash
FAILURES = 3  # so often a store may fail before what it had is let be


class LookupState(enum.Enum):
    """How far a request's lookup has come."""

    NEW = "new"  # nothing asked: not begun, or its session or lease is gone
    ASKED = "asked"  # answers are on their way
    KNOWN = "known"  # statuses are from the daemon, hits are leased
    CLOSED = "closed"  # miss from now on: nothing there, or a load of it failed


class Knowledge(enum.Enum):
    """What `LookupQueue.resolve` found out about a request's blocks."""

    STATUSES = "statuses"  # of every known block, hits leased
    UNANSWERED = "unanswered"  # ask again in the next step
    NOTHING = "nothing"  # no daemon, no hit in the page, or no more looking up: a miss


class GivenUp(enum.StrEnum):
    """Why a request is computed that the daemon might have had blocks of."""

    UNANSWERED = "unanswered"  # the lookup, for longer than it was worth
    NO_SESSION = "no_session"  # absent, not registered yet, or left alone for its silence
    RETRY = "retry"  # the daemon could not say for sure, for too long
    PENDING = "pending"  # they are being stored, for too long


@dataclass(slots=True)
class Lookup:
    """What the scheduler side knows of a request's blocks in the daemon."""

    state: LookupState = LookupState.NEW
    generation: int = 0
    asked_s: float = 0.0
    first_asked_s: float = 0.0
    calls: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # (group, first block)
    asked_tokens: int = 0  # what the device had: asked for is what lies beyond
    statuses: list[Statuses] = field(default_factory=list)
    first_tokens: int | None = None  # only blocks that begin before were asked for; None: all
    looks: int = 0  # how often it was asked
    # By group, where any was brought up from a tier: its number by block, 0 for the others.
    sources: dict[int, Statuses] = field(default_factory=dict)
    missed_page: bool = False  # nothing was asked for but admission verdicts
    answered: bool = False  # the statuses are the daemon's, with its admission verdicts
    is_shown: bool = False  # the statuses are the page's: the daemon's are on their way
    leases: list[int] = field(default_factory=list)
    worth_tokens: int | None = None  # what the page shows of it, once somebody had to know
    was_waited_for: bool = False  # by a step; while the engine is busy no other one waits again
    alone: dict[Alone, int] = field(default_factory=dict)  # calls for single blocks beside the grid
    alone_since_s: float = 0.0
    alone_known: dict[Alone, int] = field(default_factory=dict)  # their statuses, once answered
    doubts: dict[int, float] = field(default_factory=dict)  # RETRY, PENDING: since when they defer
    alone_doubts: dict[int, float] = field(default_factory=dict)  # the same of single blocks
    is_released: bool = False  # the request loads, or loads nothing: no lease is needed any more

    def was_asked_elsewhere(
        self, unbroken: Sequence[tuple[int, int, int]], computed_tokens: int
    ) -> bool:
        """Whether what lies beyond the device's own prefix was asked for in a way that leases
        none of it: from behind its start, or from before a gap that the device fills.

        A lease holds the leading ones of what was asked for. `unbroken` has number and width of
        the groups of which a hit takes every block.
        """
        for group, width, _ in unbroken if self.answered else ():
            row = self.statuses[group] & np.uint8(STATUS_BITS)
            first, start = self.asked_tokens // width, computed_tokens // width
            if start < first:
                return True
            is_hit = start < len(row) and row[start] == HIT
            if is_hit and (row[first:start] != HIT).any():
                return True
        return False


@dataclass(slots=True)
class Request:
    """One live request, as the scheduler side knows it. Its lists are by group."""

    request_id: str
    num_tokens: int  # that it comes with; after a preemption the generated ones, too
    hashes: Sequence[Sequence[bytes]]
    params: RequestParams
    account: str
    context: common_pb2.ReqContext
    lookup: Lookup = field(default_factory=Lookup)
    computed_tokens: int = 0  # the device's own prefix, as last asked with
    hit_tokens: int = 0  # of the last lookup, from the prompt's start
    max_hit_tokens: int | None = None  # the engine's own bound on it
    next_store: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)  # up to here before, where it is offered again
    offer_at: int = 0  # with fewer computed tokens than this there is nothing new to store
    seen_blocks: list[int] = field(default_factory=list)
    loading_job: int = 0
    store_jobs: set[int] = field(default_factory=set)
    storing_since_s: float | None = None  # since when they have deferred it
    no_job_since_s: float | None = None  # since when too many in flight have deferred its load
    failed_stores: int = 0  # one after the other
    failed_from: dict[int, int] = field(default_factory=dict)  # by group: the first block
    failures: dict[tuple[int, bytes], int] = field(default_factory=dict)  # by group and block hash
    request_level: bool = False
    stores_end: bool = False  # its KV is of before a reset: never store it
    computed_after: int = 0  # tokens whose KV exists after the last step it was in
    known_hashes: Sequence[int] = ()  # by group, so many were known to that step
    awaited_load: int = 0  # another request's, that brings what this one would load
    sharing_since_s: float | None = None  # since when such loads have deferred it
    gave_up: GivenUp | None = None  # why it is computed, though the daemon may have it
    shown_load_s: float | None = None  # when its load began, if by the page's word
    page_was_wrong: bool = False  # about such a load: never again
    was_counted: bool = False  # among the lookups that the daemon is told of
    deferred_since_s: float | None = None  # since when it has had no answer, for whatever reason
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.num_tokens

    def was_refused(self, now: float) -> bool:
        """Whether a load that failed was refused, since the page was wrong about it."""
        began_s, self.shown_load_s = self.shown_load_s, None
        self.page_was_wrong |= began_s is not None
        return began_s is not None and now - began_s < REFUSED_WITHIN_S

    def begin_again(self, widths: Sequence[int]) -> None:
        """Nothing of it is on the device: look up and store from the first block on."""
        self.computed_tokens = 0
        self.hit_tokens = 0
        self.store_from_start()
        self.seen_blocks = [0] * len(self.seen_blocks)
        self.stores_end = False
        self.num_tokens = max(self.num_tokens, self._sure_tokens(widths))
        self.computed_after = 0
        self.known_hashes = ()
        self.awaited_load = 0
        self.sharing_since_s = None
        self.no_job_since_s = None

    def _sure_tokens(self, widths: Sequence[int]) -> int:
        """Tokens that the last step had, without drafts that may have been counted as computed:
        a whole block of them would have had a hash.
        """
        counts = zip(self.known_hashes, widths, strict=False)
        known_tokens = max(((count + 1) * width - 1 for count, width in counts), default=0)
        return min(self.computed_after, known_tokens)

    def waits_for_stores(self, now: float, deadline_s: float) -> bool:
        """Whether its own stores defer it: they will be the hit, unless they take too long."""
        if not self.store_jobs:
            self.storing_since_s = None
            return False
        if self.storing_since_s is None:
            self.storing_since_s = now
        return now - self.storing_since_s < deadline_s

    def store_attempt_failed(self, options: SchedulerOptions) -> bool:
        """Note a failed store of a request that must be whole. True: offer its blocks again."""
        self.failed_stores += 1
        return self.failed_stores < options.request_level_attempts

    def store_from_start(self) -> None:
        self.next_store = [0] * len(self.next_store)
        self.offered = [0] * len(self.next_store)
        self.offer_at = 0
        self.failures.clear()

    def note_failed(self, run: BlockRun) -> bool:
        """A store of these failed. True: one of them at least may be offered again."""
        again = False
        for block_hash in run.block_hashes:
            failures = self.failures.get((run.group, block_hash), 0) + 1
            self.failures[run.group, block_hash] = failures
            again |= failures < FAILURES
        return again

    def note_stored(self, run: BlockRun) -> None:
        if self.failures:
            for block_hash in run.block_hashes:
                self.failures.pop((run.group, block_hash), None)

    def gave_up_storing(self, group: int, block_hash: bytes) -> bool:
        return self.failures.get((group, block_hash), 0) >= FAILURES

    def offer_again(self, group: int, first_block: int) -> None:
        """Its blocks from this one on, as far as they were offered before."""
        self.offered[group] = max(self.offered[group], self.next_store[group])
        self.next_store[group] = min(self.next_store[group], first_block)
        self.offer_at = 0

    def offer_failed_again(self) -> None:
        for group, first_block in self.failed_from.items():
            self.offer_again(group, first_block)
        self.failed_from.clear()

    def known_blocks(self, group: int, width_tokens: int) -> int:
        """Blocks of the prompt whose hashes are known."""
        return min(len(self.hashes[group]), self.num_tokens // width_tokens)

    def empty_statuses(self, widths: Sequence[int]) -> list[Statuses]:
        return [
            np.zeros(self.known_blocks(group, width), dtype=np.uint8)
            for group, width in enumerate(widths)
        ]
