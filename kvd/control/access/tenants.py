"""The operator's policy: which user is which tenant, and who may operate."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

from kvd.config.tenant_rule import TenantRule
from kvd.control.access.peers import Peer
from kvd.core.errors import PermissionDenied
from kvd.core.keys import TenantId

DEFAULT_TENANT = "default"


class TenantPolicy:
    """Which tenants a user belongs to, and who operates.

    Without rules every user who may open the socket is the one tenant "default". With rules a
    user belongs to the tenants that they name, and to no other. Root and the daemon's own user
    operate, and so do the users named as operators. Without `root`, root must be named like others.

    There may be thousands of rules, and answers ask about each tenant, namespace and session: no
    question walks over the rules.
    """

    def __init__(
        self, rules: Sequence[TenantRule] = (), operators: Sequence[int] = (), *, root: bool = True
    ) -> None:
        self.version = 0  # another one = other rights
        self.replace(rules, operators, root=root)

    def replace(self, rules: Sequence[TenantRule], operators: Sequence[int], *, root: bool) -> None:
        """From now on these hold."""
        self.version += 1
        self.rules = tuple(rules)
        self._by_tenant = {rule.tenant: rule for rule in self.rules}
        # Places of rules in the order of the rules.
        self._by_uid: dict[int, list[int]] = defaultdict(list)
        self._by_gid: dict[int, list[int]] = defaultdict(list)
        for place, rule in enumerate(self.rules):
            for uid in rule.uids:
                self._by_uid[uid].append(place)
            for gid in rule.gids:
                self._by_gid[gid].append(place)
        self._rules_by_group = sum(1 for rule in self.rules if rule.gids)
        own = {0, os.getuid()} if root else {os.getuid()} - {0}
        self._operators = frozenset(own | set(operators))

    def tenants_of(self, peer: Peer) -> list[TenantId]:
        """Tenants that the caller may use, its default first."""
        if not self.rules:
            return [TenantId(DEFAULT_TENANT)]
        uid, gid = peer.credentials.uid, peer.credentials.gid
        places = {*self._by_uid.get(uid, ()), *self._by_gid.get(gid, ())}
        return [self.rules[place].tenant for place in sorted(places)]

    def belongs(self, peer: Peer, tenant: str) -> bool:
        """Whether the caller may use this tenant."""
        if not self.rules:
            return tenant == DEFAULT_TENANT
        rule = self._by_tenant.get(TenantId(tenant))
        return rule is not None and rule.covers(peer.credentials.uid, peer.credentials.gid)

    def tenant_of(self, peer: Peer, wanted: str) -> TenantId:
        """The tenant that the caller asks for, or its default; PermissionDenied otherwise."""
        allowed = self.tenants_of(peer)
        if not allowed:
            raise PermissionDenied(
                f"no tenant has uid {peer.uid} or gid {peer.credentials.gid}: name one of them in"
                " `uids` or `gids` of a tenant in the daemon's settings, and reload them",
                "tenant",
            )
        if not wanted:
            return allowed[0]
        if wanted not in allowed:
            raise PermissionDenied(
                f"uid {peer.uid} is not tenant {wanted!r}; it may be {', '.join(allowed)}",
                "tenant",
            )
        return TenantId(wanted)

    def payer(self, uid: int, tenant: TenantId) -> str:
        """Whose shares of what all use are taken: without rules all users are one tenant."""
        return tenant if self.rules else f"uid {uid}"

    def may_see(self, peer: Peer, tenant: str | None) -> bool:
        """True for the caller's own tenants, and for operators; None where it is not known."""
        return self.operates(peer) or (tenant is not None and self.belongs(peer, tenant))

    def sight(self, peer: Peer) -> frozenset[TenantId] | None:
        """All tenants that the caller may see; None for every one."""
        return None if self.operates(peer) else frozenset(self.tenants_of(peer))

    def operates(self, peer: Peer) -> bool:
        """True where the caller may do what concerns everyone."""
        return self.user_operates(peer.uid)

    def user_operates(self, uid: int) -> bool:
        """The same by the user alone."""
        return uid in self._operators

    def require_operator(self, peer: Peer) -> None:
        if not self.operates(peer):
            raise PermissionDenied(
                f"uid {peer.uid} has no operator's rights: name the user in `operators` of the"
                " daemon's settings and reload them, or be the daemon's user",
                "uid",
            )

    def isolated(self, uid: int) -> bool:
        """True where no other tenant's processes run under this user or can pose as it."""
        if len(self.rules) <= 1:
            return True
        if uid in (0, os.getuid()):
            return False
        # A rule by group may cover this user too, so it counts as shared.
        by_user = sum(1 for place in self._by_uid.get(uid, ()) if not self.rules[place].gids)
        return by_user + self._rules_by_group <= 1
