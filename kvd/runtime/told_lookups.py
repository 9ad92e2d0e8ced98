"""What clients tell of their lookups: the daemon itself hears of hits alone.

A client answers most misses from the index page. So what it counted comes with its steps, and is
kept here for status and metrics. It decides nothing. What one says counts for its own namespace
and tenant, in figures and places that are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from kvd.core.keys import NamespaceId, TenantId

MAX_COUNTED = 1 << 40  # by one message, of anything
MAX_TOLD = (1 << 63) - 1  # in all, of anything
MAX_UNSERVED_S = 86400.0  # by one message
MAX_NAMESPACES_TOLD = 256  # with figures of their own; others of a tenant are told together


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
        for field in fields(self):
            whole = getattr(self, field.name) + getattr(more, field.name)
            setattr(self, field.name, min(whole, MAX_TOLD))


@dataclass(frozen=True, slots=True)
class ToldOf:
    """One row of what is shown."""

    tenant: TenantId
    namespace: NamespaceId | None  # None: of those without figures of their own
    figures: LookupFigures


class ToldLookups:
    """Sums since the daemon's start, by tenant and by namespace."""

    def __init__(self, knows: Callable[[NamespaceId], bool]) -> None:
        self._knows = knows
        self._tenants: dict[TenantId, LookupFigures] = {}
        self._namespaces: dict[NamespaceId, ToldOf] = {}
        self._others: dict[TenantId, ToldOf] = {}
        self.unserved: dict[TenantId, float] = {}  # seconds of engines without a session

    def add(self, namespace: NamespaceId, tenant: TenantId, told: LookupFigures) -> None:
        """A client of the namespace says so."""
        told = told.bounded()
        self._tenants.setdefault(tenant, LookupFigures()).add(told)
        self._place(namespace, tenant).figures.add(told)

    def add_unserved(self, tenant: TenantId, seconds: float) -> None:
        """A client had no session for so long."""
        counted = min(seconds, MAX_UNSERVED_S) if seconds > 0 else 0.0  # and not a number
        self.unserved[tenant] = self.unserved.get(tenant, 0.0) + counted

    def _place(self, namespace: NamespaceId, tenant: TenantId) -> ToldOf:
        place = self._namespaces.get(namespace)
        if place is not None:
            return place
        if len(self._namespaces) >= MAX_NAMESPACES_TOLD:
            self._namespaces = {n: p for n, p in self._namespaces.items() if self._knows(n)}
        if len(self._namespaces) >= MAX_NAMESPACES_TOLD:
            return self._others.setdefault(tenant, ToldOf(tenant, None, LookupFigures()))
        return self._namespaces.setdefault(namespace, ToldOf(tenant, namespace, LookupFigures()))

    def of_tenant(self, tenant: TenantId) -> LookupFigures | None:
        """None: nobody told anything."""
        return _copy(self._tenants.get(tenant))

    def of_namespace(self, namespace: NamespaceId) -> LookupFigures | None:
        """None: nobody told anything, or it has no figures of its own."""
        place = self._namespaces.get(namespace)
        return None if place is None else _copy(place.figures)

    def by_tenant(self) -> Iterator[ToldOf]:
        """Every tenant's sum: it never falls, whatever namespaces are forgotten."""
        for tenant, figures in self._tenants.items():
            yield ToldOf(tenant, None, figures)

    def rows(self) -> Iterator[ToldOf]:
        """Every namespace that is known and has figures, and the others by tenant."""
        for namespace, place in self._namespaces.items():
            if self._knows(namespace):
                yield place
        yield from self._others.values()


def _copy(figures: LookupFigures | None) -> LookupFigures | None:
    return None if figures is None else replace(figures)
