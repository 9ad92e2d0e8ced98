"""Two ranks of one engine, each with its own shard of every block."""

from __future__ import annotations

import os

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import HITS, LENGTH, SESSIONS, WHOLE, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon
from tests.waiting import wait_until

CORES = sorted(os.sched_getaffinity(0))


pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")


@pytest.fixture(scope="module")
def engine(start_with_kvd: StartEngine) -> Engine:
    binding = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}
    return start_with_kvd(tensor_parallel_size=2, environment=binding)


def test_two_ranks_store_and_load_their_shards(
    engine: Engine, kvd: NodeDaemon, plain: Plain
) -> None:
    (session,) = kvd.status().sessions
    assert session.world_size == len(session.ranks) == 2
    prompts = [prompt(f"shards {n}", LENGTH) for n in range(4)]
    cold = engine.store(*prompts)
    warm = engine.generate(*prompts)
    assert tokens(cold) == tokens(warm) == plain.tokens(*prompts)
    assert engine.count(HITS) == 4 * WHOLE
    (session,) = kvd.status().sessions
    stored = [rank.bytes_stored for rank in session.ranks]
    assert stored[0] == stored[1] > 0
    wait_until(lambda: kvd.bytes_loaded() == stored)


def test_both_ranks_are_warm_after_the_daemon_was_killed(
    engine: Engine, kvd: NodeDaemon, plain: Plain
) -> None:
    known = [prompt(f"two ranks {n}", LENGTH) for n in range(4)]
    engine.store(*known)
    requests = [engine.submit(each, max_tokens=40) for each in known]
    engine.wait(lambda: any(engine.tokens_of(request) for request in requests))
    sessions = int(engine.count(SESSIONS))
    kvd.kill()
    assert tokens(engine.finish(*requests)) == plain.tokens(*known, max_tokens=40)
    engine.settle()
    kvd.start()
    engine.wait_for_daemon(after=sessions)
    hit = engine.count(HITS)
    assert engine.reset()
    assert tokens(engine.generate(*known)) == plain.tokens(*known)
    assert engine.count(HITS) - hit == 4 * WHOLE
