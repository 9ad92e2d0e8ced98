"""Which namespaces a caller may see, and how two of them differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from kvd.control.access.peers import Peer
from kvd.control.access.tenants import TenantPolicy
from kvd.control.namespace import differs
from kvd.core.errors import UnknownNamespace
from kvd.core.keys import NamespaceId, TenantId
from kvd.runtime.driver import Driver

_MOST_DIFFERENCES = 16  # other namespaces compared with one: each takes a tenth of a millisecond


class Namespaces:
    """The namespaces that callers may see, by the operator's policy.

    One that the caller may not see and one that is not there get the same answer.
    """

    def __init__(self, driver: Driver, tenants: TenantPolicy) -> None:
        self._driver = driver
        self._tenants = tenants

    def fields(self, namespace: NamespaceId) -> Mapping[str, str]:
        """What the namespace was first opened with; empty where it isn't known."""
        try:
            return self._driver.pool.namespace_fields(namespace)
        except KeyError:
            return {}

    def may_see(self, peer: Peer, namespace: NamespaceId) -> bool:
        """True for namespaces of the caller's tenants, and for operators."""
        return self._tenants.may_see(peer, self.fields(namespace).get("tenant"))

    def may_see_of(self, peer: Peer, tenant: TenantId) -> bool:
        """The same by the namespace's tenant."""
        return self._tenants.may_see(peer, tenant)

    def growth_of_sight(self, peer: Peer) -> Callable[[], bool]:
        """What tells whether a reload lets the caller see more than when it was last asked."""
        tenants = self._tenants
        version, before = tenants.version, tenants.sight(peer)

        def has_grown() -> bool:
            nonlocal version, before
            if version == tenants.version:
                return False
            last = before
            version, before = tenants.version, tenants.sight(peer)
            return last is not None and (before is None or not before <= last)

        return has_grown

    def operates(self, peer: Peer) -> bool:
        """True where the caller is an operator."""
        return self._tenants.operates(peer)

    def visible(self, peer: Peer) -> list[NamespaceId]:
        """Every namespace that the caller may see."""
        return [n for n in self._driver.machine.namespaces() if self.may_see(peer, n)]

    def require(self, peer: Peer, namespace: int) -> NamespaceId:
        """The namespace, or UnknownNamespace."""
        known = NamespaceId(namespace)
        if not self._driver.machine.knows(known) or not self.may_see(peer, known):
            raise UnknownNamespace(f"there is no namespace {namespace}", "namespace_id")
        return known

    def page_of(self, peer: Peer, namespace: int) -> int:
        """The read-only descriptor of the namespace's index page.

        Not even an operator gets another tenant's: a page tells which blocks exist.
        """
        known = NamespaceId(namespace)
        tenant = self.fields(known).get("tenant")
        if tenant is None or not self._tenants.belongs(peer, tenant):
            raise UnknownNamespace(f"there is no namespace {namespace}", "namespace_id")
        try:
            return self._driver.pool.page_fd(known)
        except KeyError:
            raise UnknownNamespace(
                f"namespace {namespace} has no index page yet; open a session", "namespace_id"
            ) from None

    def families(self, peer: Peer) -> dict[tuple[str, str], list[NamespaceId]]:
        """The namespaces that the caller may see, by tenant and model."""
        found: dict[tuple[str, str], list[NamespaceId]] = defaultdict(list)
        for namespace in self.visible(peer):
            found[self.family_of(namespace)].append(namespace)
        return found

    def family_of(self, namespace: NamespaceId) -> tuple[str, str]:
        """Tenant and model: who agrees in these might have been meant to share."""
        fields = self.fields(namespace)
        return fields.get("tenant", ""), fields.get("model", "")

    def differences(self, namespace: NamespaceId, family: Iterable[NamespaceId]) -> dict[str, str]:
        """For other namespaces of the family, a few at most: the fields that differ."""
        mine = self.fields(namespace)
        found: dict[str, str] = {}
        for other in islice((n for n in family if n != namespace), _MOST_DIFFERENCES):
            theirs = self.fields(other)
            found[str(other)] = ", ".join(
                f"{n} ({mine.get(n, '')!r}, there {theirs.get(n, '')!r})"
                for n in differs(mine, theirs)
            )
        return found
