"""An event loop without sockets or waiting: time jumps to what is due next.

What the daemon schedules is its own (`forget_daemon` drops it, as a kill does); what engines,
movers and the network do is scheduled by `outside`. It may be run from within what it runs outside
the daemon, which is how a client that blocks lets time pass.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Self, cast

BUSY_S = 0.002  # what others do within that may come before the daemon's next call
LONGEST_RUN = 200_000  # calls at one moment: something goes round and round


class Stuck(AssertionError):
    """Calls follow calls, and time does not pass."""


class Call:
    """Something to be called; may be cancelled."""

    __slots__ = ("args", "called", "cancelled_", "daemons", "when_")

    def __init__(self, called: Callable[..., Any], args: tuple[Any, ...], daemons: bool) -> None:
        self.called = called
        self.args = args
        self.daemons = daemons
        self.cancelled_ = False
        self.when_ = 0.0

    def cancel(self) -> None:
        self.cancelled_ = True

    def cancelled(self) -> bool:
        return self.cancelled_

    def when(self) -> float:
        return self.when_


class SimLoop:
    """Deterministic: what is due at one moment is called in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._number = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.jumps = 0
        self.stalled_until = 0.0  # the daemon's process is stopped until then
        self.after_call: Callable[[], None] = lambda: None  # of the daemon's
        self.is_busy: Callable[[], bool] = lambda: False  # the daemon's next call comes later

    # -- what asyncio asks for --------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def now_ns(self) -> int:
        """The virtual time as a kvd clock."""
        return int(self.now * 1e9)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        call = Call(callback, args, True)
        self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self._at(self.now + delay, Call(callback, args, True))

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self._at(when, Call(callback, args, True))

    def _at(self, when: float, call: Call) -> Call:
        self._number += 1
        call.when_ = when
        heapq.heappush(self._timers, (when, self._number, call))
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, coro: Coroutine[Any, Any, Any], **_named: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=cast(Any, self))
        self._tasks[task] = None
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed on, as an executor would
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Of a task that nobody waits for; `Driver` and the sessions report their own."""

    def _timer_handle_cancelled(self, handle: Any) -> None:
        pass

    # -- running ----------------------------------------------------------------------------

    def outside(self, delay: float, called: Callable[..., Any], *args: Any) -> Call:
        """Have something called that is none of the daemon's."""
        return self._at(self.now + delay, Call(called, args, False))

    def run_for(self, seconds: float) -> None:
        """Call all that is due until then."""
        self.run_until(self.now + seconds)

    def run_until(self, end: float, done: Callable[[], bool] | None = None) -> None:
        """The same until a time, or until `done` says so."""
        ready, timers = self._ready, self._timers
        calls = 0
        while True:
            while ready and not self.is_stalled:
                call = ready.popleft()
                if not call.cancelled_:
                    call.called(*call.args)
                    self.after_call()
                calls += 1
                if calls > LONGEST_RUN:
                    raise Stuck(
                        f"{LONGEST_RUN} calls without time passing; the last: {call.called}"
                    )
                if timers and timers[0][0] <= self.now + BUSY_S and self.is_busy():
                    break  # what others do meanwhile comes between two calls of the daemon's
            if done is not None and done():
                return
            if not timers or timers[0][0] > end:
                if ready and not self.is_stalled:
                    continue
                self.now = max(self.now, end)
                return
            when, _, call = heapq.heappop(timers)
            if when > self.now:
                self.now, calls = when, 0
            if call.cancelled_:
                continue
            if call.daemons and self.is_stalled:
                self._at(self.stalled_until, call)
            elif call.daemons:
                ready.append(call)
            else:
                call.called(*call.args)
                self.after_call()

    def jump(self, seconds: float) -> None:
        """Time passes while the daemon is stopped, and nobody calls anything."""
        self.jumps += 1
        self.now += seconds

    @property
    def is_stalled(self) -> bool:
        """Whether the daemon's process is stopped: nobody can hold it to a deadline now."""
        return self.now < self.stalled_until

    def stall(self, seconds: float) -> None:
        """Nothing that the daemon has scheduled happens meanwhile. Deadlines don't hold then."""
        self.jumps += 1
        self.stalled_until = self.now + seconds
        self.outside(seconds, lambda: None)

    def forget_daemon(self) -> None:
        """The daemon's process is gone, with all that it was about to do."""
        self.stalled_until = 0.0
        self._ready.clear()
        self._timers[:] = [each for each in self._timers if not each[2].daemons]
        heapq.heapify(self._timers)
        for task in list(self._tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.remove_done_callback(self._task_ended)
            coroutine = task.get_coro()
            with suppress(BaseException):
                coroutine.close()
        self._tasks.clear()
        self._ready.clear()

    def __enter__(self) -> Self:
        asyncio._set_running_loop(cast(Any, self))
        return self

    def __exit__(self, *_error: object) -> None:
        self.forget_daemon()
        asyncio._set_running_loop(None)

    def as_time_module(self) -> Any:
        """In the place of the module `time`, for code that asks it directly."""

        def monotonic() -> float:
            return self.now

        return SimpleNamespace(
            monotonic=monotonic,
            monotonic_ns=self.now_ns,
            perf_counter=monotonic,
            time=monotonic,
            sleep=self.run_for,
        )
