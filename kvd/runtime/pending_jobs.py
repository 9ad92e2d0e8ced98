"""Which jobs are under way, for those who wait for their end (flush, drain, close)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from kvd.core.actions import EndJob
from kvd.core.keys import JobId, SessionId

REMEMBERED_ENDS = 1024  # of each session, so that a late flush still hears how a job ended


class PendingJobs:
    """Live jobs by session with who waits for them, and the newest ends. On the event loop."""

    def __init__(self) -> None:
        self._live: dict[SessionId, set[JobId]] = {}
        self._ends: dict[SessionId, OrderedDict[JobId, EndJob]] = {}
        self._changed = asyncio.Event()

    def started(self, session: SessionId, job: JobId) -> bool:
        """The job is under way from now on. False if it already was."""
        live = self._live.setdefault(session, set())
        self._ends.setdefault(session, OrderedDict())
        if job in live:
            return False
        live.add(job)
        return True

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
        """Ends of these jobs (all live ones when none is named). TimeoutError past deadline."""
        wanted = set(jobs) if jobs else set(self.live(session))
        ends = self._ends.get(session, OrderedDict())  # even if the session is forgotten meanwhile
        async with asyncio.timeout(deadline_s):
            while self.live(session) & wanted:
                await self._wait_for_change()
        return [ends[job] for job in sorted(wanted) if job in ends]

    async def wait_for_all(self, deadline_s: float) -> int:
        """Wait until no session has a live job; the number left when the deadline passes."""
        try:
            async with asyncio.timeout(deadline_s):
                while any(self._live.values()):
                    await self._wait_for_change()
        except TimeoutError:
            pass
        return sum(len(jobs) for jobs in self._live.values())

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
