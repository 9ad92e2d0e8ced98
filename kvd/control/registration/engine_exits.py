"""Engines that may have gone for good: a session's end alone doesn't say, the kernel does.

A stream breaks and comes back while its engine lives. Where the engine's scheduler process is
known to have ended nobody will come back, and what only that engine could use goes at once; where
that can't be seen from here (its PID namespace, an old kernel), it goes after the core's grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Hashable
from dataclasses import dataclass, field

from kvd.control.access.peers import Peer, has_ended
from kvd.core import events as ev
from kvd.core.errors import LimitExceeded
from kvd.core.keys import SessionId
from kvd.core.shares import Bound, Shares
from kvd.runtime.driver import Driver

# A killed process closes its sockets a moment before the kernel calls it ended.
WATCH_SECONDS = 5.0
# Processes: each costs a descriptor; beyond them the grace has to do.
MAX_WATCHED = 256
MAX_WATCHED_OF_A_USER = 128


@dataclass(slots=True, eq=False)
class _Watched:
    """A process whose sessions have ended, each to be watched until a time of the loop's."""

    pidfd: int
    sessions: dict[SessionId, float] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, session: SessionId, now: float) -> None:
        """Watch for this session too, and no more for those whose time is over."""
        for old in [number for number, until in self.sessions.items() if until <= now]:
            del self.sessions[old]
        self.sessions[session] = now + WATCH_SECONDS


class EngineExitWatcher:
    """Tells the core when the process of an engine has ended. Lives on the event loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._watched: dict[Hashable, _Watched] = {}
        self._shares = Shares(
            Bound("ended engines that are watched", MAX_WATCHED, MAX_WATCHED_OF_A_USER)
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, session: SessionId, peer: Peer) -> None:
        """The session of this peer has ended; say so if its process does within a moment.

        However many sessions one process opens and closes, it is watched once.
        """
        loop = asyncio.get_running_loop()
        key: Hashable = peer.pid or peer.token
        known = self._watched.get(key)
        # While the process lives its pid is nobody else's.
        if known is None or has_ended(known.pidfd):
            known = self._begin(key, peer)
        if known is not None:
            known.add(session, loop.time())

    def _begin(self, key: Hashable, peer: Peer) -> _Watched | None:
        try:
            self._shares.take(peer.uid)
        except LimitExceeded:
            return None
        pidfd = peer.watch_process()
        if pidfd is None:
            self._shares.give_back(peer.uid)
            return None
        watched = self._watched[key] = _Watched(pidfd)
        task = asyncio.get_running_loop().create_task(self._wait(key, watched, peer.uid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return watched

    def close(self) -> None:
        """Watch nobody any more."""
        for task in self._tasks:
            task.cancel()

    async def _wait(self, key: Hashable, watched: _Watched, user: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(watched.pidfd, watched.ended.set)
            while not watched.ended.is_set():
                left = max(watched.sessions.values()) - loop.time()
                if left <= 0:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await watched.ended.wait()
        finally:
            loop.remove_reader(watched.pidfd)
            os.close(watched.pidfd)
            self._shares.give_back(user)
            if self._watched.get(key) is watched:
                del self._watched[key]
        for session in watched.sessions:
            self._driver.call(ev.SessionClosed(session, gone=True))
            await asyncio.sleep(0)
