"""Who may start a process now: a start keeps a processor busy, and all others wait beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator

# Each takes half a second of a processor, more on a GPU, from control and from movers that copy.
MAX_STARTS_OF_USER = 4  # at least: a machine of many processors takes more
PROCESSORS_A_START = 8
USERS_AT_ONCE = 2
# By then it has done what takes a processor, or waits for what may never come, as a file's server.
MAX_START_HELD_S = 5.0


class StartsInTurn:
    """Lets a few start at once; users who wait take turns. Lives on one event loop."""

    def __init__(self, processors: int | None = None) -> None:
        if processors is None:
            processors = len(os.sched_getaffinity(0))
        self.most_of_user = max(MAX_STARTS_OF_USER, processors // PROCESSORS_A_START)
        self.most = USERS_AT_ONCE * self.most_of_user
        self._starting: Counter[int] = Counter()  # by user
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def hold(self, user: int) -> AsyncIterator[None]:
        """Be one of those that start while in the block, for MAX_START_HELD_S at most; waits for
        it."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        self._go_on()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._end(user)
            else:
                self._leave(user, turn)
                self._go_on()
            raise
        counts = True

        def end() -> None:
            nonlocal counts
            if counts:
                counts = False
                self._end(user)

        late = loop.call_later(MAX_START_HELD_S, end)
        try:
            yield
        finally:
            late.cancel()
            end()

    def _end(self, user: int) -> None:
        self._starting[user] -= 1
        if not self._starting[user]:
            del self._starting[user]
        self._go_on()

    def _leave(self, user: int, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(user)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[user]

    def _go_on(self) -> None:
        while self._starting.total() < self.most:
            # Who has fewest; of several who has waited for longest.
            user = min(self._waiting, key=self._starting.__getitem__, default=None)
            if user is None or self._starting[user] >= self.most_of_user:
                return
            line = self._waiting[user]
            turn = line.popleft()
            self._waiting.move_to_end(user)
            if not line:
                del self._waiting[user]
            if not turn.done():  # else whoever waited was given up
                self._starting[user] += 1
                turn.set_result(None)
