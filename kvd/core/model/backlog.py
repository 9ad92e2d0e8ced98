"""What one event has ended and others tidy up, so that none takes long.

A session that dies may hold 16,384 leases and a thousand copies. What its end promises holds at
once: an ended lease is its session's no more, and of a mover that ends nothing more becomes
readable or is loaded. What is left to be done stands here, and each `WorkContinued` does a piece of
it (`chores`). Until that is done a session is not forgotten.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.core.keys import NamespaceId, RequestId, RowId, ScopeId, SessionId, TenantId
from kvd.core.model.job import Prefix, Transfer
from kvd.core.model.leases import Lease

LEASES_AT_ONCE = 32
LEASED_BLOCKS_AT_ONCE = 2048  # but for those of the last lease
PARTS_AT_ONCE = 4  # of transfers, but for those of the last one
BLOCKS_AT_ONCE = 512  # of a namespace that was cleared
SCOPES_CHANGED_AT_ONCE = 256  # from one block to the next, in their places
CLAIMED_AT_ONCE = 64  # of those, the ones that are leased or handed off
STORES_LOOKED_AT = 1024
ROWS_LOOKED_AT = 64
SLOTS_LOOKED_AT = 65536  # of those, but for the last one's
SCOPES_AT_ONCE = 128
EMPTIED_AT_ONCE = 512  # blocks of a row that others wait for
EMPTIED_IN_PASSING = 64  # of those, by an event that has its own work to do
DROPPED_AT_ONCE = 512  # blocks that nobody can use any more, or what takes as long
LATE_AT_ONCE = 128  # transfers past a deadline; a mover that is ended counts as several
EVICTED_AT_ONCE = 384  # blocks of a tenant beyond its quota
EVICTED_FOR_A_STORE = 1024  # blocks that give way for a quota in the store's own event
EVICTED_IN_A_BATCH = 64  # of those, where each may be of another account, and is announced so
NEWS_AT_ONCE = 12  # orders, but for those of the last batch


class CallOff(enum.Enum):
    """What becomes of a transfer that nobody wants any more."""

    REVOKE = "its mover is asked to give it up"
    FAIL = "its blocks will not be readable; its copy may run on"
    END = "its mover is gone"


class CalledOff(NamedTuple):
    """Transfers that are to be called off, how, and why."""

    transfers: deque[Transfer]
    how: CallOff
    reason: str


@dataclass(slots=True, eq=False)
class Clear:
    """What is left of a namespace that was cleared; see `clear`."""

    answers: list[tuple[int, int]] = field(default_factory=list)  # token, blocks
    stores: deque[int] = field(default_factory=deque)  # pieces that may be of it, by number
    rows: deque[RowId] = field(default_factory=deque)  # that may hold blocks of it
    scopes: list[set[ScopeId]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Shrink:
    """A tenant that has more than its quota, or too little room; see `eviction.shrink_some`."""

    answers: list[tuple[int, int]] = field(default_factory=list)  # token, `evicted` by then
    evicted: int = 0
    room_bytes: int = 0  # that are to be free of the quota
    room_for: NamespaceId | None = None  # whose store wanted them


@dataclass(slots=True, eq=False)
class Backlog:
    """What waits to be done; oldest first."""

    leases: deque[Lease] = field(default_factory=deque)  # ended; their claims still stand
    transfers: deque[CalledOff] = field(default_factory=deque)
    clears: dict[NamespaceId, Clear] = field(default_factory=dict)
    shrinks: dict[TenantId, Shrink] = field(default_factory=dict)
    # Tenants that no rule names any more; ticks look whether they can be forgotten.
    unnamed: dict[TenantId, None] = field(default_factory=dict)
    forgotten: deque[dict[RequestId, Prefix]] = field(default_factory=deque)  # nobody's any more
    has_expired: bool = False  # leases that have not ended yet
    has_late: bool = False  # perhaps: transfers past a deadline that nothing was done about
    # Closed sessions in their grace, and when each was closed; the first one first.
    lingering: dict[SessionId, int] = field(default_factory=dict)
    has_lingering: bool = False  # closed sessions past their grace whose movers are to end
    turn: int = 0  # which kind comes next

    def __bool__(self) -> bool:
        some = self.leases or self.transfers or self.clears or self.shrinks or self.forgotten
        return bool(some or self.has_expired or self.has_late or self.has_lingering)

    def has_ends_of(self, session: SessionId) -> bool:
        """Whether copies of movers of the session that are gone have still to end."""
        ends = (each.transfers[0] for each in self.transfers if each.how is CallOff.END)
        return any(first.piece.session == session for first in ends)  # a mover's are in one

    def call_off(self, transfers: Iterable[Transfer], how: CallOff, reason: str) -> list[Transfer]:
        """Those that the caller calls off itself now; each of the others ends so in its turn."""
        left, few, parts = deque(transfers), list[Transfer](), 0
        while left and parts < PARTS_AT_ONCE:
            few.append(left.popleft())
            parts += few[-1].piece.work
        if left:
            self.transfers.append(CalledOff(left, how, reason))
        return few
