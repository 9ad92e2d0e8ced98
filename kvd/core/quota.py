"""Tenants: what each uses, may use, and holds under leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.core.keys import TenantId

if TYPE_CHECKING:
    from kvd.core.rows import SizeClass


@dataclass(slots=True, eq=False)
class Tally:
    """Sums over some size classes, kept with every change, because there may be many classes."""

    capacity: int = 0
    reserved: int = 0
    ready: int = 0
    quarantined: int = 0
    evictable: int = 0
    capacity_bytes: int = 0
    reserved_bytes: int = 0
    ready_bytes: int = 0
    quarantined_bytes: int = 0
    evictable_bytes: int = 0

    @property
    def free(self) -> int:
        return self.capacity - self.reserved - self.ready - self.quarantined

    @property
    def free_bytes(self) -> int:
        used = self.reserved_bytes + self.ready_bytes + self.quarantined_bytes
        return self.capacity_bytes - used


@dataclass(slots=True, eq=False)
class Remembered:
    """Blocks that are remembered of all requests of a session, or of a tenant's sessions."""

    blocks: int = 0
    tenant: Remembered | None = None

    def add(self, blocks: int) -> None:
        self.blocks += blocks
        if self.tenant is not None:
            self.tenant.blocks += blocks


@dataclass(slots=True, eq=False)
class Tenant:
    """`used_bytes` counts every slot that is reserved, ready or quarantined."""

    tenant: TenantId
    quota_bytes: int = 0  # 0 = no quota
    used_bytes: int = 0
    leased_bytes: int = 0  # of distinct blocks, under leases or handed off
    remembered: Remembered = field(default_factory=Remembered)  # of its sessions' requests
    waiting_bytes: int = 0  # of keys that its sessions' jobs wait for
    hand_offs: int = 0
    hand_off_claims: int = 0  # blocks of those, one counted again for each that holds it
    shrinking: bool = False  # more than the quota is there still; nothing is admitted
    tally: Tally = field(default_factory=Tally)
    # Classes that could evict; those looked at longest ago for that come first.
    evictable: dict[SizeClass, None] = field(default_factory=dict)

    def excess(self, more_bytes: int) -> int:
        """Bytes that must go before `more_bytes` may come; 0 or less means they fit."""
        if not self.quota_bytes:
            return 0
        return self.used_bytes + more_bytes - self.quota_bytes

    def lease_room(self, pool_bytes: int, share: float) -> int:
        """Bytes that may still come under leases."""
        limit = min(self.quota_bytes, pool_bytes) if self.quota_bytes else pool_bytes
        return int(limit * share) - self.leased_bytes
