"""A daemon that hangs while an engine only stores costs it a few waits, not one in every step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from kvd_client.scheduler.store_pause import FIRST_PAUSE_S
from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import Ask, stand_process
from tests.waiting import wait_until

REQUESTS = 40
AT_ONCE = 2  # waits before a pause: the next step's stores were ordered when its rank gave up


@pytest.fixture(scope="module")
def ask(fork_server: None, kvd: NodeDaemon) -> Iterator[Ask]:
    with stand_process("hung_stand", kvd.socket) as asked:
        yield asked


def test_an_engine_that_only_stores_waits_ever_more_seldom(ask: Ask, kvd: NodeDaemon) -> None:
    told = ask(REQUESTS)
    assert told["stored"], "the daemon takes stores"
    kvd.freeze()
    try:
        told = ask(REQUESTS)
    finally:
        kvd.thaw()
    assert told["gave_up"], "each request gets blocks that stores still read"
    pauses = 1 + math.log2(1 + told["seconds"] / FIRST_PAUSE_S)
    assert told["gave_up"] <= AT_ONCE * pauses
    wait_until(lambda: ask(4)["stored"] > 0, "stores go to it again", 60.0)
