"""Prompts of more blocks than one job may have: stored whole, and loaded whole."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from kvd_proto import layout
from tests.vllm.engine import FORKS
from tests.vllm.node_daemon import PATIENCE_SECONDS, NodeDaemon, wait_until

BLOCK_TOKENS = 4
MOST = layout.MAX_KEYS_PER_MESSAGE


@pytest.fixture(scope="module")
def kvd(make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    """A daemon of which one prompt may lease all, for as long as a busy machine takes."""
    daemon = make_daemon()
    daemon.pool_bytes = 128 << 20
    daemon.flags = {"lease-ttl-ms": 60_000, "lease-share": 0.9}
    daemon.start()
    return daemon


@pytest.mark.parametrize(("blocks", "jobs"), [(10_000, 1), (MOST - 1, 1), (MOST, 1), (MOST + 1, 2)])
def test_a_long_prompt_is_stored_and_loaded_whole(
    fork_server: None, kvd: NodeDaemon, blocks: int, jobs: int
) -> None:
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_serve, args=(theirs, kvd.socket))
    process.start()
    theirs.close()

    def run(name: str) -> dict[str, object]:
        ours.send((name, blocks))
        assert ours.poll(PATIENCE_SECONDS), "the stand says nothing any more"
        told: dict[str, object] = ours.recv()
        assert (told["sessions"], told["refusals"], told["failed"]) == (1, {}, 0)
        assert told["blocks"] == blocks
        return told

    try:
        stored = kvd.ready_blocks()
        cold = run("cold")
        assert (cold["cached"], cold["stores"]) == (0, [jobs])
        wait_until(lambda: kvd.ready_blocks() == stored + blocks)
        warm = run("warm")
        assert (warm["cached"], warm["loads"]) == (blocks * BLOCK_TOKENS, jobs)
        assert warm["as_stored"], "the loaded bytes are others"
        ours.send(None)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _serve(orders: Connection, socket: str) -> None:
    from tests.vllm.long_stand import serve  # imports vLLM: in the forked process only

    serve(orders, socket)
