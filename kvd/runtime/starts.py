"""Who may start a process now: a start keeps a processor busy, and all others wait beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator

# Each takes half a second of a processor, more on a GPU, from control and from movers that copy.
MAX_STARTS = 8
MAX_STARTS_OF_USER = 4


class StartsInTurn:
    """Lets a few start at once; users who wait take turns. Lives on one event loop."""

    def __init__(self) -> None:
        self._starting: Counter[int] = Counter()  # by user
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def hold(self, user: int) -> AsyncIterator[None]:
        """Be one of those that start while in the block; waits for it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        self._go_on()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._starting[user] -= 1
                if not self._starting[user]:
                    del self._starting[user]
            else:
                self._leave(user, turn)
            self._go_on()

    def _leave(self, user: int, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(user)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[user]

    def _go_on(self) -> None:
        while self._starting.total() < MAX_STARTS:
            # Who has fewest; of several who has waited for longest.
            user = min(self._waiting, key=self._starting.__getitem__, default=None)
            if user is None or self._starting[user] >= MAX_STARTS_OF_USER:
                return
            line = self._waiting[user]
            turn = line.popleft()
            self._waiting.move_to_end(user)
            if not line:
                del self._waiting[user]
            if not turn.done():  # else whoever waited was given up
                self._starting[user] += 1
                turn.set_result(None)
