"""What computing a token takes this engine, as it has gone lately: what a hit is worth waiting for.

Measured as requests feel it, from the moment that their prompt begins to be computed until it is,
so whatever else the engine and the machine do at the time is part of it.
"""

from __future__ import annotations

LEAST_TOKENS = 16  # of a sample: with fewer, a step's own cost is all that is seen
REMEMBERED_TOKENS = 16_384  # beyond it, what is older counts half


class TokenPace:
    """How long a token takes to compute: an average of late prompts, weighted by their tokens."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0

    def sample(self, seconds: float, tokens: int) -> None:
        """So many prompt tokens were computed in that time."""
        if tokens < LEAST_TOKENS or seconds < 0:
            return
        if self._tokens > REMEMBERED_TOKENS:
            self._seconds /= 2
            self._tokens //= 2
        self._seconds += seconds
        self._tokens += tokens

    def seconds_for(self, tokens: int) -> float | None:
        """What computing these would take; None: nothing was computed yet."""
        if not self._tokens:
            return None
        return tokens * self._seconds / self._tokens
