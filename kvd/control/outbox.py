"""What waits to be written to one client, so that nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections import deque

from kvd.control.peers import Context
from kvd_proto.v1 import engine_pb2 as pb

MAX_UNSENT_MESSAGES = 4096  # a client that doesn't read is dropped
JOBS_PER_MESSAGE = 512


class Outbox:
    """Messages on their way to one client; news of jobs that ended together go together."""

    def __init__(self) -> None:
        self._unsent: deque[pb.SessionResponse] = deque()
        self._held: list[pb.JobEnded] | None = None  # None: none is held back
        self._news = asyncio.Event()
        self.overflowed = asyncio.Event()

    def put(self, message: pb.SessionResponse) -> None:
        """Queue a message; past MAX_UNSENT_MESSAGES the client is taken for dead."""
        if len(self._unsent) >= MAX_UNSENT_MESSAGES:
            self.overflowed.set()
        else:
            self._unsent.append(message)
        self._news.set()

    def put_ended(self, ended: pb.JobEnded) -> None:
        """Queue the end of a job, with those that wait already."""
        if self._held is not None:
            self._held.append(ended)
            return
        last = self._unsent[-1] if self._unsent else None
        if (
            last is not None
            and last.WhichOneof("kind") == "jobs_ended"
            and len(last.jobs_ended.jobs) < JOBS_PER_MESSAGE
        ):
            last.jobs_ended.jobs.append(ended)
        else:
            self.put(pb.SessionResponse(jobs_ended=pb.JobsEnded(jobs=[ended])))

    def hold_ended(self) -> None:
        """Keep ends of jobs back, so that none comes before the verdict on its job."""
        self._held = []

    def release_ended(self) -> None:
        """Queue the ends that were kept back."""
        held, self._held = self._held or [], None
        for ended in held:
            self.put_ended(ended)

    async def write_all(self, context: Context) -> None:
        """Write until cancelled. Waits as long as the client doesn't read."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unsent:
                await context.write(self._unsent.popleft())
