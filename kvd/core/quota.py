"""Tenants: what each uses, may use, and holds under leases."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.keys import TenantId


@dataclass(slots=True, eq=False)
class Tenant:
    """`used_bytes` counts every slot that is reserved, ready or quarantined."""

    tenant: TenantId
    quota_bytes: int = 0  # 0 = no quota
    used_bytes: int = 0
    leased_bytes: int = 0  # of distinct blocks, under leases or handed off
    hand_offs: int = 0
    hand_off_claims: int = 0  # blocks of those, one counted again for each that holds it
    shrinking: bool = False  # a quota was set below what is pinned; nothing is admitted

    def excess(self, more_bytes: int) -> int:
        """Bytes that must go before `more_bytes` may come; 0 or less means they fit."""
        if not self.quota_bytes:
            return 0
        return self.used_bytes + more_bytes - self.quota_bytes

    def lease_room(self, pool_bytes: int, share: float) -> int:
        """Bytes that may still come under leases."""
        limit = min(self.quota_bytes, pool_bytes) if self.quota_bytes else pool_bytes
        return int(limit * share) - self.leased_bytes
