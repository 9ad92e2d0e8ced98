"""While one request waits for its load, others are computed."""

from __future__ import annotations

import os
import signal

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon

LENGTH = 6 * BLOCK_TOKENS + 8
WHOLE = 6 * BLOCK_TOKENS


def test_a_request_runs_to_its_end_while_another_loads(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    engine = start_with_kvd()
    loaded = prompt("loaded", LENGTH)
    computed = [prompt(f"computed {n}", LENGTH) for n in range(3)]
    engine.generate(loaded)
    engine.settle()
    assert engine.reset()
    hit = engine.count(HITS)
    (mover,) = kvd.movers()
    os.kill(mover, signal.SIGSTOP)  # the load takes as long as this
    try:
        loading = engine.submit(loaded)
        others = [engine.submit(each) for each in computed]
        assert tokens(engine.finish(*others)) == plain.tokens(*computed)
        assert engine.tokens_of(loading) == ()
        assert not engine.has_finished(loading)
    finally:
        os.kill(mover, signal.SIGCONT)
    assert tokens(engine.finish(loading)) == plain.tokens(loaded)
    assert engine.count(HITS) - hit == WHOLE
    engine.settle()
    engine.end()
