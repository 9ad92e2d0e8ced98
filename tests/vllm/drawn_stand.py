"""Runs of vLLM's scheduler that a seed draws: arrivals, further input, aborts, resets.

Run in a process of its own. Prompts share their beginnings, so they meet on the device and in the
daemon; there are fewer blocks than requests want, so some are preempted.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm.v1.request import Request, RequestStatus

from tests.vllm.bytes_stand import BytesStand
from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import StandOptions
from tests.vllm.stand_process import stand_with_kvd

MOST_REQUESTS = 12
LONGEST = 400  # a request that would get more input than this ends
PATIENCE_SECONDS = 30.0
MOST_TRIES = 10
# Running requests begin anew, and the connector has nothing any more. While some load, or wait for
# more input, running ones can't.
RESETS = ((False, False), (False, True), (True, True), (True, True), (True, True))
LENGTHS = (16, 32, 33, 64, 80, 96, 97, 130, 200)
OPTIONS = StandOptions(
    num_blocks=80, max_requests=8, step_tokens=128, longest=640, model_seconds=0.0
)
PLAIN = {"weights_id": "drawn", "offload_prompt_only": False}


class Draw:
    """What happens to the stand, step by step."""

    def __init__(self, stand: BytesStand, seed: int, *, resets: float) -> None:
        self._stand, self._draw, self._resets = stand, random.Random(seed), resets
        self._seed, self._made = seed, 0
        self._inputs: dict[str, int] = {}  # how much more input each gets

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.turn()
        for name in set(self._inputs) & self._live.keys():
            self._abort(name)
        self._stand.drain()

    def turn(self, arrivals: float = 0.35) -> None:
        """What may happen between two steps, and a step."""
        while len(self._live) < MOST_REQUESTS and self._draw.random() < arrivals:
            self._arrive()
        self._go_on()
        if self._draw.random() < 0.05 and self._live:
            self._abort(self._draw.choice(sorted(self._live)))
        if self._draw.random() < self._resets:
            self.reset()
        if self._stand.is_busy:
            self._stand.step()

    @property
    def _live(self) -> dict[str, Request]:
        live: dict[str, Request] = self._stand.scheduler.requests
        return live

    def _arrive(self) -> None:
        draw = self._draw
        self._made += 1
        shared = prompt(f"drawn {draw.randrange(5)}", draw.choice(LENGTHS))
        own = self._tokens(draw.choice((0, 0, 1, 5, 40)))
        params: dict[str, Any] = {"do_remote_decode": True} if draw.random() < 0.1 else {}
        for bound in ("max_load_tokens", "max_offload_tokens"):
            if draw.random() < 0.1:
                params[bound] = draw.randrange(200)
        request = self._stand.request(
            f"{self._seed} {self._made}",
            shared + own,
            draw.choice((1, 2, 5, 30)),
            skip_reading_prefix_cache=draw.random() < 0.1,
            extra_args={"kv_transfer_params": params},
        )
        if draw.random() < 0.15:
            request.resumable = True
            self._inputs[request.request_id] = draw.randrange(1, 4)
        self._stand.add(request)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1, 999) for _ in range(count)]

    def _go_on(self) -> None:
        """Some requests get more input, or their last."""
        for name in list(self._inputs):
            if name not in self._live:
                del self._inputs[name]
            elif self._draw.random() < 0.2:
                self._inputs[name] -= 1
                tokens = self._tokens(self._draw.choice((1, 7, 33)))
                more = self._stand.request(name, tokens, self._draw.choice((1, 3, 10)))
                more.resumable = self._inputs[name] > 0 and self._live[name].num_tokens < LONGEST
                if not more.resumable:
                    del self._inputs[name]
                self._stand.add_input(more)

    def _abort(self, name: str) -> None:
        self._stand.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, how: tuple[bool, bool] | None = None) -> bool:
        """Whether it came to pass."""
        running, connector = how or self._draw.choice(RESETS)
        self._stand.finish_steps()
        is_empty = False
        with contextlib.suppress(RuntimeError):  # some load, and can't be preempted
            is_empty = self._stand.scheduler.reset_prefix_cache(
                reset_running_requests=running, reset_connector=connector
            )
            if is_empty and running:  # as an engine does whose weights are updated
                self._stand.take_other_weights()
        return is_empty


def drawn(stand: BytesStand, connection: Any, seed: int, steps: int) -> dict[str, Any]:
    """Two such runs, of which the first resets nothing; what the run came to."""
    Draw(stand, seed, resets=0.0).run(steps)
    stand.forget_device()
    audited = stand.audit(connection)
    stand.forget_device()
    Draw(stand, seed, resets=0.08).run(steps)
    assert connection.wait_usable(PATIENCE_SECONDS)
    stand.scheduler.reset_prefix_cache()
    stand.audit(connection)
    stored, stand.stored = len(stand.stored), {}
    return {
        "stored": stored,
        "audited": audited,
        "loaded": stand.loaded,
        "left": stand.left(),
        "updated": stand.weights,
    }


def skipping(stand: BytesStand, connection: Any, name: str) -> dict[str, Any]:
    """A request that reads no cache, and begins anew with a reset amid its life."""
    tokens = prompt(name, 96)
    stand.add(stand.request(name, tokens, 8, skip_reading_prefix_cache=True))
    for _ in range(4):
        stand.step()
    stand.finish_steps()
    stand.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert connection.wait_usable(PATIENCE_SECONDS)
    before, stand.stored = len(stand.stored), {}
    stand.drain()
    return {"before": before, "after": len(stand.stored)}


def bounded(stand: BytesStand, _connection: Any, name: str, most: int) -> dict[str, Any]:
    """A request of which so many tokens may be stored; the ends of what is, in tokens."""
    extra = {"kv_transfer_params": {"max_offload_tokens": most}}
    stand.stored = {}
    stand.add(stand.request(name, prompt(name, 90), 8, extra_args=extra))
    stand.drain()
    ends = sorted({len(stand._prompts[block_hash]) for _, block_hash in stand.stored})
    return {"ends": ends}


def tail(stand: BytesStand, _connection: Any, name: str, length: int) -> dict[str, Any]:
    """A request with another's beginning, and how many of its tokens are found."""
    tokens, found = prompt(name, length), 0
    for number in range(MOST_TRIES):  # a store is refused while the daemon makes room for it
        stand.add(stand.request(f"{name} is stored {number}", tokens, 2))
        stand.drain()
        stand.forget_device()
        stand.add(stand.request(f"{name} {number}", [*tokens[:-1], 1, 2, 3], 2))
        stand.drain()
        stand.forget_device()
        if found := stand.taken.cached_tokens[f"{name} {number}"]:
            break
    return {"found": found}


def served(stand: BytesStand, _connection: Any, name: str, length: int) -> dict[str, Any]:
    """A prompt of so many tokens, and how many of them the daemon has."""
    stand.add(stand.request(name, prompt("again and again", length), 2))
    stand.drain()
    stand.forget_device()
    return {"found": stand.taken.cached_tokens[name]}


def reset_twice(stand: BytesStand, _connection: Any, name: str, mover: int) -> dict[str, Any]:
    """Two resets with no step between them, while stores are under way; how many there were.

    The process `mover` copies nothing until then.
    """
    os.kill(mover, signal.SIGSTOP)
    try:
        under_way = _reset_twice(stand, name)
    finally:
        os.kill(mover, signal.SIGCONT)
    stand.drain()
    return {"under way": under_way, "left": stand.left()}


def _reset_twice(stand: BytesStand, name: str) -> int:
    stand.add(stand.request(name, prompt(name, 96), 8))
    for _ in range(2):
        stand.step()
    stand.finish_steps()
    under_way = len(stand.connector.connector_scheduler._jobs)
    for _ in range(2):
        stand.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    return under_way


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "drawn": drawn,
    "skipping": skipping,
    "bounded": bounded,
    "tail": tail,
    "served": served,
    "reset twice": reset_twice,
}


def serve(
    orders: Connection,
    socket: str,
    groups: Sequence[tuple[Any, ...]],
    options: dict[str, Any],
) -> None:
    """Run the cases that are asked for over an engine of these groups."""
    make = partial(BytesStand, groups=groups, options=OPTIONS)
    with stand_with_kvd(make, socket, **PLAIN | options) as (stand, connection):
        stand.watch(connection)
        while (order := orders.recv()) is not None:
            case, *arguments = order
            orders.send(CASES[case](stand, connection, *arguments))
