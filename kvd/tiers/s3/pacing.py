"""How often a bucket is asked that says that it is asked too often (503, 429).

Such an answer doubles the gap from one request to the next; each other answer makes it a little
shorter, until there is none. So the bucket is asked about as often as it bears, by each node that
shares it. What would have to wait longer than a moment is not asked at all.
"""

from __future__ import annotations

import random
import threading
import time

from kvd.tiers.store import TierError, TierReason

FIRST_GAP_S = 0.002
LONGEST_GAP_S = 0.5
SHORTER = 0.95  # so much of the gap is left after an answer
MOST_WAIT_S = 1.0  # of one request


class Pacing:
    """Of one bucket. Any thread may call."""

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._next = 0.0  # when a request may begin
        self._doubled_at = 0.0
        self._lock = threading.Lock()

    def take_turn(self, deadline: float) -> None:
        """Wait until a request may begin. TierError where that would be too late for it."""
        if not self.gap_s:
            return
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            if turn >= min(deadline, now + MOST_WAIT_S):
                raise TierError("the bucket asks for fewer requests", TierReason.BUSY)
            self._next = turn + self._some_gap()
        time.sleep(turn - now)

    def slow_down(self, began: float) -> None:
        """The bucket says that it is asked too often, to a request that began then.

        Of those that were under way at once, only one says something new.
        """
        with self._lock:
            if began < self._doubled_at:
                return
            self._doubled_at = time.monotonic()
            self.gap_s = min(LONGEST_GAP_S, max(FIRST_GAP_S, 2 * self.gap_s))
            self._next = max(self._next, self._doubled_at + self._some_gap())

    def hasten(self) -> None:
        """It has answered something else."""
        if not self.gap_s:
            return
        with self._lock:
            shorter = self.gap_s * SHORTER
            self.gap_s = shorter if shorter > FIRST_GAP_S / 2 else 0.0

    def _some_gap(self) -> float:
        return self.gap_s * random.uniform(0.5, 1.5)  # nodes shall not keep step
