"""What lazy mode is for: together device and host memory hold more than each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_BYTES, HITS, LENGTH, QUERIES, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd
from tests.vllm.test_lazy_stores import SMALL

HOST_BLOCKS = 64
PROMPTS = [prompt(f"beside {n}", LENGTH) for n in range(13)]  # 78 blocks; the device has 40


@pytest.fixture
def kvd(make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    """A daemon of another size than the module's."""
    daemon = make_daemon()
    daemon.pool_bytes = HOST_BLOCKS * BLOCK_BYTES
    daemon.start()
    return daemon


@pytest.mark.parametrize(("mode", "least", "most"), [("eager", 0.0, 0.1), ("lazy", 0.4, 1.0)])
def test_prompts_that_only_both_together_can_hold(
    mode: str, least: float, most: float, start_engine: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    """They come in turn, which is the worst for a memory that is a little too small."""
    engine = start_engine(**SMALL, **with_kvd(kvd.socket, store_mode=mode))
    engine.wait_for_daemon()
    right = plain.tokens(*PROMPTS)
    assert [tokens(engine.generate(each))[0] for each in PROMPTS] == right
    engine.settle()
    asked, hit = engine.count(QUERIES), engine.count(HITS)
    for each, truth in zip(PROMPTS, right, strict=True):
        assert tokens(engine.generate(each)) == [truth]
        engine.settle()
    share = (engine.count(HITS) - hit) / (engine.count(QUERIES) - asked)
    engine.end()
    assert least <= share <= most, f"of what the device lacked {share:.3f} was found"
