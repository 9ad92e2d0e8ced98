"""What the client's registrar asks of the system and of gRPC: descriptors, calls, a registration.

A descriptor is a number, and what makes it readable; a mover's death is seen where it is looked
for, as a pidfd shows it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc

from kvd.control.errors import STATUS_OF
from kvd.core.errors import KvdError
from kvd.core.keys import JobId
from kvd_client.worker.memory import GroupLayout, SharedMemory
from kvd_client.worker.rank_memory import RegisteredMemory
from kvd_client.worker.registration import Registration
from kvd_proto.board import BoardRecord
from tests.simulation.whole.client_threads import Ready, Threads
from tests.simulation.whole.daemon import Call, SimDaemon, SimPeer
from tests.simulation.whole.movers import SimMover

RING_FULL = 0.02  # of the times that a job is said to be ready
LONGEST_WAY_S = 0.001  # of a call or its answer
POLLIN = 1


class SimRpcError(grpc.RpcError):
    """How a call ended."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Descriptors:
    """Of one world: numbers that stand for descriptors, and whether each can be read."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._numbers = itertools.count(1 << 20)
        self._readable: dict[int, Ready] = {}
        self._written: set[int] = set()

    def make(self, readable: Ready) -> int:
        number = next(self._numbers)
        self._readable[number] = readable
        return number

    def _eventfd(self, _value: int, _flags: int) -> int:
        number = self.make(lambda: number in self._written)
        return number

    def _write(self, number: int, _value: int) -> None:
        self._written.add(number)
        self._threads.news()

    def close(self, number: int) -> None:
        del self._readable[number]

    def wait(self, numbers: Sequence[int], timeout_ms: float) -> list[tuple[int, int]]:
        """Those of them that can be read, once one can or the time is over."""

        def ready() -> list[int]:
            return [number for number in numbers if self._readable[number]()]

        self._threads.wait_until(lambda: bool(ready()), timeout_ms / 1000)
        return [(number, POLLIN) for number in ready()]

    def as_os(self) -> Any:
        """In the place of the module `os`."""
        return SimpleNamespace(
            eventfd=self._eventfd,
            eventfd_write=self._write,
            close=self.close,
            EFD_CLOEXEC=0,
            EFD_NONBLOCK=0,
        )

    def as_select(self) -> Any:
        """In the place of the module `select`."""
        return SimpleNamespace(poll=lambda: Poller(self), POLLIN=POLLIN)


class Poller:
    """In the place of select.poll's answer."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._numbers: list[int] = []

    def register(self, number: int, _events: int) -> None:
        self._numbers.append(number)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        return self._descriptors.wait(self._numbers, timeout_ms)


class SimRegistration(Registration):
    """The worker's end of a mover's ring and board. `channel` names the mover."""

    def __init__(
        self,
        threads: Threads,
        descriptors: Descriptors,
        registration_id: int,
        channel: tuple[SimMover, ...],
    ) -> None:
        self._is_dead = False
        self._threads, self._descriptors = threads, descriptors
        self.registration_id = registration_id
        self.process = channel[0]
        self.is_closed = self.is_broken = self.is_unwanted = False
        self.heard_s = threads.loop.now
        self.pidfd = descriptors.make(lambda: not self.process.is_alive)

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    @is_dead.setter
    def is_dead(self, is_dead: bool) -> None:
        alive = self.process.is_alive
        assert not (is_dead and alive), "a mover is taken for dead, and lives (I4)"
        self._is_dead = is_dead

    def mark_ready(self, job_ids: Sequence[int]) -> bool:
        if self.process.around.random.random() < RING_FULL:
            return False
        self.process.mark_ready(*map(JobId, job_ids))
        return True

    def abandon(self, job_id: int) -> None:
        self.process.abandoned.add(job_id)

    def take_ends(self, take: Callable[[list[BoardRecord]], None]) -> None:
        assert not self.is_closed, "a board is read that was closed"
        records = list(self.process.board)
        self.process.board.clear()
        if records:
            self.heard_s = self._threads.loop.now
            take(records)

    def wait_dead(self, timeout_s: float) -> bool:
        if not self.is_dead:
            self.is_dead = bool(self._descriptors.wait([self.pidfd], timeout_s * 1000))
        return self.is_dead

    def kill(self) -> None:
        self.is_unwanted = True
        self.process.kill()

    def close(self) -> None:
        assert self.is_dead, "a registration is closed while its mover may live"
        self.is_closed = True
        self._descriptors.close(self.pidfd)


class SimMemory(RegisteredMemory):
    """A rank's memory that is modelled: its descriptor is a number."""

    def close(self) -> None:
        pass


def take_memory(memories: Sequence[SharedMemory], groups: Sequence[GroupLayout]) -> SimMemory:
    """In the place of kvd_client.worker.rank_memory.take_memory."""
    return SimMemory(tuple(memories), tuple(groups))


class RankCall:
    """What gRPC gives for a call of WorkerService; made by a thread of the engine's.

    Whoever stops waiting for it has ended it: the daemon's handler is cancelled, as gRPC does it.
    """

    def __init__(
        self, threads: Threads, daemon: SimDaemon, begin: Callable[[Call], Any], call: Call
    ) -> None:
        self._threads, self._daemon, self._begin, self._call = threads, daemon, begin, call
        self._answer: Any = None
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._then: list[Callable[[RankCall], None]] = []
        self._deadline = 0.0

    def start(self, timeout_s: float) -> RankCall:
        loop = self._threads.loop
        self._deadline = loop.now + timeout_s
        loop.outside(self._way_s(), self._arrive)
        loop.outside(timeout_s, self._expire)
        self._daemon.when_gone.append(self._lost)
        return self

    def _way_s(self) -> float:
        return self._daemon.around.random.random() * LONGEST_WAY_S

    def _arrive(self) -> None:
        if self._daemon.is_gone:
            self._lost()
        elif not self._is_over:
            self._task = self._daemon.loop.create_task(self._begin(self._call))
            self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[Any]) -> None:
        """On the daemon's side."""
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._daemon.check_refusal(error)
            if not isinstance(error, KvdError):
                return
            code = STATUS_OF.get(error.reason, grpc.StatusCode.INTERNAL)
            self._threads.loop.outside(self._way_s(), self._end, SimRpcError(code, str(error)))
        else:
            self._threads.loop.outside(self._way_s(), self._end, None, task.result())

    def _end(self, error: Exception | None, answer: Any = None) -> None:
        if self._is_over:
            return
        self._error, self._answer = error, answer
        self._call.is_lost = error is not None
        for then in self._then:
            then(self)
        self._threads.news()

    def _lost(self) -> None:
        self._end(SimRpcError(grpc.StatusCode.UNAVAILABLE, "the connection is lost"))

    def _expire(self) -> None:
        if not self._is_over:
            self._stop(SimRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _stop(self, error: Exception) -> None:
        """The client's side has ended it."""
        self._end(error)
        if self._task is not None and not self._daemon.is_gone:
            self._task.cancel()

    @property
    def _is_over(self) -> bool:
        return self._error is not None or self._answer is not None

    # -- what the client asks for -----------------------------------------------------------

    def result(self) -> Any:
        left_s = self._deadline - self._threads.loop.now
        try:
            self._threads.wait_until(lambda: self._is_over, left_s + LONGEST_WAY_S)
        finally:
            if not self._is_over:  # the process has ended
                self._stop(grpc.FutureCancelledError())
        if self._error is not None:
            raise self._error
        return self._answer

    def cancel(self) -> None:
        if not self._is_over:
            self._stop(grpc.FutureCancelledError())

    def cancelled(self) -> bool:
        return isinstance(self._error, grpc.FutureCancelledError)

    def exception(self) -> Exception | None:
        return self._error

    def add_done_callback(self, then: Callable[[RankCall], None]) -> None:
        if self._is_over:
            then(self)
        else:
            self._then.append(then)


class Method:
    """One method of WorkerService, as a stub has it."""

    def __init__(
        self, threads: Threads, daemon: SimDaemon, peer: SimPeer, serve: Callable[..., Any]
    ) -> None:
        self._threads, self._daemon, self._peer, self._serve = threads, daemon, peer, serve

    def __call__(self, request: Any, timeout: float, metadata: object) -> Any:
        return self.future(request, timeout, metadata).result()

    def future(self, request: Any, timeout: float, metadata: object) -> RankCall:
        del metadata  # the call says who makes it
        call = RankCall(
            self._threads,
            self._daemon,
            lambda call: self._serve(request, call),
            Call(self._peer),
        )
        return call.start(timeout)
