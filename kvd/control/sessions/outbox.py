"""Messages on their way to one session's client."""

from __future__ import annotations

import asyncio
from collections import deque

from kvd.control.access.peers import Context
from kvd_proto.v1 import engine_pb2 as pb

MAX_UNSENT_MESSAGES = 4096  # a client that doesn't read is dropped
MAX_UNSENT_BYTES = 4 << 20  # likewise; encoded, and the last message may pass it
JOBS_PER_MESSAGE = 512
QUIET = "quiet"  # the capability of a client that reads its boards and needs no prompt answers
QUIET_DELAY_S = 0.1


class Outbox:
    """Messages on their way to one client. News of jobs that ended together go together.

    A quiet client gets no replies to its steps, and ends of jobs up to QUIET_DELAY_S late: each
    message costs the engine's process more than the daemon's.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._unsent: deque[pb.SessionResponse] = deque()
        self._sizes: deque[int] = deque()  # of those, nearly; encoded
        self._unsent_bytes = 0  # in all
        self._held: list[pb.JobEnded] | None = None  # None: none is held back
        self._late: pb.JobsEnded | None = None  # to be queued at the delay's end
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self.overflowed = asyncio.Event()

    def put(self, message: pb.SessionResponse) -> None:
        """Queue a message; past MAX_UNSENT_MESSAGES or _BYTES the client is taken for dead."""
        if len(self._unsent) >= MAX_UNSENT_MESSAGES or self._unsent_bytes >= MAX_UNSENT_BYTES:
            self.overflowed.set()
        else:
            self._unsent.append(message)
            self._sizes.append(message.ByteSize())
            self._unsent_bytes += self._sizes[-1]
        self._news.set()

    def put_reply(self, reply: pb.StepReply) -> None:
        """Queue the verdicts on a step's jobs; a job that is refused is told as ended, too."""
        if not self._quiet:
            self.put(pb.SessionResponse(step=reply))

    def put_ended(self, ended: pb.JobEnded) -> None:
        """Queue the end of a job, with those that wait already."""
        if self._held is not None:
            self._held.append(ended)
        elif self._quiet:
            self._put_late(ended)
        else:
            self._put_with_others(ended)

    def _put_late(self, ended: pb.JobEnded) -> None:
        if self._late is None:
            self._late = pb.JobsEnded()
            self._timer = asyncio.get_running_loop().call_later(QUIET_DELAY_S, self._end_delay)
        self._late.jobs.append(ended)
        if len(self._late.jobs) >= JOBS_PER_MESSAGE:
            self._end_delay()

    def _end_delay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._late is not None:
            late, self._late = self._late, None
            self.put(pb.SessionResponse(jobs_ended=late))

    def _put_with_others(self, ended: pb.JobEnded) -> None:
        last = self._unsent[-1] if self._unsent else None
        if (
            last is not None
            and last.WhichOneof("kind") == "jobs_ended"
            and len(last.jobs_ended.jobs) < JOBS_PER_MESSAGE
        ):
            last.jobs_ended.jobs.append(ended)
            more = ended.ByteSize()  # all of them anew would take too long
            self._sizes[-1] += more
            self._unsent_bytes += more
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
                message = self._unsent.popleft()
                self._unsent_bytes -= self._sizes.popleft()
                await context.write(message)
                del message  # the next may be long in coming
