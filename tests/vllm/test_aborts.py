"""A request that goes away amid its load or its stores harms no other request."""

from __future__ import annotations

import itertools

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_BYTES, HITS, LENGTH, WHOLE, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon

TRIES = itertools.count()  # of a test that is run once more
BLOCKS = 40  # of the device: few, so that they are soon used again


@pytest.fixture(scope="module")
def engine(start_with_kvd: StartEngine) -> Engine:
    """It does not wait for stores whose blocks it needs again: they are given up."""
    impatient = {"flush_timeout_s": 0.2}
    return start_with_kvd(impatient, max_model_len=512, kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES)


def test_a_load_that_outlives_its_request_writes_into_nobodys_blocks(
    engine: Engine, kvd: NodeDaemon, plain: Plain
) -> None:
    loaded = prompt("aborted load", LENGTH)
    engine.store(loaded)
    hit = engine.count(HITS)
    # Of these the daemon has nothing: a mover that stands still would never load it.
    computed = prompt(f"beside it, {next(TRIES)}", LENGTH)
    with kvd.held_mover():
        loading = engine.submit(loaded)
        engine.wait_for_count(HITS, hit + WHOLE)
        (beside,) = engine.finish(engine.submit(computed))
        engine.abort(loading)
        # More than the device holds at a time: every block that is free is written.
        others = [prompt(f"after {n} {computed}", LENGTH) for n in range(10)]
        requests = [engine.submit(each, max_tokens=30) for each in others]
        engine.wait(lambda: any(engine.tokens_of(request) for request in requests))
    assert tokens(engine.finish(*requests)) == plain.tokens(*others, max_tokens=30)
    assert (beside.tokens,) == tuple(plain.tokens(computed))
    assert not engine.has_finished(loading)
    engine.settle()


def test_requests_that_are_aborted_amid_their_stores_leave_no_wrong_block(
    engine: Engine, plain: Plain
) -> None:
    prompts = [prompt(f"aborted store {n}", LENGTH) for n in range(4)]
    requests = [engine.submit(each, max_tokens=40) for each in prompts]
    engine.wait(lambda: all(engine.tokens_of(request) for request in requests))
    for request in requests:
        engine.abort(request)
    engine.settle()
    assert engine.reset()
    assert tokens(engine.generate(*prompts)) == plain.tokens(*prompts)
