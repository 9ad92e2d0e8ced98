"""What clients tell of their lookups: the daemon itself hears of hits alone.

A client answers most misses from the index page. So what it counted comes with its steps, and is
kept here for status and metrics. It decides nothing. What one says counts for its own namespace
and tenant, in figures and places that are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace

from kvd.core.keys import NamespaceId, TenantId

MAX_COUNTED = 1 << 40  # by one message, of anything
MAX_TOLD = (1 << 63) - 1  # in all, of anything
MAX_UNSERVED_S = 86400.0  # by one message
MAX_NAMESPACES_TOLD = 256  # with figures of their own; others of a tenant are told together
# As many as there may be: those that rules name, and those with namespaces. Forgotten ones go.
MAX_TENANTS_TOLD = 8192
NO_TENANT = TenantId("")


@dataclass(slots=True)
class LookupFigures:
    """Requests, blocks and tokens that were looked for, and how many of these were found."""

    requests: int = 0
    requests_found: int = 0
    blocks: int = 0
    blocks_found: int = 0
    tokens: int = 0
    tokens_found: int = 0

    def bounded(self) -> LookupFigures:
        """What counts of a client's word: at most MAX_COUNTED, and no more found than sought."""
        requests, blocks, tokens = (
            min(each, MAX_COUNTED) for each in (self.requests, self.blocks, self.tokens)
        )
        return LookupFigures(
            requests, min(self.requests_found, requests),
            blocks, min(self.blocks_found, blocks),
            tokens, min(self.tokens_found, tokens),
        )  # fmt: skip

    def add(self, more: LookupFigures) -> None:
        """Take these to what there is, up to MAX_TOLD."""
        for each in fields(self):
            whole = getattr(self, each.name) + getattr(more, each.name)
            setattr(self, each.name, min(whole, MAX_TOLD))


@dataclass(frozen=True, slots=True)
class ToldOf:
    """One row of what is shown."""

    tenant: TenantId
    namespace: NamespaceId | None  # None: of those without figures of their own
    figures: LookupFigures


@dataclass(slots=True)
class ToldOfTenant:
    """A tenant's sums."""

    whole: LookupFigures = field(default_factory=LookupFigures)
    others: LookupFigures | None = None  # of namespaces without figures of their own
    unserved_s: float | None = None  # of engines without a session; None: none said


class ToldLookups:
    """Sums since the daemon's start, by tenant and by namespace."""

    def __init__(
        self,
        knows: Callable[[NamespaceId], bool],
        knows_tenant: Callable[[TenantId], bool] = lambda _tenant: True,
    ) -> None:
        self._knows = knows
        self._knows_tenant = knows_tenant
        self._tenants: dict[TenantId, ToldOfTenant] = {}
        self._namespaces: dict[NamespaceId, ToldOf] = {}
        self._past = ToldOfTenant()  # of tenants that are forgotten

    def add(self, namespace: NamespaceId, tenant: TenantId, told: LookupFigures) -> None:
        """A client of the namespace says so."""
        told = told.bounded()
        of_tenant = self._of(tenant)
        of_tenant.whole.add(told)
        self._place(namespace, tenant, of_tenant).add(told)

    def add_unserved(self, tenant: TenantId, seconds: float) -> None:
        """A client had no session for so long."""
        counted = min(seconds, MAX_UNSERVED_S) if seconds > 0 else 0.0  # and not a number
        found = self._of(tenant)
        found.unserved_s = (found.unserved_s or 0.0) + counted

    def _of(self, tenant: TenantId) -> ToldOfTenant:
        found = self._tenants.get(tenant)
        if found is not None:
            return found
        if len(self._tenants) >= MAX_TENANTS_TOLD:
            for name in [each for each in self._tenants if not self._knows_tenant(each)]:
                self._past.whole.add(self._tenants.pop(name).whole)
        if len(self._tenants) >= MAX_TENANTS_TOLD:
            return self._past
        return self._tenants.setdefault(tenant, ToldOfTenant())

    def _place(
        self, namespace: NamespaceId, tenant: TenantId, of_tenant: ToldOfTenant
    ) -> LookupFigures:
        place = self._namespaces.get(namespace)
        if place is not None:
            return place.figures
        if len(self._namespaces) >= MAX_NAMESPACES_TOLD:
            self._namespaces = {n: p for n, p in self._namespaces.items() if self._knows(n)}
        if len(self._namespaces) >= MAX_NAMESPACES_TOLD:
            of_tenant.others = of_tenant.others or LookupFigures()
            return of_tenant.others
        place = self._namespaces[namespace] = ToldOf(tenant, namespace, LookupFigures())
        return place.figures

    def of_tenant(self, tenant: TenantId) -> LookupFigures | None:
        """None: nobody told anything."""
        found = self._tenants.get(tenant)
        told = None if found is None else replace(found.whole)
        return None if told == LookupFigures() else told

    def of_namespace(self, namespace: NamespaceId) -> LookupFigures | None:
        """None: nobody told anything, or it has no figures of its own."""
        place = self._namespaces.get(namespace)
        return None if place is None else replace(place.figures)

    def by_tenant(self) -> Iterator[ToldOf]:
        """Every tenant's sum, and that of forgotten ones under no name: none is ever lost."""
        for tenant, found in self._tenants.items():
            yield ToldOf(tenant, None, found.whole)
        yield ToldOf(NO_TENANT, None, self._past.whole)

    def rows(self) -> Iterator[ToldOf]:
        """Every namespace that is known and has figures, and the others by tenant that is known."""
        for namespace, place in self._namespaces.items():
            if self._knows(namespace):
                yield place
        for tenant, found in self._tenants.items():
            if found.others is not None and self._knows_tenant(tenant):
                yield ToldOf(tenant, None, found.others)

    def unserved(self) -> Iterator[tuple[TenantId, float]]:
        """Tenants that are known, and for how many seconds their engines had no session."""
        for tenant, found in self._tenants.items():
            if found.unserved_s is not None and self._knows_tenant(tenant):
                yield tenant, found.unserved_s
