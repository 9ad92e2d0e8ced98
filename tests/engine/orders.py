"""Requests for the tiny model, the same in every test."""

from __future__ import annotations

import random

from examples.engine.process import Answer
from examples.engine.requests import RequestOrder

OUTPUT_TOKENS = 20


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
