"""The folder that examples write for vLLM holds the model that they mean: the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import StartEngine
from tests.vllm.engine import tokens

PROMPT = list(b"Two hundred and seven steps lead from the door to the lamp room.")
COUNT = 24


def by_the_example_engine() -> tuple[int, ...]:
    """Greedy tokens of the example engine's own forward pass."""
    import torch

    from examples.engine.config import Shard
    from examples.engine.hugging_face import TINY
    from examples.engine.messages import Span
    from examples.engine.model import Decoder
    from examples.engine.weights import random_checkpoint

    decoder = Decoder(random_checkpoint(TINY, seed=0), Shard.of(TINY, 0, 1), lambda part: part)
    width = 2 * TINY.head_dim
    kv = [torch.zeros(16, TINY.kv_heads, 16, width) for _ in range(TINY.layers)]
    known = list(PROMPT)
    for _ in range(COUNT):
        done = len(known) if len(known) > len(PROMPT) else 1
        span = Span(tuple(known[done - 1 :]), done - 1, tuple(range(16)))
        known.append(int(decoder.logits(decoder.forward([span], kv)).argmax()))
    return tuple(known[len(PROMPT) :])


@pytest.mark.slow
def test_vllm_says_what_the_example_engine_says(start_engine: StartEngine, tmp_path: Path) -> None:
    from examples.engine.hugging_face import model_folder

    engine = start_engine(model=str(model_folder("tiny", tmp_path)))
    said = tokens(engine.generate(PROMPT, max_tokens=COUNT))
    engine.end()
    assert said == [by_the_example_engine()]
    assert len(set(said[0])) > 4, "a model that repeats itself would prove little"
