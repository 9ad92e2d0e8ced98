"""Another connector's load into blocks that kvd still stores from."""

from __future__ import annotations

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
