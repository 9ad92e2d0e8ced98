"""Which names are in a call now: Mooncake's client takes each into one call at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence


class NamesInUse:
    """Any thread may ask."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, names: Sequence[str], deadline: float) -> Iterator[bool]:
        """Within, no other thread has any of these. False: the deadline passed, and it may."""
        with self._changed:
            is_held = self._changed.wait_for(
                lambda: self._names.isdisjoint(names), max(0.0, deadline - time.monotonic())
            )
            if is_held:
                self._names.update(names)
        try:
            yield is_held
        finally:
            if is_held:
                with self._changed:
                    self._names.difference_update(names)
                    self._changed.notify_all()
