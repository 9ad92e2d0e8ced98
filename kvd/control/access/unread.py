"""Descriptors that were sent and that their clients have not read yet.

Linux counts those that a user's processes have on their way. With more of them than the process
may have open it lets the user send no others (ETOOMANYREFS), to nobody. So there is a bound, and
users share it: who reads nothing keeps nobody else from a page or a rank's channel.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.control.access import descriptors
from kvd.core.errors import LimitExceeded
from kvd.linux.calls import unread_bytes

MAX_UNREAD_FDS = 4096  # or half of what the process may have open
LOOKED_AT = 64  # connections at a time where one is refused: some ten microseconds
LOOKED_AT_EACH_TIME = 2  # so those that have read keep no socket open for long


@dataclass(slots=True)
class _Sent:
    """To one connection. Its socket stays open: the descriptors outlive the connection."""

    user: int
    fd: int
    count: int = 0
    waiting: int = 0  # of these, for the socket to take them


class UnreadDescriptors:
    """Counts them by user. Whether a client has read is seen when somebody wants more."""

    def __init__(
        self, operates: Callable[[int], bool], close: Callable[[int, Sequence[int]], None]
    ) -> None:
        name = "descriptors sent and not read"
        self.shares = descriptors.shared_by_users(name, MAX_UNREAD_FDS)
        self._operates = operates
        self._close = close
        self._sent: OrderedDict[int, _Sent] = OrderedDict()  # by the connection's number

    def take(self, number: int, user: int, connected: socket.socket, count: int) -> None:
        """So many will be sent by this connection soon; LimitExceeded where they may not be."""
        self._look_at(number)
        self._look_at_oldest(LOOKED_AT_EACH_TIME)
        try:
            self._take(user, count)
        except LimitExceeded:
            self._look_at_oldest(LOOKED_AT)
            self._take(user, count)
        if number not in self._sent:
            try:
                fd = os.dup(connected.fileno())
            except OSError as error:
                self._give_back(user, count)
                raise LimitExceeded(f"no descriptor to answer with ({error.strerror})") from error
            self._sent[number] = _Sent(user, fd)
        self._sent[number].count += count
        self._sent[number].waiting += count

    def left(self, number: int, count: int) -> None:
        """So many of those that this connection took lie in its socket now, or never will."""
        self._sent[number].waiting -= count

    def _take(self, user: int, count: int) -> None:
        for taken in range(count):
            try:
                self.shares.take(user, operates=self._operates(user))
            except LimitExceeded:
                self._give_back(user, taken)
                raise

    def _give_back(self, user: int, count: int) -> None:
        for _ in range(count):
            self.shares.give_back(user)

    def _look_at_oldest(self, most: int) -> None:
        for number in list(itertools.islice(self._sent, most)):
            self._look_at(number)

    def _look_at(self, number: int) -> None:
        """Forget what its client has read, or what ended with its client."""
        sent = self._sent.get(number)
        if sent is None:
            return
        if sent.waiting or unread_bytes(sent.fd):
            self._sent.move_to_end(number)
            return
        del self._sent[number]
        self._give_back(sent.user, sent.count)
        self._close(sent.user, (sent.fd,))

    def end(self) -> None:
        """Nobody wants more."""
        while self._sent:
            _, sent = self._sent.popitem()
            self._close(sent.user, (sent.fd,))
