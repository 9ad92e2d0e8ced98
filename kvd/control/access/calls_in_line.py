"""Calls of users who send more than others can wait for: they stand in lines of their own.

gRPC hands the calls of a method over one at a time, in the order in which they came, whoever sent
them; and each that is answered lets who sent it send the next. Were all taken up as they come, a
user who keeps some hundred connections full would stand before everybody else's next call for as
long as all of his take. A call that waits here has left gRPC's line, and stands in nobody's way.

One that is given up while it waits would let who sent it send the next at once. So it ends only
after a while, the longer the more of his do: until then its stream counts as one of its connection,
which may have few, and gRPC itself refuses what is more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Hashable

log = logging.getLogger(__name__)

CALLS_A_SECOND = 1000  # of one user are taken up as they come, and of all who wait together
CALLS_AT_ONCE = 128  # of one user, that come together, are taken up as they come
GIVEN_UP_A_SECOND = 250  # of one user end, of those given up while they waited
MAX_GIVEN_UP = 3584  # of one user, that have yet to end; more end at once
CLOSED_A_SECOND = 1000  # end, of one who closed their connections and can't connect
CLOSED_SECONDS = 5.0  # for so long after that is known
LOG_SECONDS = 10.0  # between two lines of the log
MIN_REMEMBERED = 64  # users whose calls are remembered until their time is over
_MOST_AT_A_LOOK = 4  # calls let go together where the loop was late


class CallsInLine:
    """Lets a user's calls go on: at once, or in his turn. Lives on one event loop.

    As they come by the generic cell rate algorithm, a leaky bucket; a user who has a line waits
    behind it. The lines' oldest calls go on at an even pace, and users take turns. A call that is
    given up while it waits takes no turn.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._due_s: dict[Hashable, float] = {}  # when the time of a user's calls so far is over
        self._most_remembered = 2 * MIN_REMEMBERED
        self._given_up: dict[Hashable, set[asyncio.Future[None]]] = {}  # that have yet to end
        self._closed_until_s: dict[Hashable, float] = {}
        self._is_over = False
        self._looked_s = 0.0
        self._logged_s = -LOG_SECONDS

    def __len__(self) -> int:
        """Users whose calls are remembered or wait."""
        return len(self._due_s.keys() | self._lines.keys() | self._given_up.keys())

    def must_wait(self, user: Hashable) -> bool:
        """Note a call that came now: whether it has to wait in its user's line."""
        if user in self._lines or user in self._given_up:
            return True
        now = time.monotonic()
        due = max(self._due_s.get(user, 0.0), now)
        if round((due - now) * CALLS_A_SECOND) >= CALLS_AT_ONCE:
            return True
        self._due_s[user] = due + 1 / CALLS_A_SECOND
        if len(self._due_s) > self._most_remembered:
            self._due_s = {each: at for each, at in self._due_s.items() if at > now}
            self._most_remembered = 2 * max(len(self._due_s), MIN_REMEMBERED)
        return False

    async def wait(self, user: Hashable) -> None:
        """Wait behind the calls of this user that wait already, in turns with other users.

        Where it is given up meanwhile, the cancellation comes on after a while.
        """
        turn = asyncio.get_running_loop().create_future()
        if not self._lines:
            self._looked_s = time.monotonic()
            self._look_later()
        if user not in self._lines:
            self._log(user)
        self._lines.setdefault(user, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            await self._end_slowly(user)
            raise

    async def _end_slowly(self, user: Hashable) -> None:
        mine = self._given_up.setdefault(user, set())
        end = asyncio.get_running_loop().create_future()
        if self._is_over or len(mine) >= MAX_GIVEN_UP:
            end.set_result(None)
        mine.add(end)
        closed = time.monotonic() < self._closed_until_s.get(user, 0.0)
        a_second = CLOSED_A_SECOND if closed else GIVEN_UP_A_SECOND
        timer = end.get_loop().call_later(len(mine) / a_second, _let_end, end)
        try:
            await end
        finally:
            timer.cancel()
            mine.discard(end)
            if not mine:
                del self._given_up[user]

    def connections_closed(self, user: Hashable) -> None:
        """This user closed the connections of many calls, and can't connect for a while.

        They hold nobody back then, and only take memory. So what he gave up ends sooner, and for a
        few seconds what he still gives up.
        """
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        self._closed_until_s = {u: at for u, at in self._closed_until_s.items() if at > now}
        self._closed_until_s[user] = now + CLOSED_SECONDS
        for number, end in enumerate(self._given_up.get(user, ()), 1):
            loop.call_later(number / CLOSED_A_SECOND, _let_end, end)

    def close(self) -> None:
        """Let all that were given up end now, and each that still will be."""
        self._is_over = True
        for each in self._given_up.values():
            for end in each:
                _let_end(end)

    def _log(self, user: Hashable) -> None:
        if time.monotonic() > self._logged_s + LOG_SECONDS:
            self._logged_s = time.monotonic()
            who = "who has not said hello" if user is None else f"uid {user}"
            log.warning("%s sends more than %d calls a second: they wait", who, CALLS_A_SECOND)

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(1 / CALLS_A_SECOND, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        due = int((now - self._looked_s) * CALLS_A_SECOND)
        if due >= _MOST_AT_A_LOOK:  # the loop was busy: what it missed is not made up for
            due, self._looked_s = _MOST_AT_A_LOOK, now
        else:
            self._looked_s += due / CALLS_A_SECOND
        while due and self._lines:
            due -= self._let_go()
        if self._lines:
            self._look_later()

    def _let_go(self) -> bool:
        """Let the next user's oldest call go on; False where all of them were given up."""
        user, line = self._lines.popitem(last=False)
        while line:
            turn = line.popleft()
            if not turn.done():
                turn.set_result(None)
                if line:
                    self._lines[user] = line  # behind the other users
                return True
        return False


def _let_end(end: asyncio.Future[None]) -> None:
    if not end.done():
        end.set_result(None)
