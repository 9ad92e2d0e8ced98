"""1,300 requests at once that all hit: more loads in one step than one message may have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process
from tests.waiting import wait_until

REQUESTS = 1300
MOST_LOADS = 1024  # in one message
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def kvd(make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    """A daemon whose leases outlive the arrival of the whole batch on a busy machine.

    By default an answer is worth 1.4 s; what arrived earlier than that is asked again, and its
    load begins in another step.
    """
    daemon = make_daemon()
    daemon.flags |= {"lease-ttl-ms": 60_000}
    daemon.start()
    return daemon


def test_every_request_of_a_big_batch_hits(fork_server: None, kvd: NodeDaemon) -> None:
    with stand_process("batch_stand", kvd.socket) as run:
        assert run("cold")["cached"] == [0] * REQUESTS
        wait_until(lambda: kvd.ready_blocks() == REQUESTS)
        warm = run("warm")
        assert warm["cached"] == [BLOCK_TOKENS] * REQUESTS
        assert warm["loads"] == [REQUESTS], "all of them in one step"
        assert max(warm["loads"]) > MOST_LOADS
        assert (warm["sessions"], warm["refusals"], warm["failed"]) == (1, {}, 0)
