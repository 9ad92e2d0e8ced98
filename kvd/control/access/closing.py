"""Clients' descriptors are closed away from the event loop: to close one may take long.

Of a file in memory that nobody else holds any more all pages are freed, which takes a second for
some gigabytes. Of a TCP socket the last close waits as long as whoever made it has chosen
(SO_LINGER), and so does that of a Unix socket in which such a one lies unread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from kvd.native import library

Line = tuple[Hashable, tuple[int, ...]]  # a user, and descriptors that he gave


def close_all(fds: Iterable[int]) -> None:
    """Close these now, whatever becomes of one."""
    for fd in fds:
        with contextlib.suppress(OSError):  # it is closed all the same
            os.close(fd)


class Closer:
    """Closes descriptors on a thread of its own, between `begin` and `end`.

    With the native library it waits for none of them: they end with a thread that has nothing else.
    Without it one that takes long keeps those behind it open.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._under_way = 0

    def begin(self) -> None:
        """Close from now on."""
        threading.Thread(target=self._run, name="kvd-closing", daemon=True).start()

    def close(self, user: Hashable, fds: Sequence[int]) -> None:
        """Close these of a user's soon. Returns at once; they are nobody else's from now on."""
        if fds:
            self._waiting.put((user, tuple(fds)))

    @property
    def unclosed(self) -> int:
        """Lots that are not closed yet, within a few."""
        return self._waiting.qsize() + self._under_way

    def end(self) -> None:
        """Nothing more comes. What waits is still closed, by the daemon's end at the latest."""
        self._waiting.put(None)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            lines = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._waiting.get_nowait())
            self._under_way = len(lines)
            goes_on = None not in lines
            of: defaultdict[Hashable, list[int]] = defaultdict(list)
            for user, fds in filter(None, lines):
                of[user] += fds
            for mine in of.values():
                _close_without_waiting(mine)
            self._under_way = 0


def _close_without_waiting(fds: list[int]) -> None:
    """Close one user's: none of them waits for another's."""
    native = library()
    if native is None or not native.close(fds):
        close_all(fds)
