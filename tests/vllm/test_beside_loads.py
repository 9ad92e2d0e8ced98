"""Another connector's loads: into blocks that kvd still stores from, and ones that fail."""

from __future__ import annotations

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process
from tests.waiting import wait_until


def test_a_store_ends_before_another_connector_loads_into_its_blocks(
    fork_server: None, kvd: NodeDaemon
) -> None:
    with stand_process("beside_stand", kvd.socket) as ask:
        wait_until(lambda: bool(kvd.movers()))
        (mover,) = kvd.movers()
        assert ask(mover) == {"bytes": [7]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_another_connector_may_have_failed_to_load_is_not_stored(
    fork_server: None, kvd: NodeDaemon, asynchronous: bool
) -> None:
    with stand_process("beside_stand", kvd.socket, asynchronous) as ask:
        told = ask("fail")
        assert told["failed"]
        assert told["found"] == [0, 112]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_blocks_of_a_load_that_failed_are_not_found_before_they_are_computed(
    fork_server: None, kvd: NodeDaemon, asynchronous: bool
) -> None:
    with stand_process("beside_stand", kvd.socket, asynchronous) as ask:
        told = ask("amid")
        assert told["computed"] < 96, "all of it was computed already"
        assert told["found"] == 0
