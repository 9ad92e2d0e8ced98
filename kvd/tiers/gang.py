"""Threads that do the pieces of a store's call at once."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvd.core.in_turn import InTurn
from kvd.tiers.store import TierError, TierReason

log = logging.getLogger(__name__)

PATIENT_TURN = 4  # one piece of so many is a patient call's, where others wait, too
Work = Callable[[], None]


def require_time(deadline: float) -> None:
    """TierError where the deadline has passed."""
    if time.monotonic() >= deadline:
        raise TierError("the deadline passed", TierReason.TIMEOUT)


class _Count:
    """Pieces of one call that have not ended; who may add some counts as one."""

    def __init__(self, *, is_patient: bool) -> None:
        self.is_patient = is_patient
        self._lock = threading.Lock()
        self._left = 1
        self._ended = threading.Event()
        self.broken = ""

    def up(self, count: int) -> None:
        with self._lock:
            self._left += count

    def down(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._ended.set()

    def wait(self) -> None:
        self._ended.wait()


class _Turns:
    """Pieces that no thread has begun: of each call one in turn, so that a question of a few does
    not wait for a read of thousands. Those of patient calls give way, but for one in some."""

    def __init__(self) -> None:
        self._calls: InTurn[_Count, Work] = InTurn()
        self._patient: InTurn[_Count, Work] = InTurn()
        self._gave_way = 0  # times in a row
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, works: Sequence[Work], call: _Count) -> None:
        if works:
            with self._changed:
                calls = self._patient if call.is_patient else self._calls
                calls.add(call, works)
                self._changed.notify(len(works))

    def take(self) -> tuple[_Count, Work] | None:
        """Wait for the next piece. None: closed, and none is left."""
        with self._changed:
            while (taken := self._whose_turn().take()) is None:
                if self._is_closed:
                    return None
                self._changed.wait()
            return taken

    def _whose_turn(self) -> InTurn[_Count, Work]:
        """The calls of which one has the next piece."""
        must_give_way = bool(self._calls) and self._gave_way < PATIENT_TURN - 1
        if not self._patient or must_give_way:
            self._gave_way += bool(self._patient)
            return self._calls
        self._gave_way = 0
        return self._patient

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Flow:
    """Pieces of one call. Each may add others, and who opened it may, until all have ended."""

    def __init__(self, put: Callable[[Sequence[Work], _Count], None], *, is_patient: bool) -> None:
        self._put = put
        self._count = _Count(is_patient=is_patient)

    def add(self, works: Sequence[Work]) -> None:
        """Have these done, in their turn."""
        self._count.up(len(works))
        self._put(works, self._count)

    def wait(self) -> None:
        """Return when all have ended. A piece that raises breaks an assertion."""
        self._count.down()
        self._count.wait()
        assert not self._count.broken, self._count.broken


class Gang:
    """Some threads that take pieces of work, of each call in turn. Any thread may call.

    When `do` or `flow` has ended, no thread holds on to anything of the pieces any more: they have
    views of memory that is only lent. Of a patient call, for which no request waits, pieces give
    way to those of others.
    """

    def __init__(self, name: str, count: int) -> None:
        self._turns = _Turns()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, works: Sequence[Work], *, is_patient: bool = False) -> None:
        """Have all done; returns when all have ended. A piece that raises breaks an assertion."""
        if works:
            with self.flow(is_patient=is_patient) as flow:
                flow.add(works)

    @contextlib.contextmanager
    def flow(self, *, is_patient: bool = False) -> Iterator[Flow]:
        """Pieces that are added meanwhile; ends when all have ended."""
        flow = Flow(self._turns.put, is_patient=is_patient)
        try:
            yield flow
        finally:
            flow.wait()

    def close(self) -> None:
        """End the threads, once what is under way has ended."""
        self._turns.close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (given := self._turns.take()) is not None:
            count, work = given
            given = None
            try:
                work()
            except BaseException as error:  # SystemExit would end the thread, and the call never
                log.exception("a piece of a tier's call broke")
                count.broken = f"a piece of a call broke: {error!r}"
            del work
            count.down()
            del count
