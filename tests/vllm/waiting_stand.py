"""A stand that counts how often vLLM's scheduler thread waits for something in a step.

Run in a process of its own. Every way to wait that Python code has is counted where it ends up:
conditions (and with them events, futures, joins), locks of gRPC's unary calls, sleeping. kvd's own
counter is kept beside it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from grpc import _channel

from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

REQUESTS = 64
DECODERS = 16
BLOCK_TOKENS = 16
LENGTH = 10 * BLOCK_TOKENS
LOAD_DEADLINE_SECONDS = 3.0
OPTIONS = StandOptions(num_blocks=2048, step_tokens=REQUESTS * (LENGTH + BLOCK_TOKENS))


class WaitingStand(Stand):
    """Counts waits of the three calls that vLLM's loop makes of its scheduler."""

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        self.waits: list[int] = []  # by step; the arrivals before it are part of it
        self._counting = False
        self._now = 0
        super().__init__(model, transfer, OPTIONS)

    @contextlib.contextmanager
    def _timed(self, kind: list[float]) -> Iterator[None]:
        self._counting = True
        with super()._timed(kind):
            yield
        self._counting = False

    def step(self) -> None:
        super().step()
        self.waits.append(self._now)
        self._now = 0

    def take_waits(self) -> list[int]:
        waits, self.waits = self.waits, []
        return waits

    def count(self, owner: Any, name: str) -> None:
        """Count calls of a method that waits; what it calls itself is part of it."""
        original = getattr(owner, name)
        scheduler_thread = threading.get_ident()

        def counted(*arguments: Any, **named: Any) -> Any:
            if not self._counting or threading.get_ident() != scheduler_thread:
                return original(*arguments, **named)
            self._now += 1
            self._counting = False
            try:
                return original(*arguments, **named)
            finally:
                self._counting = True

        setattr(owner, name, counted)


def serve(orders: Connection, socket: str, daemon_pid: int) -> None:
    """Run the case that is asked for, until none is; a case's answer is sent back."""
    options = {"offload_prompt_only": False, "load_deadline_s": LOAD_DEADLINE_SECONDS}
    with stand_with_kvd(WaitingStand, socket, **options) as (stand, connection):
        for owner, name in WAYS_TO_WAIT:
            stand.count(owner, name)
        while (case := orders.recv()) is not None:
            orders.send(CASES[case](stand, connection, daemon_pid))


WAYS_TO_WAIT = (
    (threading.Condition, "wait_for"),
    (threading.Condition, "wait"),
    (threading.Thread, "join"),
    (time, "sleep"),
    (_channel._UnaryUnaryMultiCallable, "__call__"),
    (_channel._UnaryUnaryMultiCallable, "with_call"),
)


def arrive(stand: Stand, case: str) -> None:
    for number in range(REQUESTS):
        name = f"{case}-{number}"
        stand.add(stand.request(name, prompt(f"few calls {number}", LENGTH), max_tokens=3))


def run(stand: WaitingStand, connection: Any, _: int) -> dict[str, Any]:
    """All requests at once, from arrival to rest."""
    before = connection.blocking_calls
    arrive(stand, f"run-{before}-{time.monotonic()}")
    stand.drain()
    taken = stand.take()
    stand.forget_device()
    return {
        "waits": stand.take_waits(),
        "counted_by_kvd": connection.blocking_calls - before,
        "cached": sorted(taken.cached_tokens.values()),
        "stores": sum(taken.storing_steps.values()),
        "loads": taken.load_jobs,
    }


def run_unseen(stand: WaitingStand, _connection: Any, _pid: int) -> dict[str, Any]:
    """One prompt that nobody has seen."""
    name = f"unseen {time.monotonic()}"
    stand.add(stand.request(name, prompt(name, LENGTH), max_tokens=2))
    stand.drain()
    stand.take()
    stand.forget_device()
    stand.take_waits()
    return {}


def run_unanswered(stand: WaitingStand, connection: Any, daemon_pid: int) -> dict[str, Any]:
    """The same with a daemon that answers nothing in the first step, and was long not heard of."""
    os.kill(daemon_pid, signal.SIGSTOP)
    connection.is_prompt = lambda *_: False
    try:
        before = connection.blocking_calls
        arrive(stand, "unanswered")
        stand.step()
        first = stand.take_waits()
        first_by_kvd = connection.blocking_calls - before
    finally:
        os.kill(daemon_pid, signal.SIGCONT)
    stand.drain()
    del connection.is_prompt
    taken = stand.take()
    stand.forget_device()
    return {
        "first_step": first,
        "first_by_kvd": first_by_kvd,
        "waits": stand.take_waits(),
        "cached": sorted(taken.cached_tokens.values()),
    }


def run_with_loads_held(stand: WaitingStand, connection: Any, daemon_pid: int) -> dict[str, Any]:
    """All that is asked is answered; then the daemon hangs and begins none of the loads."""
    arrive(stand, "held")
    calls = connection._lookups
    deadline = time.monotonic() + 30
    while calls.waits_for(range(calls._last_call_id + 1)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(daemon_pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        stand.drain()
        seconds = time.monotonic() - began
    finally:
        os.kill(daemon_pid, signal.SIGCONT)
    taken = stand.take()
    stand.forget_device()
    stand.take_waits()
    return {
        "steps": taken.steps,
        "seconds": seconds,
        "loads": taken.load_jobs,
        "computed": taken.computed_tokens,
    }


def decode_together(stand: WaitingStand, connection: Any, _: int) -> dict[str, Any]:
    """Requests that generate in step, and then come again with all that they generated."""
    names = [f"together-{number}" for number in range(DECODERS)]
    for name in names:
        stand.add(stand.request(name, prompt(name, BLOCK_TOKENS + 4), max_tokens=40))
    stand.step()
    requests = [stand.scheduler.requests[name] for name in names]
    stand.drain()
    stored = stand.take().storing_steps
    stand.forget_device()
    for request in requests:
        again = f"again-{request.request_id}"
        stand.add(stand.request(again, request.all_token_ids, max_tokens=1))
    stand.drain()
    taken = stand.take()
    stand.forget_device()
    stand.take_waits()
    return {
        "jobs_by_step": sorted(stored.values()),
        "cached": sorted(taken.cached_tokens.values()),
        "whole": [(len(r.all_token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for r in requests],
    }


CASES: dict[str, Callable[[WaitingStand, Any, int], dict[str, Any]]] = {
    "run": run,
    "unseen": run_unseen,
    "unanswered": run_unanswered,
    "decode": decode_together,
    "held": run_with_loads_held,
}
