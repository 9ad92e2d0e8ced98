"""Who hears from the driver: sessions, and whoever counts."""

from __future__ import annotations

from typing import Protocol

from kvd.core.actions import EndJob
from kvd.runtime.fleet import TransferObserver


class SessionSink(Protocol):
    """What takes the news for one session."""

    def job_ended(self, order: EndJob) -> None: ...

    def rank_lost(self, rank: int, reason: str) -> None: ...


class DriverObserver(TransferObserver, Protocol):
    """Counts what passes by, for metrics."""

    def job_ended(self, order: EndJob) -> None: ...

    def tags_spilled(self, count: int) -> None: ...
