"""Turns of the event loop for work that is cut into pieces, so that small calls get on between.

However many large calls there are, one piece of all of them is done at a time, with some turns of
the loop for everybody else behind it. Users take turns, and so do the calls of one user: who has
many large calls waits for himself. What movers and tiers say has every other turn: were it done
beside the pieces, a small call would wait for both.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Hashable

from kvd.core.in_turn import InTurn

# Turns of the event loop left to others after a piece. A small call needs about five from its
# first byte to its answer; were each of them as long as a piece, it would wait for five pieces.
TURNS_BETWEEN_PIECES = 4
UNITS_AT_ONCE = 64  # done by one call without letting others in: some tenths of a millisecond


class FairQueue:
    """Lets users take turns at long work, one piece at a time. Lives on one event loop."""

    def __init__(self) -> None:
        self._waiting: InTurn[Hashable, asyncio.Future[None]] = InTurn()
        self._unasked: deque[Callable[[], None]] = deque()
        self._was_unasked = False  # what was done last
        self._turning = False

    async def let_others_in(self, user: Hashable = None) -> None:
        """Leave some turns of the event loop to other calls; then wait for this user's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(user, [turn])
        self._begin(TURNS_BETWEEN_PIECES - 1)
        await turn

    def do_in_turn(self, work: Callable[[], None]) -> None:
        """Do what no call waits for: soon, in the order of asking, and alone in its turn."""
        self._unasked.append(work)
        self._begin(0)

    def _begin(self, after: int) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn, after)

    def _turn(self, left: int) -> None:
        # Also to those whom the loop doesn't know: gRPC's threads, and clients of this machine.
        os.sched_yield()
        loop = asyncio.get_running_loop()
        if left:
            loop.call_soon(self._turn, left - 1)
        elif self._waiting or self._unasked:
            loop.call_soon(self._turn, TURNS_BETWEEN_PIECES - 1)
            self._do_next()
        else:
            self._turning = False

    def _do_next(self) -> None:
        self._was_unasked = bool(self._unasked) and not (self._waiting and self._was_unasked)
        if self._was_unasked:
            self._unasked.popleft()()
            return
        while (taken := self._waiting.take()) is not None:
            _, turn = taken
            if not turn.done():  # its call has not given up
                turn.set_result(None)
                break


class EndsInTurn:
    """Ends of clients, one at a time with turns of the loop between them; users take turns.

    Each takes a millisecond or two, and with a process all that it had open ends at once. What else
    of a client's would take as long is done likewise.
    """

    def __init__(self, turns: FairQueue) -> None:
        self._turns = turns
        self._waiting: InTurn[Hashable, Callable[[], None]] = InTurn()

    def put(self, user: Hashable, end: Callable[[], None]) -> None:
        """Have something of this user's ended soon."""
        if not self._waiting:
            self._turns.do_in_turn(self._end_next)
        self._waiting.add(user, [end])

    def _end_next(self) -> None:
        taken = self._waiting.take()
        assert taken is not None, "its turn was asked for"
        _, end = taken
        if self._waiting:
            self._turns.do_in_turn(self._end_next)  # behind what others have to say
        end()


class Pace:
    """Lets others in when one call has done much without a pause.

    Units are small: about the time in which a run of keys is looked at, some microseconds.
    """

    def __init__(self, turns: FairQueue, user: Hashable) -> None:
        self._turns = turns
        self._user = user
        self._done = 0

    async def spend(self, units: int) -> None:
        """Note work that was done, or is done next."""
        self._done += units
        if self._done >= UNITS_AT_ONCE:
            self._done = 0
            await self._turns.let_others_in(self._user)
