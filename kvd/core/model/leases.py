"""What keeps blocks from being evicted: leases of sessions, and hand-offs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.core.keys import LeaseId, NamespaceId, RequestId, SessionId, Slots
from kvd.core.model.size_class import SizeClass


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks that a session was promised for a while."""

    lease: LeaseId
    session: SessionId
    request: RequestId
    size_class: SizeClass
    slots: Slots  # distinct
    taken_ns: int


@dataclass(slots=True, eq=False)
class HandOff:
    """Blocks that one request left for other sessions; outlives the session that left them."""

    session: SessionId
    request: RequestId
    namespace: NamespaceId
    until_ns: int = 0
    held: dict[int, set[int]] = field(default_factory=dict)  # slots by group, never empty
