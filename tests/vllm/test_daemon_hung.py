"""A daemon or a mover that hangs holds no engine up for good, and changes no token."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import FAILED_LOADS, HITS, LENGTH, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd

MOVER_SECONDS = 3  # how long a mover may take, here, until the daemon ends it


@pytest.fixture(scope="module")
def daemon(make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    made = make_daemon()
    made.flags |= {
        "submit-deadline-seconds": MOVER_SECONDS,
        "copy-deadline-seconds": MOVER_SECONDS,
    }
    made.start()
    return made


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, daemon: NodeDaemon) -> Engine:
    """With the product's own deadlines, not the patient ones of the other tests."""
    own = {"lookup_give_up_s": 0.1, "silent_after_s": 0.1, "flush_timeout_s": 1.0}
    engine = start_engine(**with_kvd(daemon.socket, **own))
    engine.wait_for_daemon()
    return engine


def warm(engine: Engine, name: str) -> list[list[int]]:
    """Prompts that the daemon has, and the engine has not."""
    prompts = [prompt(f"{name} {n}", LENGTH) for n in range(4)]
    engine.store(*prompts)
    return prompts


def test_while_the_daemon_hangs_the_engine_computes(
    engine: Engine, daemon: NodeDaemon, plain: Plain
) -> None:
    known = warm(engine, "hung")
    new = [prompt(f"hung and new {n}", LENGTH) for n in range(4)]
    daemon.freeze()
    try:
        assert tokens(engine.generate(*known, *new)) == plain.tokens(*known, *new)
    finally:
        daemon.thaw()
    engine.wait_for_daemon()
    engine.settle()
    assert engine.reset()
    hit = engine.count(HITS)
    again = warm(engine, "hung no more")
    assert tokens(engine.generate(*again)) == plain.tokens(*again)
    assert engine.count(HITS) > hit, "the daemon is used again"


def test_a_daemon_that_hangs_amid_a_run_changes_nothing(
    engine: Engine, daemon: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"hung amid {n}", LENGTH) for n in range(4)]
    requests = [engine.submit(each, max_tokens=40) for each in prompts]
    engine.wait(lambda: any(engine.tokens_of(request) for request in requests))
    daemon.freeze()
    try:
        assert tokens(engine.finish(*requests)) == plain.tokens(*prompts, max_tokens=40)
    finally:
        daemon.thaw()
    engine.settle()


def test_a_load_whose_mover_hangs_is_computed_once_the_mover_is_dead(
    start_engine: StartEngine, daemon: NodeDaemon, plain: Plain
) -> None:
    # Patient: each of its lookups is answered, on a busy machine too, so that all are loads.
    of_others = set(daemon.movers())
    engine = start_engine(**with_kvd(daemon.socket))
    engine.wait_for_daemon()
    prompts = warm(engine, "mover")
    movers = set(daemon.movers()) - of_others
    assert movers
    for mover in movers:
        os.kill(mover, signal.SIGSTOP)
    assert tokens(engine.generate(*prompts)) == plain.tokens(*prompts)
    engine.settle()
    assert engine.count(FAILED_LOADS) == len(prompts)
    assert not movers & set(daemon.movers())
