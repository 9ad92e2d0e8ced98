"""Engines that may have gone for good: a session's end alone doesn't say, the kernel does.

A stream breaks and comes back while its engine lives. Where the engine's scheduler process is
known to have ended nobody will come back, and what only that engine could use goes at once; where
that can't be seen from here (its PID namespace, an old kernel), it goes after the core's grace.
"""

from __future__ import annotations

import asyncio
import os

from kvd.control.peers import Peer
from kvd.core import events as ev
from kvd.core.keys import SessionId
from kvd.driver import Driver

# A killed process closes its sockets a moment before the kernel calls it ended.
WATCH_SECONDS = 5.0
MAX_WATCHED = 256  # each costs a descriptor; beyond them the grace has to do


class Departures:
    """Tells the core of sessions whose engine has ended. Lives on the event loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._watching: set[asyncio.Task[None]] = set()

    def watch(self, session: SessionId, peer: Peer) -> None:
        """The session of this peer has ended; say so if its process does within a moment."""
        process = peer.watch_process() if len(self._watching) < MAX_WATCHED else None
        if process is not None:
            task = asyncio.get_running_loop().create_task(self._wait(session, process))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)

    def close(self) -> None:
        """Watch nobody any more."""
        for task in self._watching:
            task.cancel()

    async def _wait(self, session: SessionId, process: int) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(process, ended.set)
        try:
            async with asyncio.timeout(WATCH_SECONDS):
                await ended.wait()
        except TimeoutError:
            return
        finally:
            loop.remove_reader(process)
            os.close(process)
        self._driver.call(ev.SessionClosed(session, gone=True))
