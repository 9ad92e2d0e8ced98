"""Who a tenant is, as the settings say."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.keys import TenantId


@dataclass(frozen=True, slots=True)
class TenantRule:
    """One tenant: its users, its groups, and its hard quota."""

    tenant: TenantId
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    quota_bytes: int = 0  # 0 = no quota

    def covers(self, uid: int, gid: int) -> bool:
        return uid in self.uids or gid in self.gids
