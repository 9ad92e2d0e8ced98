"""Two ranks of one engine, each with its own shard of every block."""

from __future__ import annotations

import os

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon

LENGTH = 6 * BLOCK_TOKENS + 8
WHOLE = 6 * BLOCK_TOKENS
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")
def test_two_ranks_store_and_load_their_shards(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"shards {n}", LENGTH) for n in range(4)]
    engine = start_with_kvd(
        tensor_parallel_size=2,
        environment={"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"},
    )
    (session,) = kvd.status().sessions
    assert session.world_size == len(session.ranks) == 2
    cold = engine.generate(*prompts)
    engine.settle()
    assert engine.reset()
    warm = engine.generate(*prompts)
    assert tokens(cold) == tokens(warm) == plain.tokens(*prompts)
    assert engine.count(HITS) == 4 * WHOLE
    (session,) = kvd.status().sessions
    stored, loaded = zip(*((r.bytes_stored, r.bytes_loaded) for r in session.ranks), strict=True)
    assert stored[0] == stored[1] > 0
    assert loaded[0] == loaded[1] > 0
    engine.end()
