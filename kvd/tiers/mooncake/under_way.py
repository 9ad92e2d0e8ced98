"""Which writes are under way, for who must wait until those before have ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class WritesUnderWay:
    """Numbers writes in the order in which they began. Any thread may call."""

    def __init__(self) -> None:
        self._begun = 0
        self._open: set[int] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A write is under way within."""
        with self._changed:
            self._begun += 1
            number = self._begun
            self._open.add(number)
        try:
            yield
        finally:
            with self._changed:
                self._open.remove(number)
                self._changed.notify_all()

    def wait_for_earlier(self, deadline: float) -> bool:
        """Wait until every write has ended that began before. False: the deadline passed."""
        with self._changed:
            last = self._begun
            return self._changed.wait_for(
                lambda: all(number > last for number in self._open),
                max(0.0, deadline - time.monotonic()),
            )
