"""With priorities vLLM names blocks that it then does not compute; none of them is served."""

from __future__ import annotations

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process

BLOCK_TOKENS = 16


@pytest.mark.parametrize("store_mode", ["eager", "lazy"])
def test_a_block_whose_request_was_preempted_before_it_was_computed_is_never_read(
    fork_server: None, kvd: NodeDaemon, store_mode: str
) -> None:
    with stand_process("priority_stand", kvd.socket, {"store_mode": store_mode}) as run:
        told = run(store_mode)
    assert told["computed"] == 12 * BLOCK_TOKENS, "it was preempted in another step"
    assert told["began again"] > 0
    assert told["audited"] > 20
    assert told["left"] == {}
