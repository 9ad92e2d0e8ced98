"""An engine starts without a daemon, works, and uses it once it has come."""

from __future__ import annotations

from collections.abc import Callable

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import HITS, LENGTH, WHOLE, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd


def test_a_daemon_that_comes_later_is_used(
    make_daemon: Callable[[], NodeDaemon], start_engine: StartEngine, plain: Plain
) -> None:
    daemon = make_daemon()
    engine = start_engine(**with_kvd(daemon.socket, register_wait_s=0.2))
    early, late = prompt("early", LENGTH), prompt("late", LENGTH)
    assert tokens(engine.generate(early)) == plain.tokens(early)
    engine.settle()
    daemon.start()
    engine.wait_for_daemon()
    assert tokens(engine.store(late)) == plain.tokens(late)
    assert tokens(engine.generate(early, late)) == plain.tokens(early, late)
    assert engine.count(HITS) == WHOLE, "what was computed late came back"
