"""A reset that takes the connector along makes this engine cold, and no other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_BYTES, HITS, LENGTH, WHOLE, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon

LOADED = "vllm:kv_offload_load_bytes"


@pytest.fixture(scope="module")
def engines(start_with_kvd: StartEngine) -> tuple[Engine, Engine]:
    return start_with_kvd(), start_with_kvd()


def hits_of(engine: Engine, *prompts: list[int]) -> int:
    """How many tokens of these prompts the engine loads."""
    before = engine.count(HITS)
    engine.generate(*prompts)
    engine.settle()
    return int(engine.count(HITS) - before)


def test_a_reset_of_the_connector_is_cold_here_and_warm_there(
    engines: tuple[Engine, Engine], plain: Plain
) -> None:
    one, other = engines
    prompts = [prompt(f"reset {n}", LENGTH) for n in range(4)]
    assert tokens(one.store(*prompts)) == plain.tokens(*prompts)
    assert hits_of(one, *prompts) == 4 * WHOLE, "a reset of the device's cache alone stays warm"
    assert one.reset(connector=True)
    assert hits_of(one, *prompts) == 0
    assert hits_of(other, *prompts) == 4 * WHOLE
    # On a slow machine all this may be over before the daemon has answered with the new epoch,
    # and nothing is stored till then. Now it has.
    assert one.reset()
    one.store(*prompts)
    assert hits_of(one, *prompts) == 4 * WHOLE, "it stored them again, for its new epoch"
    assert one.reset()
    assert tokens(one.generate(*prompts)) == plain.tokens(*prompts)


def test_a_reset_amid_stores_still_gives_the_right_tokens(
    engines: tuple[Engine, Engine], plain: Plain
) -> None:
    one, _ = engines
    prompts = [prompt(f"reset amid {n}", LENGTH) for n in range(4)]
    for _ in range(3):
        assert tokens(one.generate(*prompts)) == plain.tokens(*prompts)
        one.reset(connector=True)  # its stores may be under way
    one.settle()
    assert one.reset()
    assert tokens(one.generate(*prompts)) == plain.tokens(*prompts)


def test_a_request_that_a_reset_preempts_is_loaded_again_in_the_same_step(
    engines: tuple[Engine, Engine], plain: Plain
) -> None:
    one, _ = engines
    known = prompt("reset while it runs", LENGTH)
    one.store(known)
    before = one.count(LOADED)
    request = one.submit(known, max_tokens=60)
    one.wait(lambda: len(one.tokens_of(request)) > 3)
    assert one.reset(running=True)
    assert tokens(one.finish(request)) == plain.tokens(known, max_tokens=60)
    assert one.count(LOADED) == before + 2 * 6 * BLOCK_BYTES, "it was loaded twice"


def test_a_reset_amid_a_load_clears_nothing_and_the_next_one_does(
    engines: tuple[Engine, Engine], kvd: NodeDaemon, plain: Plain
) -> None:
    one, _ = engines
    known, other = prompt("reset amid a load", LENGTH), prompt("beside that load", LENGTH)
    one.store(known)
    with stopped(kvd.movers()):
        loading = one.submit(known)
        one.generate(other)
        assert not one.reset(running=True, connector=True), "vLLM refuses it"
    assert tokens(one.finish(loading)) == plain.tokens(known)
    one.settle()
    assert one.reset()
    assert hits_of(one, known) == WHOLE, "the epoch is the same"
    assert one.reset(running=True, connector=True)
    assert hits_of(one, known) == 0


@contextmanager
def stopped(movers: list[int]) -> Iterator[None]:
    """These stand still meanwhile."""
    for mover in movers:
        os.kill(mover, signal.SIGSTOP)
    try:
        yield
    finally:
        for mover in movers:
            os.kill(mover, signal.SIGCONT)
