"""Lazy mode: what an engine stores when its blocks leave the device, and that it comes back."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    HITS,
    LENGTH,
    WHOLE,
    Engine,
    prompt,
    tokens,
)
from tests.vllm.node_daemon import NodeDaemon

LAZY = {"store_mode": "lazy"}
BLOCKS = 40  # of the device
STEP_TOKENS = 4 * BLOCK_TOKENS  # so that eight blocks are near their end
SMALL = {
    "max_model_len": 512,
    "max_num_batched_tokens": STEP_TOKENS,
    "kv_cache_memory_bytes": BLOCKS * BLOCK_BYTES,
}
PROMPTS = [prompt(f"lazy {n}", LENGTH) for n in range(12)]  # twice what the device holds


@pytest.fixture(scope="module")
def engine(start_with_kvd: StartEngine) -> Engine:
    return start_with_kvd(LAZY, **SMALL)


def test_what_the_device_keeps_is_not_stored_and_what_leaves_it_is(
    engine: Engine, plain: Plain, kvd: NodeDaemon
) -> None:
    few = PROMPTS[:3]
    assert tokens(engine.generate(*few)) == plain.tokens(*few)
    engine.settle()
    assert kvd.ready_blocks() == 0
    right = plain.tokens(*PROMPTS)
    assert [tokens(engine.generate(each))[0] for each in PROMPTS] == right
    engine.settle()
    stored = kvd.ready_blocks()
    assert 12 * 6 - BLOCKS <= stored < 12 * 6
    hit = engine.count(HITS)
    # The first ones have left the device: their blocks come back from the daemon.
    again = [engine.generate(each)[0] for each in PROMPTS[:3]]
    assert tokens(again) == right[:3]
    assert [answer.cached for answer in again] == [WHOLE] * 3
    assert engine.count(HITS) - hit == 3 * WHOLE
    engine.settle()


def test_a_prompt_whose_head_is_on_the_device_loads_its_tail(engine: Engine, plain: Plain) -> None:
    """The tail leaves first. The daemon never had the head."""
    long = prompt("head", LENGTH)
    right = plain.tokens(long)
    assert tokens(engine.generate(long)) == right
    # Each takes two places of whole blocks, and one that held none. 32 come before the prompt's.
    fillers = [prompt(f"filler {n}", 2 * BLOCK_TOKENS + 8) for n in range(18)]
    truth = plain.tokens(*fillers)
    assert [engine.generate(each)[0].tokens for each in fillers] == truth
    engine.settle()
    hit = engine.count(HITS)
    (answer,) = engine.generate(long)
    assert answer.tokens == right[0]
    assert answer.cached == WHOLE
    assert engine.count(HITS) - hit == 4 * BLOCK_TOKENS


def test_a_prefill_that_is_handed_off_is_stored_at_once(engine: Engine, kvd: NodeDaemon) -> None:
    stored = kvd.ready_blocks()
    request = engine.submit(
        prompt("handed off", LENGTH), max_tokens=1, transfer={"do_remote_decode": True}
    )
    engine.finish(request)
    engine.settle()
    # Those that it pushes towards the queue's front are stored as well.
    assert kvd.ready_blocks() >= stored + WHOLE // BLOCK_TOKENS
    hit = engine.count(HITS)
    assert engine.reset()
    (answer,) = engine.generate(prompt("handed off", LENGTH))
    assert answer.cached == WHOLE
    assert engine.count(HITS) - hit == WHOLE
