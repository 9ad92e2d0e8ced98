"""The daemon is killed -9 while an engine works: the tokens stay the same, and the cache warm."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, LENGTH, SESSIONS, WHOLE, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon

LONG = 48  # tokens to produce: enough to be in the middle of


@pytest.fixture(scope="module")
def engine(start_with_kvd: StartEngine) -> Engine:
    return start_with_kvd()


def kill_and_start(daemon: NodeDaemon, engine: Engine) -> None:
    """Returns once the engine is connected again."""
    sessions = int(engine.count(SESSIONS))
    daemon.kill()
    daemon.start()
    engine.wait_for_daemon(after=sessions)


def test_it_is_killed_amid_loads_and_stores_and_is_warm_when_it_is_back(
    engine: Engine, kvd: NodeDaemon, plain: Plain
) -> None:
    known = [prompt(f"known {n}", LENGTH) for n in range(4)]
    new = [prompt(f"new {n}", LENGTH) for n in range(8)]
    engine.store(*known)
    requests = [engine.submit(each, max_tokens=LONG) for each in known + new]
    engine.wait(lambda: any(engine.tokens_of(request) for request in requests))
    sessions = int(engine.count(SESSIONS))
    kvd.kill()
    assert tokens(engine.finish(*requests)) == plain.tokens(*known, *new, max_tokens=LONG)
    without_daemon = [prompt(f"without daemon {n}", LENGTH) for n in range(2)]
    assert tokens(engine.generate(*without_daemon)) == plain.tokens(*without_daemon)
    engine.settle()
    kvd.start()
    engine.wait_for_daemon(after=sessions)
    assert kvd.status().recovered_blocks >= len(known) * WHOLE // BLOCK_TOKENS
    hit = engine.count(HITS)
    assert engine.reset()
    assert tokens(engine.generate(*known)) == plain.tokens(*known)
    assert engine.count(HITS) - hit == len(known) * WHOLE


def test_what_comes_after_its_return_is_stored_again(
    engine: Engine, kvd: NodeDaemon, plain: Plain
) -> None:
    kill_and_start(kvd, engine)
    later = prompt("later", LENGTH)
    assert tokens(engine.store(later)) == plain.tokens(later)
    hit = engine.count(HITS)
    assert tokens(engine.generate(later)) == plain.tokens(later)
    assert engine.count(HITS) - hit == WHOLE


def test_killed_again_and_again_it_never_changes_a_token(
    engine: Engine, kvd: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"again {n}", LENGTH) for n in range(6)]
    for _ in range(3):
        assert engine.reset()
        requests = [engine.submit(each) for each in prompts]
        engine.wait(lambda: any(engine.tokens_of(each) for each in requests))  # noqa: B023
        kill_and_start(kvd, engine)
        assert tokens(engine.finish(*requests)) == plain.tokens(*prompts)
        engine.settle()
