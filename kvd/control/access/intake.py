"""What a user may have the daemon take in and hold at a time, in messages.

A message that is read takes many times its own bytes, and one that stops half-way keeps what has
come. So the first messages of a user's calls are taken in a few at a time, and of its large
messages so many are read and worked off at once as make up one of the largest. Who sends more waits
for himself. A call that waits holds something too, so there may be so many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass, field

from kvd.core.shares import Bound, Shares
from kvd_proto.limits import MAX_MESSAGE_BYTES

FIRST_AT_ONCE = 4  # first messages of calls that are taken in at once, of one user
BYTES_AT_ONCE = MAX_MESSAGE_BYTES  # of large messages that are read and worked off, of one user
TAKE_IN_SECONDS = 10.0  # for the first message of a call to come whole
LARGE_BYTES = 16 * 1024  # smaller ones count for nothing
# Of health and reflection, which need no hello:
SMALL_BYTES = 4096  # of one message
SMALL_SECONDS = 0.1  # for it to come whole
SMALL_LATE_AT_ONCE = 16  # messages that may take longer, of all
SMALL_LATE_SECONDS = 1.0  # for such a one
MAX_CALLS = 4096  # under way, sessions and event watchers among them
MAX_CALLS_OF_A_USER = 1024
CALLS_FOR_OPERATORS = 64


@dataclass(slots=True)
class _Room:
    """So much of a user's share is left; who wants some stands in line."""

    left: int
    line: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class Share:
    """A number of units for each user. Lives on one event loop."""

    def __init__(self, each: int) -> None:
        self.each = each
        self._rooms: dict[Hashable, _Room] = {}

    def __len__(self) -> int:
        """Users who hold or want some."""
        return len(self._rooms)

    def is_taken(self, user: Hashable) -> bool:
        """Whether the user has to wait for the next unit."""
        room = self._rooms.get(user)
        return room is not None and (bool(room.line) or room.left < 1)

    @contextlib.asynccontextmanager
    async def hold(self, user: Hashable, units: int) -> AsyncIterator[None]:
        """Hold so many while in the block, all of the share at most; waits in line for them."""
        units = min(units, self.each)
        room = self._rooms.setdefault(user, _Room(self.each))
        if room.line or room.left < units:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            room.line.append((units, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_back(user, room, units)
                else:
                    self._give_back(user, room, 0)
                raise
        else:
            room.left -= units
        try:
            yield
        finally:
            self._give_back(user, room, units)

    def _give_back(self, user: Hashable, room: _Room, units: int) -> None:
        room.left += units
        while room.line:
            wanted, turn = room.line[0]
            if not turn.done():
                if wanted > room.left:
                    return
                room.left -= wanted
                turn.set_result(None)
            room.line.popleft()
        if room.left == self.each and self._rooms.get(user) is room:
            del self._rooms[user]


class SmallMessages:
    """How long messages may take to come that anyone may send: none waits for another one."""

    def __init__(self) -> None:
        self._late = 0

    @contextlib.asynccontextmanager
    async def coming(self) -> AsyncIterator[None]:
        """While one comes. TimeoutError after SMALL_SECONDS; with a place among those that may be
        late, after SMALL_LATE_SECONDS more."""
        loop = asyncio.get_running_loop()
        has_place = False

        def take_place() -> None:
            nonlocal has_place
            if self._late < SMALL_LATE_AT_ONCE:
                self._late += 1
                has_place = True
                bound.reschedule(loop.time() + SMALL_LATE_SECONDS)

        async with asyncio.timeout(SMALL_SECONDS) as bound:
            asking = loop.call_later(SMALL_SECONDS / 2, take_place)
            try:
                yield
            finally:
                asking.cancel()
                self._late -= has_place


class Intake:
    """What each user's calls may take: their number, their first messages and large messages.

    And what calls of health and reflection may, of all together.
    """

    def __init__(self) -> None:
        self.calls = Shares(
            Bound("calls under way", MAX_CALLS, MAX_CALLS_OF_A_USER, CALLS_FOR_OPERATORS)
        )
        self.first = Share(FIRST_AT_ONCE)
        self.large = Share(BYTES_AT_ONCE)
        self.small = SmallMessages()

    def for_message(
        self, user: Hashable, size: int
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Held while a message of so many bytes is read and worked off."""
        if size <= LARGE_BYTES:
            return contextlib.nullcontext()
        return self.large.hold(user, size)
