"""A block of several engine blocks of which the engine holds only some: never to be loaded whole.

A request that begins on a device hit in a sliding-window model has only the window's blocks. The
block in which the window begins is partly null, and nobody may find it under its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, Answer, prompt, tokens

WIDTH = 2  # engine blocks in one of kvd's
CHUNK = WIDTH * BLOCK_TOKENS
ON_DEVICE = 7 * BLOCK_TOKENS  # ends amid a chunk, so that the window of 64 begins amid one
TO_LOAD = 3 * CHUNK  # ends where the chunk ends that the window begins in
PREFIXES = 4
CLOSE = 2e-4  # batching moves a request's log-probability by a hundredth of it


def test_a_block_partly_out_of_the_window_is_never_loaded_as_whole(
    start_with_kvd: StartEngine, hybrid_model: Path, plain_hybrid: Plain
) -> None:
    engine = start_with_kvd({"blocks_per_chunk": WIDTH}, model=str(hybrid_model))
    prompts = [prompt(f"gap {n}", ON_DEVICE + 8) for n in range(PREFIXES)]
    engine.finish(*(engine.submit(each, 2, {"max_offload_tokens": 0}) for each in prompts))
    again = engine.generate(*prompts)
    assert [answer.cached for answer in again] == [ON_DEVICE] * PREFIXES
    engine.settle()
    assert engine.reset()
    # So short that what is computed attends to the window's oldest tokens.
    branches = [prompt(f"gap {n}", 2, after=each[:TO_LOAD]) for n, each in enumerate(prompts)]
    wanted = plain_hybrid.engine.generate(*branches)
    assert_same(engine.generate(*branches), wanted)
    engine.settle()
    assert engine.reset()
    before = engine.count(HITS)
    assert_same(engine.generate(*branches), wanted)
    assert engine.count(HITS) == before + PREFIXES * TO_LOAD, "computed whole, they are found"
    engine.end()


def assert_same(answers: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    assert tokens(answers) == tokens(wanted)
    assert [each.logprob for each in answers] == pytest.approx(
        [each.logprob for each in wanted], abs=CLOSE
    )
