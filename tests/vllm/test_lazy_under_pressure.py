"""Lazy mode where blocks are given away fast: preemption, late copies, a reset."""

from __future__ import annotations

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, LENGTH, PREEMPTIONS, SESSIONS, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.test_lazy_stores import LAZY, SMALL


def test_many_at_once_that_are_preempted_come_to_the_same_tokens(
    start_with_kvd: StartEngine, plain: Plain
) -> None:
    prompts = [prompt(f"crowd {n}", 3 * BLOCK_TOKENS + n) for n in range(10)]
    right = plain.tokens(*prompts, max_tokens=120)
    engine = start_with_kvd(LAZY, **SMALL)
    for _ in range(2):
        assert tokens(engine.generate(*prompts, max_tokens=120)) == right
    assert engine.count(PREEMPTIONS) > 0
    assert engine.count(HITS) > 0
    engine.settle()
    engine.end()


def test_stores_that_come_after_their_blocks_were_given_away_are_never_served(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"late {n}", LENGTH) for n in range(12)]
    right = plain.tokens(*prompts)
    engine = start_with_kvd(LAZY | {"flush_timeout_s": 0.1}, **SMALL)
    with kvd.held_mover():
        assert tokens(engine.generate(*prompts)) == right
    engine.settle()
    for _ in range(2):
        assert [tokens(engine.generate(each))[0] for each in prompts] == right
    engine.settle()
    engine.end()


def test_nothing_of_before_a_reset_is_stored_after_it(
    start_with_kvd: StartEngine, plain: Plain
) -> None:
    """Not what lies on the device: the engine may have other weights by now."""
    prompts = [prompt(f"reset {n}", LENGTH) for n in range(3)]
    engine = start_with_kvd(LAZY, **SMALL)
    assert tokens(engine.generate(*prompts)) == plain.tokens(*prompts)
    engine.settle()
    assert engine.reset(connector=True)
    hit = engine.count(HITS)
    fillers = [prompt(f"after {n}", LENGTH) for n in range(6)]
    assert tokens(engine.generate(*fillers)) == plain.tokens(*fillers)
    engine.settle()
    assert tokens(engine.generate(*prompts)) == plain.tokens(*prompts)
    assert engine.count(HITS) == hit
    engine.settle()
    engine.end()


def test_its_daemon_is_killed_and_comes_back(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"killed {n}", LENGTH) for n in range(12)]
    right = plain.tokens(*prompts, max_tokens=40)
    engine = start_with_kvd(LAZY, **SMALL)
    requests = [engine.submit(each, max_tokens=40) for each in prompts]
    engine.wait(lambda: sum(engine.has_finished(request) for request in requests) >= 6)
    sessions = int(engine.count(SESSIONS))
    kvd.kill()
    assert tokens(engine.finish(*requests)) == right
    engine.settle()
    kvd.start()
    engine.wait_for_daemon(after=sessions)
    hit = engine.count(HITS)
    assert [tokens(engine.generate(each, max_tokens=40))[0] for each in prompts] == right
    assert engine.count(HITS) > hit
    engine.settle()
    engine.end()
