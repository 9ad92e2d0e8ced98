"""Which sets go on with the pages of an earlier one: they are of one prompt."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

MAX_SEQUENCES = 64  # that may go on; the one that did so longest ago is over


class Sequences:
    """Names for prompts that are stored piece by piece, by the last page of each so far.

    Of two that go on after the same page, the second has a name of its own: all that hangs on one
    system prompt would be one prompt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._by_last: dict[tuple[str, str], str] = {}  # and pool; what grew last is last

    def grow(
        self, pool: str, before: Sequence[str] | None, keys: Sequence[str]
    ) -> tuple[str, list[str]]:
        """The name of the prompt whose pages `before` come before `keys`, and those that are over.

        Without a name where it is not known what comes before.
        """
        if before is None or not keys:
            return "", []
        with self._lock:
            name = self._by_last.pop((pool, before[-1]), "") if before else ""
            name = name or f"prompt-{next(self._numbers)}"
            over = [self._by_last.pop((pool, keys[-1]), name)]  # another of the same pages
            self._by_last[pool, keys[-1]] = name
            if len(self._by_last) > MAX_SEQUENCES:
                over.append(self._by_last.pop(next(iter(self._by_last))))
        return name, [each for each in over if each != name]
