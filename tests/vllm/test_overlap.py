"""While one request waits for its load, others are computed."""

from __future__ import annotations

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import HITS, LENGTH, WHOLE, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon


def test_a_request_runs_to_its_end_while_another_loads(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    engine = start_with_kvd()
    loaded = prompt("loaded", LENGTH)
    computed = [prompt(f"computed {n}", LENGTH) for n in range(3)]
    engine.store(loaded)
    hit = engine.count(HITS)
    with kvd.held_mover():
        loading = engine.submit(loaded)
        others = [engine.submit(each) for each in computed]
        assert tokens(engine.finish(*others)) == plain.tokens(*computed)
        assert engine.tokens_of(loading) == ()
        assert not engine.has_finished(loading)
    assert tokens(engine.finish(loading)) == plain.tokens(loaded)
    assert engine.count(HITS) - hit == WHOLE
    engine.settle()
    engine.end()
