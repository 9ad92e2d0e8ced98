"""What went wrong on one disk: counted by reason, and said in the kernel's words."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kvd.tiers.disk.transfers import BlockMove
from kvd.tiers.store import TierReason

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between lines about one kind of failure


class DiskFailures:
    """Any thread may ask; who counts holds the disk's lock, or counts what nobody else does."""

    def __init__(self, directory: Path) -> None:
        self.counts: Counter[TierReason] = Counter()
        self._directory = directory
        self._said: dict[TierReason, float] = {}
        self._refused = {"writes": "", "reads": ""}  # the kernel's word, until one goes well

    def count(self, reason: TierReason, times: int = 1, why: str = "") -> None:
        """Count it, and say so now and then."""
        self.counts[reason] += times
        now = time.monotonic()
        if now - self._said.get(reason, -LOG_SECONDS) >= LOG_SECONDS:
            self._said[reason] = now
            word = f": {why}" if why else ""
            so_far = self.counts[reason]
            log.warning("%s: %s (%d so far)%s", self._directory, reason, so_far, word)

    def heed(self, what: str, moves: Iterable[BlockMove]) -> None:
        """Whether "writes" or "reads" go well now: these were the last."""
        for move in moves:
            if move.why or move.reason is None:
                self._refused[what] = move.why

    @property
    def notes(self) -> list[str]:
        """What fails now, and why."""
        refused = self._refused.items()
        return [f"{self._directory}: {what} fail: {why}" for what, why in refused if why]
