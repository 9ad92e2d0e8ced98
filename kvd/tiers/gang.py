"""Threads that do the pieces of a store's call at once."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvd.tiers.store import TierError, TierReason

log = logging.getLogger(__name__)

Work = Callable[[], None]


def require_time(deadline: float) -> None:
    """TierError where the deadline has passed."""
    if time.monotonic() >= deadline:
        raise TierError("the deadline passed", TierReason.TIMEOUT)


class _Count:
    """Pieces of one call that have not ended; who may add some counts as one."""

    def __init__(self) -> None:
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


class Flow:
    """Pieces of one call. Each may add others, and who opened it may, until all have ended."""

    def __init__(self, put: Callable[[tuple[Work, _Count]], None]) -> None:
        self._put = put
        self._count = _Count()

    def add(self, works: Sequence[Work]) -> None:
        """Have these done, in their turn."""
        self._count.up(len(works))
        for work in works:
            self._put((work, self._count))

    def wait(self) -> None:
        """Return when all have ended. A piece that raises breaks an assertion."""
        self._count.down()
        self._count.wait()
        assert not self._count.broken, self._count.broken


class Gang:
    """Some threads that take pieces of work in turn. Any thread may call.

    When `do` or `flow` has ended, no thread holds on to anything of the pieces any more: they have
    views of memory that is only lent.
    """

    def __init__(self, name: str, count: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, _Count] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, works: Sequence[Work]) -> None:
        """Have all done; returns when all have ended. A piece that raises breaks an assertion."""
        if works:
            with self.flow() as flow:
                flow.add(works)

    @contextlib.contextmanager
    def flow(self) -> Iterator[Flow]:
        """Pieces that are added meanwhile; ends when all have ended."""
        flow = Flow(self._queue.put)
        try:
            yield flow
        finally:
            flow.wait()

    def close(self) -> None:
        """End the threads, once what is under way has ended."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            work, count = given
            given = None
            try:
                work()
            except Exception as error:
                log.exception("a piece of a tier's call broke")
                count.broken = f"a piece of a call broke: {error!r}"
            del work
            count.down()
            del count
