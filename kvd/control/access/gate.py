"""Shuts out who connects again and again: the socket's file keeps him from connecting.

Whoever connects may send calls at once. Where he closes and connects anew, as fast as he can, his
calls have all come before anybody can look whose they are, and gRPC holds them until their turn.
Only the file can keep him away: an access list on it names him, and he is told so in `connect`.
What is connected already stays, and so do all others.

How often a user connects is not known: gRPC accepts. A look now and then sees some of it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvd.control.sockets import SocketFile
from kvd.linux import acl

log = logging.getLogger(__name__)

NEW_A_SECOND = 16  # of a user's connections that looks find, beyond those that come at once
SHUT_OUT_SECONDS = 5.0  # the first time; twice as long each time that follows soon
LONGEST_SHUT_OUT_SECONDS = 60.0
MAX_SHUT_OUT = 64  # users at a time


@dataclass(slots=True)
class _Comer:
    """A user who connected of late."""

    new: float  # connections, less those whose time is over
    at_s: float  # when that was counted
    out_until_s: float = 0.0
    next_seconds: float = SHUT_OUT_SECONDS

    def leak(self, now: float) -> None:
        """Take off what so much time allows."""
        self.new = max(0.0, self.new - (now - self.at_s) * NEW_A_SECOND)
        self.at_s = now


class Gate:
    """A leaky bucket for each user, and the list on the socket's file. Not for two threads."""

    def __init__(self, file: SocketFile | None, at_once: int) -> None:
        """Without a file nobody is kept out."""
        self._file = file
        self._at_once = at_once
        self._always_in = {0, os.geteuid()}  # no list keeps root or the file's owner out
        self._comers: dict[int, _Comer] = {}
        self._listed: frozenset[int] = frozenset()

    def __len__(self) -> int:
        """Users who connected of late."""
        return len(self._comers)

    @property
    def wants_a_look(self) -> bool:
        """Whether somebody's time may be over."""
        return bool(self._listed)

    def note(self, new: Mapping[int, int]) -> list[int]:
        """These users have so many new connections; who is shut out for it from now on."""
        now = time.monotonic()
        for comer in self._comers.values():
            comer.leak(now)  # before any are added: looks may lie far apart
        for user, count in new.items():
            if user in self._always_in:
                continue
            comer = self._comers.setdefault(user, _Comer(0.0, now))
            if now >= comer.out_until_s:
                comer.new += count
        shut_out = []
        for user, comer in list(self._comers.items()):
            if comer.new > self._at_once:
                comer.new, comer.out_until_s = self._at_once, now + comer.next_seconds
                comer.next_seconds = min(2 * comer.next_seconds, LONGEST_SHUT_OUT_SECONDS)
                shut_out.append(user)
            elif not comer.new and now >= comer.out_until_s:
                del self._comers[user]
        if self._list(now):
            return shut_out
        for user in shut_out:  # perhaps it can't be said of this one
            self._comers.pop(user, None)
        return []

    def _list(self, now: float) -> bool:
        """Name on the file whom it must keep out now. False where that can't be."""
        out = [user for user, comer in self._comers.items() if now < comer.out_until_s]
        out.sort(key=lambda user: self._comers[user].out_until_s)
        wanted = frozenset(out[-MAX_SHUT_OUT:])
        if wanted == self._listed:
            return True
        if self._file is None or not self._file.is_there():  # another one may be a later daemon's
            self._comers.clear()
            self._listed = frozenset()
            return False
        path = self._file.path
        try:
            if not self._listed and acl.has_list(path):
                raise FileExistsError("the file has an access list of somebody else's")
            acl.keep_out(path, wanted)
        except OSError as error:
            log.warning("can't keep users from %s who connect without end: %s", path, error)
            return False
        self._listed = wanted
        return True
