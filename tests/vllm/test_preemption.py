"""An engine that has to preempt stores and loads without a wrong token."""

from __future__ import annotations

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_BYTES, BLOCK_TOKENS, HITS, PREEMPTIONS, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon

BLOCKS = 40  # of the device: not enough for all that the requests below come to
OUTPUT = 120


def test_preempted_requests_come_to_the_same_tokens(
    start_with_kvd: StartEngine, plain: Plain
) -> None:
    prompts = [prompt(f"crowd {n}", 3 * BLOCK_TOKENS + n) for n in range(10)]
    right = plain.tokens(*prompts, max_tokens=OUTPUT)
    engine = start_with_kvd(max_model_len=512, kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES)
    cold = engine.generate(*prompts, max_tokens=OUTPUT)
    assert tokens(cold) == right
    assert engine.count(PREEMPTIONS) > 0
    engine.settle()
    hit, preempted = engine.count(HITS), engine.count(PREEMPTIONS)
    assert engine.reset()
    warm = engine.generate(*prompts, max_tokens=OUTPUT)
    assert tokens(warm) == right
    assert engine.count(HITS) > hit
    assert engine.count(PREEMPTIONS) > preempted
    engine.settle()
    engine.end()


def test_stores_that_come_after_their_blocks_were_overwritten_are_never_served(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"late {n}", 3 * BLOCK_TOKENS + n) for n in range(10)]
    right = plain.tokens(*prompts, max_tokens=OUTPUT)
    engine = start_with_kvd(
        {"flush_timeout_s": 0.1}, max_model_len=512, kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES
    )
    with kvd.held_mover():
        assert tokens(engine.generate(*prompts, max_tokens=OUTPUT)) == right
    assert engine.count(PREEMPTIONS) > 0
    engine.settle()
    assert engine.reset()
    assert tokens(engine.generate(*prompts, max_tokens=OUTPUT)) == right
    engine.settle()
    engine.end()
