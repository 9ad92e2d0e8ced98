"""The status page: one file for a browser, and the figures that it draws.

The figures are taken at a slow fixed rate, whether anybody looks or not, so that who opens the page
sees the last quarter of an hour. They are made into an answer then, once: any number of open pages
costs the daemon no more than the sending. They tell no more than /metrics does.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from typing import Any

from kvd.core.upkeep.statistics import Statistics, TierFigures
from kvd.runtime.fleet import AttachedMover
from kvd.runtime.told_lookups import LookupFigures, ToldOf

SAMPLE_SECONDS = 5.0
SAMPLE_SHARE = 0.005  # of the event loop's time; where a sample takes long, they are fewer
MAX_SAMPLES = 181  # a quarter of an hour
MAX_ROWS_SHOWN = 32  # of each table; the rest are counted
PAGE = "/status"
FIGURES = "/status/figures"
PAGE_TYPE = "text/html; charset=utf-8"
FIGURES_TYPE = "application/json"
COLUMNS = (
    "at", "stored", "loaded", "offered", "found", "evicted", "granted_bytes", "ready_bytes",
)  # fmt: skip
# Where any of these is above 0, the page says so at its top.
_TROUBLES = (
    ("kvd_failed_blocks_total", "failed"),
    ("kvd_checksum_failures_total", "damaged"),
    ("kvd_movers_killed_total", "movers_killed"),
    ("kvd_rows_refused_total", "rows_refused"),
)
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def html() -> str:
    """The page's file."""
    return resources.files("kvd.observability").joinpath("status_page.html").read_text("utf-8")


def _policy() -> str:
    """What a browser must hold to: it runs the page's own script, and asks nobody but us."""
    hashes: dict[str, str] = {}
    for kind, text in _INLINE.findall(html()):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )


_OF_BOTH = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
HEADERS = {PAGE: (("Content-Security-Policy", _policy()), *_OF_BOTH), FIGURES: _OF_BOTH}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the figures come from."""

    statistics: Callable[[], Statistics]  # with the MAX_ROWS_SHOWN largest tenants at least
    lookups: Callable[[], Iterable[ToldOf]]  # of each tenant: what of them falls is no counter
    ranks: Callable[[], Iterable[AttachedMover]]
    state: Callable[[], str]


class StatusPage:
    """Samples of a daemon's figures, and the answer to who asks for them."""

    def __init__(self, version: str, now: Callable[[], float] = time.monotonic) -> None:
        self._version = version
        self._now = now
        self._began = now()
        self._samples: deque[tuple[float, ...]] = deque(maxlen=MAX_SAMPLES)
        self._sources: Sources | None = None
        self._made = b""

    def pages(self) -> dict[str, Callable[[], tuple[int, str, bytes]]]:
        """Both pages, by their path."""
        return {PAGE: self.page, FIGURES: self.figures}

    async def keep(self, sources: Sources) -> None:
        """Sample these until cancelled, seldom enough to cost SAMPLE_SHARE at most."""
        self._sources = sources
        while True:
            wait = self.sample()
            await asyncio.sleep(wait)

    def sample(self) -> float:
        """Take the figures of this moment; how long to wait with the next."""
        began = self._now()
        self._made = self._make()
        return max(SAMPLE_SECONDS, (self._now() - began) / SAMPLE_SHARE)

    def page(self) -> tuple[int, str, bytes]:
        """The page itself."""
        return 200, PAGE_TYPE, html().encode()

    def figures(self) -> tuple[int, str, bytes]:
        """The figures as they were sampled last."""
        if not self._made:
            self.sample()
        return 200, FIGURES_TYPE, self._made

    def _make(self) -> bytes:
        at = self._now() - self._began
        said: dict[str, Any] = {
            "version": self._version,
            "began": round(self._began, 3),  # another daemon's is another
            "uptime_seconds": round(at, 3),
            "every_seconds": SAMPLE_SECONDS,
            "state": "starting",
            "columns": COLUMNS,
            "samples": (),
            "troubles": (),
        }
        if self._sources is not None:
            said |= self._of(self._sources, at)
        return json.dumps(said, separators=(",", ":")).encode()

    def _of(self, sources: Sources, at: float) -> dict[str, Any]:
        now = sources.statistics()
        told = list(sources.lookups())
        counters = now.counters
        granted = now.extents - now.extents_free
        self._samples.append(
            (
                round(at, 3),
                counters.store_bytes,
                counters.load_bytes,
                sum(row.figures.blocks for row in told),
                sum(row.figures.blocks_found for row in told),
                counters.evicted,
                granted * now.extent_bytes,
                now.bytes.ready,
            )
        )
        ranks = sorted(sources.ranks(), key=lambda each: (each.session, each.placement.rank))
        return {
            "state": sources.state(),
            "pool": {
                "bytes": now.extents * now.extent_bytes,
                "ready_bytes": now.bytes.ready,
                "blocks": now.slots.ready,
            },
            "sessions": len(now.sessions),
            "usable": sum(session.usable for session in now.sessions),
            "jobs": sum(session.jobs for session in now.sessions),
            "curve": () if now.curve is None else now.curve.points,
            "troubles": [
                (name, getattr(counters, field))
                for name, field in _TROUBLES
                if getattr(counters, field)
            ],
            "tenants": _tenants(now, told),
            "tenants_left": max(0, now.tenants_known - MAX_ROWS_SHOWN),
            "tiers": [_tier(tier) for tier in now.tiers],
            "ranks": [_rank(each) for each in islice(ranks, MAX_ROWS_SHOWN)],
            "ranks_left": max(0, len(ranks) - MAX_ROWS_SHOWN),
            "samples": tuple(self._samples),
        }


def _tenants(now: Statistics, told: list[ToldOf]) -> list[dict[str, Any]]:
    """Those that use most, with what their engines looked up."""
    sought: dict[str, LookupFigures] = {}
    for row in told:
        sought.setdefault(row.tenant, LookupFigures()).add(row.figures)
    most = sorted(now.tenants, key=lambda each: -each.used_bytes)[:MAX_ROWS_SHOWN]
    return [
        {
            "tenant": each.tenant,
            "used": each.used_bytes,
            "quota": each.quota_bytes,
            "leased": each.leased_bytes,
            "offered": (told_of := sought.get(each.tenant, LookupFigures())).blocks,
            "found": told_of.blocks_found,
        }
        for each in most
    ]


def _tier(tier: TierFigures) -> dict[str, Any]:
    counters = tier.counters
    return {
        "tier": tier.name,
        "serving": tier.is_serving,
        "hits": counters.hits,
        "misses": counters.misses,
        "promoted_bytes": counters.promoted_bytes,
        "written_bytes": counters.written_bytes,
        "dropped": counters.dropped,
    }


def _rank(attached: AttachedMover) -> dict[str, Any]:
    facts = attached.process.facts
    return {
        "session": attached.session,
        "rank": attached.placement.rank,
        "transport": facts.transport,
        "copier": facts.copier,
    }
