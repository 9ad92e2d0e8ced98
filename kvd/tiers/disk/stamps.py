"""When blocks were last used, in seconds that outlive a start."""

from __future__ import annotations

import time

_LAST_STAMP = (1 << 32) - 1  # an index has half a word for it
_LAST_BEGIN = 1 << 31  # that a clock is believed: behind it are stamps for 68 years


class UseClock:
    """Seconds since 1970, more or less: stamps say who was used before whom, and nothing else.

    They never fall, however the system's clock is set: within a life they go on with the clock that
    nobody sets, and begin behind the newest stamp that the index has. By a clock that was put back,
    blocks of before would be the last used for as long as it was ahead; by one that began beyond
    the last stamp all would be as young for ever, and no size would give way to another.
    """

    def __init__(self, newest: int) -> None:
        """`newest`: of the stamps so far; 0 where there are none."""
        self._ahead_s = max(min(time.time(), _LAST_BEGIN), newest + 1.0) - time.monotonic()

    def now(self) -> int:
        return min(int(self._ahead_s + time.monotonic()), _LAST_STAMP)
