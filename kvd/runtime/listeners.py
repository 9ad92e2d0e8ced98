"""Who hears from the driver: sessions, and whoever counts."""

from __future__ import annotations

from typing import Protocol

from kvd.core.actions import EndJob
from kvd.core.events import JobKind, TransferOutcome
from kvd.runtime.fleet import TransferObserver


class SessionSink(Protocol):
    """What takes the news for one session."""

    def job_ended(self, order: EndJob) -> None: ...

    def rank_lost(self, rank: int, reason: str) -> None: ...


class DriverObserver(TransferObserver, Protocol):
    """Counts what passes by, for metrics."""

    def job_ended(self, order: EndJob) -> None: ...

    def tags_spilled(self, count: int) -> None: ...


class SilentObserver:
    """An observer that counts nothing."""

    def transfer_finished(
        self, kind: JobKind, outcome: TransferOutcome, bytes_copied: int, duration_ns: int
    ) -> None:
        pass

    def job_ended(self, order: EndJob) -> None:
        pass

    def tags_spilled(self, count: int) -> None:
        pass
