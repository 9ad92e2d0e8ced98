"""A pool that has room for some of what an engine offers: the rest is stored when there is more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_BYTES, BLOCK_TOKENS, LENGTH, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd

HOST_BLOCKS = 128  # a quarter of them may be leased
OTHERS = 18  # prompts of 6 blocks: they leave room for 20
LONG_BLOCKS = 30
LONG = prompt("long", LONG_BLOCKS * BLOCK_TOKENS + 8)
OUTPUT = 400  # so that it still runs when there is room


@pytest.fixture
def kvd(make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    """A daemon of another size than the module's."""
    daemon = make_daemon()
    daemon.pool_bytes = HOST_BLOCKS * BLOCK_BYTES
    daemon.start()
    return daemon


def test_blocks_of_a_prompt_without_room_are_stored_once_there_is_some(
    start_engine: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    engine = start_engine(**with_kvd(kvd.socket))
    engine.wait_for_daemon()
    right = plain.tokens(LONG, max_tokens=OUTPUT)
    with kvd.held_mover():  # so these are neither evicted nor done
        engine.generate(*(prompt(f"before {n}", LENGTH) for n in range(OTHERS)))
        request = engine.submit(LONG, max_tokens=OUTPUT)
        engine.wait(lambda: len(engine.tokens_of(request)) > 2)
    assert tokens(engine.finish(request)) == right
    engine.settle()
    assert engine.reset()
    (answer,) = engine.generate(LONG, max_tokens=OUTPUT)
    assert answer.tokens == right[0]
    assert answer.cached == LONG_BLOCKS * BLOCK_TOKENS
    engine.settle()
    engine.end()
