"""Prompts of more blocks than one job may have: stored whole, and loaded whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd_proto.limits import MAX_KEYS_PER_MESSAGE
from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process
from tests.waiting import wait_until

BLOCK_TOKENS = 4
MOST = MAX_KEYS_PER_MESSAGE


@pytest.fixture(scope="module")
def kvd(make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    """A daemon of which one prompt may lease all, for as long as a busy machine takes."""
    daemon = make_daemon()
    daemon.pool_bytes = 128 << 20
    daemon.flags |= {"lease-ttl-ms": 60_000, "lease-share": 0.9}
    daemon.start()
    return daemon


@pytest.mark.parametrize(("blocks", "jobs"), [(10_000, 2), (MOST - 1, 1), (MOST, 1), (MOST + 1, 2)])
def test_a_long_prompt_is_stored_and_loaded_whole(
    fork_server: None, kvd: NodeDaemon, blocks: int, jobs: int
) -> None:
    with stand_process("long_stand", kvd.socket) as ask:

        def run(name: str) -> dict[str, Any]:
            told = ask((name, blocks))
            assert (told["sessions"], told["refusals"], told["failed"]) == (1, {}, 0)
            assert told["blocks"] == blocks
            return told

        stored = kvd.ready_blocks()
        cold = run("cold")
        assert (cold["cached"], cold["stores"]) == (0, [jobs])
        wait_until(lambda: kvd.ready_blocks() == stored + blocks)
        warm = run("warm")
        assert (warm["cached"], warm["loads"]) == (blocks * BLOCK_TOKENS, jobs)
        assert warm["as_stored"], "the loaded bytes are others"
