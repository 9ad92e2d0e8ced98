"""The client's threads on virtual time: only one runs at a time, and each waits as the loop says.

They are real threads that hand one baton on. So the client's own code runs as it is, and a seed
still says all that happens.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Self, cast

from tests.simulation.whole.loop import SimLoop

Ready = Callable[[], bool]
LONGEST_HELD_S = 60.0
LEAST_S = 1e-6  # that sleeping takes, however little is left


class ProcessGone(BaseException):
    """The process of the thread has ended: no handler of its own sees this."""


class SimThread:
    """In the place of threading.Thread."""

    def __init__(
        self,
        threads: Threads,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self._threads = threads
        self._target = partial(target, *args)
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._ready: Ready | None = None  # what it waits for
        self._is_killed = self._has_ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"sim {name}", daemon=True)
        self.process = threads.process
        threads.all.append(self)

    def start(self) -> None:
        self._threads.loop.outside(0.0, self._begin)

    def _begin(self) -> None:
        if not self._is_killed:
            self._thread.start()
            self._let_run()

    def _run(self) -> None:
        self._go.acquire()
        asyncio._set_running_loop(cast(Any, self._threads.loop))  # of this thread, too
        try:
            if not self._is_killed:
                self._target()
        except ProcessGone:
            pass
        except BaseException as error:  # noqa: BLE001 - the loop's thread raises it
            self._error = error
        self._has_ended = True
        self._threads.news()
        self._back.release()

    def _let_run(self) -> None:
        """From the loop's thread: until the thread waits again, or ends."""
        threads = self._threads
        before, threads.current = threads.current, self
        process, threads.process = threads.process, self.process
        self._go.release()
        self._back.acquire()
        threads.current, threads.process = before, process
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_until(self, ready: Ready, timeout_s: float | None) -> bool:
        """From within the thread. Whether it is so, before the time is over."""
        if self._is_killed:
            raise ProcessGone  # on its way out it waits for nothing
        loop = self._threads.loop
        deadline = None if timeout_s is None else loop.now + timeout_s
        if deadline is not None:
            loop.outside(max(0.0, deadline - loop.now), self.look)
        while not ready():
            if deadline is not None and loop.now >= deadline:
                return False
            self._ready = ready if deadline is None else lambda: ready() or loop.now >= deadline
            self._back.release()
            self._go.acquire()
            self._ready = None
            if self._is_killed:
                raise ProcessGone
        return True

    def look(self) -> None:
        """Something has changed: it goes on where that is what it waits for."""
        if self._ready is not None and self._ready():
            self._let_run()

    def is_alive(self) -> bool:
        return not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        self._threads.wait_until(lambda: self._has_ended, timeout)

    def kill(self) -> None:
        """Its process has ended."""
        self._is_killed = True
        if self._thread.ident is not None:
            if not self._has_ended:
                self._let_run()
            self._thread.join()


class Event:
    """In the place of threading.Event."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._threads.news()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._threads.wait_until(self.is_set, timeout)


class Lock:
    """In the place of threading.Lock, where whoever holds it waits for something else."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_held = False

    def __enter__(self) -> bool:
        has_come = self._threads.wait_until(lambda: not self._is_held, LONGEST_HELD_S)
        assert has_come, "a lock is held for ever"
        self._is_held = True
        return True

    def __exit__(self, *_error: object) -> None:
        self._is_held = False
        self._threads.news()


class Condition:
    """In the place of threading.Condition. Nobody is interrupted, so nothing is locked."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def wait_for(self, predicate: Ready, timeout: float | None = None) -> bool:
        return self._threads.wait_until(predicate, timeout)

    def notify_all(self) -> None:
        self._threads.news()


class Queue:
    """In the place of queue.SimpleQueue."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._threads.news()

    def get(self) -> Any:
        self._threads.wait_until(lambda: bool(self._items), None)
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class Timer:
    """In the place of threading.Timer."""

    def __init__(self, threads: Threads, interval: float, function: Callable[[], Any]) -> None:
        self.daemon = True
        self._threads, self._interval, self._function = threads, interval, function
        self._call: Any = None

    def start(self) -> None:
        self._call = self._threads.loop.outside(self._interval, self._function)

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


class Threads:
    """Of one world. What the client asks of time and threads comes here.

    `pass_time` lets the world go on for so many seconds, or until something is so. `process` is
    the one that runs: threads that begin meanwhile are its own.
    """

    def __init__(self, loop: SimLoop, pass_time: Callable[[float, Ready], None]) -> None:
        self.loop = loop
        self.current: SimThread | None = None
        self.process = ""
        self.all: list[SimThread] = []
        self.has_passed: Callable[[], None] = lambda: None  # after each wait of an engine's own
        self._pass_time = pass_time
        self._is_told = False

    def wait_until(self, ready: Ready, timeout_s: float | None) -> bool:
        """From the engine's own thread time passes; another one hands on the baton."""
        if self.current is not None:
            return self.current.wait_until(ready, timeout_s)
        assert timeout_s is not None, "the engine's own thread would wait for ever"
        if not ready():
            self._pass_time(timeout_s, ready)
            self.has_passed()
        return ready()

    def news(self) -> None:
        """Something has changed: those that wait look again, a moment later."""
        if not self._is_told:
            self._is_told = True
            self.loop.outside(0.0, self._look)

    def _look(self) -> None:
        self._is_told = False
        self.all = [each for each in self.all if each.is_alive()]
        for each in list(self.all):
            each.look()

    def end(self, process: str) -> None:
        """That process is gone."""
        for each in [each for each in self.all if each.process == process]:
            self.all.remove(each)
            each.kill()

    def end_all(self) -> None:
        """The world's end."""
        for process in sorted({each.process for each in self.all}):
            self.end(process)

    def as_threading(self) -> Any:
        """In the place of the module `threading`."""

        def made(what: Any) -> Any:
            return lambda *args, **named: what(self, *args, **named)

        return SimpleNamespace(
            Thread=made(SimThread),
            Event=made(Event),
            Condition=made(Condition),
            Timer=made(Timer),
            Lock=nullcontext,  # nobody is interrupted
        )

    def as_time(self) -> Any:
        """In the place of the module `time`."""

        def sleep(seconds: float) -> None:
            self.wait_until(lambda: False, max(seconds, LEAST_S))

        return SimpleNamespace(monotonic=lambda: self.loop.now, sleep=sleep)
