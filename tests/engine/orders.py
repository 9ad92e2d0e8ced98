"""Requests for the tiny model, the same in every test."""

from __future__ import annotations

import random
from typing import Any

from examples.engine.config import EngineConfig
from examples.engine.daemon import Daemon
from examples.engine.process import Answer
from examples.engine.requests import RequestOrder

OUTPUT_TOKENS = 20
# A busy machine can keep a sound daemon from answering for longer than this model takes to compute
# a whole prompt, and then the engine goes on without it, rightly. A test of what is found waits.
PATIENCE_S = 30.0


def patient(daemon: Daemon, **changes: Any) -> EngineConfig:
    """An engine of this daemon's that waits for it as long as it takes."""
    return EngineConfig(
        socket=daemon.socket, connect_s=2 * PATIENCE_S, lookup_patience_s=PATIENCE_S, **changes
    )


def shared_prefix_orders(count: int, use_cache: bool = True) -> list[RequestOrder]:
    """Requests of 45 to 80 tokens that share prefixes of different lengths."""
    source = random.Random(7)
    prefix = [source.randrange(256) for _ in range(100)]
    return [
        RequestOrder(
            f"request-{number}",
            tuple(prefix[: 24 + 5 * number] + [source.randrange(256) for _ in range(21)]),
            OUTPUT_TOKENS,
            use_cache,
        )
        for number in range(count)
    ]


def outputs(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {request_id: answer.output for request_id, answer in answers.items()}


def total(answers: dict[str, Answer], name: str) -> int:
    """Sum of one of the answers' counters."""
    return sum(int(answer.fields[name]) for answer in answers.values())
