"""Which jobs are under way, for those who wait for their end (flush, drain, close)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvd.core.actions import EndJob
from kvd.core.errors import LimitExceeded
from kvd.core.keys import JobId, SessionId

MAX_FLUSHES = 16  # of one session, that wait
REMEMBERED_ENDS = 1024  # of each session, so that a late flush still hears how a job ended


@dataclass(slots=True, eq=False)
class Flush:
    """Somebody who waits for these jobs of a session."""

    left: set[JobId]
    over: asyncio.Future[None]


class PendingJobs:
    """Live jobs by session with who waits for them, and the newest ends. On the event loop."""

    def __init__(self) -> None:
        self._live: dict[SessionId, set[JobId]] = {}
        self._ends: dict[SessionId, OrderedDict[JobId, EndJob]] = {}
        self._flushes: dict[SessionId, list[Flush]] = {}
        self._changed = asyncio.Event()

    def started(self, session: SessionId, job: JobId) -> bool:
        """The job is under way from now on. False if it already was."""
        live = self._live.setdefault(session, set())
        self._ends.setdefault(session, OrderedDict())
        if job in live:
            return False
        live.add(job)
        return True

    def withdraw(self, session: SessionId, jobs: Iterable[JobId]) -> None:
        """These have not begun after all."""
        self._live[session].difference_update(jobs)

    def ended(self, order: EndJob) -> None:
        """The job has ended on every rank."""
        live = self._live.get(order.session)
        if live is None:
            return
        live.discard(order.job)
        ends = self._ends[order.session]
        ends[order.job] = order
        if len(ends) > REMEMBERED_ENDS:
            ends.popitem(last=False)
        for flush in self._flushes.get(order.session, ()):
            flush.left.discard(order.job)
            if not flush.left and not flush.over.done():
                flush.over.set_result(None)
        self._changed.set()

    def forget_if_idle(self, session: SessionId) -> None:
        """The session is closed: unless a job of it is live nobody will ask for its jobs."""
        if not self._live.get(session):
            self._live.pop(session, None)
            self._ends.pop(session, None)

    def live(self, session: SessionId) -> frozenset[JobId]:
        """Jobs of the session that have not ended."""
        return frozenset(self._live.get(session, ()))

    async def wait(
        self, session: SessionId, jobs: Sequence[JobId], deadline_s: float
    ) -> list[EndJob]:
        """Ends of these jobs (all live ones when none is named). TimeoutError past deadline.

        LimitExceeded where as many wait for the session's jobs as may.
        """
        live = self.live(session)
        wanted = set(jobs) or set(live)
        ends = self._ends.get(session, OrderedDict())  # even if the session is forgotten meanwhile
        if left := wanted & live:
            await self._wait_for(session, left, deadline_s)
        return [ends[job] for job in sorted(wanted) if job in ends]

    async def _wait_for(self, session: SessionId, left: set[JobId], deadline_s: float) -> None:
        flushes = self._flushes.setdefault(session, [])
        if len(flushes) >= MAX_FLUSHES:
            raise LimitExceeded(
                f"{MAX_FLUSHES} flushes of the session wait: let one end first", "session_id"
            )
        flush = Flush(left, asyncio.get_running_loop().create_future())
        flushes.append(flush)
        try:
            async with asyncio.timeout(deadline_s):
                await flush.over
        finally:
            flushes.remove(flush)
            if not flushes:
                del self._flushes[session]

    def look_again(self) -> None:
        """Whoever waits for all may want that no more."""
        self._changed.set()

    async def wait_for_all(
        self, deadline_s: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> int:
        """Wait until no session has a live job, while that is wanted; the number left then."""
        try:
            async with asyncio.timeout(deadline_s):
                while is_wanted() and any(self._live.values()):
                    await self._wait_for_change()
        except TimeoutError:
            pass
        return sum(len(jobs) for jobs in self._live.values())

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
