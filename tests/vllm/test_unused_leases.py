"""What a request found in kvd and does not load, since the device has it."""

from __future__ import annotations

from collections.abc import Callable

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process

BLOCKS = 10  # of 16 tokens and a KiB each, of every prompt
DECODERS = 3
POOL_BYTES, LEASE_SHARE = 2 << 20, 0.01  # 20 blocks: less than the decoders find


def test_a_request_that_loads_nothing_leases_nothing_while_it_decodes(
    fork_server: None, make_daemon: Callable[[], NodeDaemon]
) -> None:
    daemon = make_daemon()
    daemon.pool_bytes, daemon.flags["lease-share"] = POOL_BYTES, LEASE_SHARE
    daemon.start()
    with stand_process("leases_stand", daemon.socket) as ask:
        cached = ask((DECODERS, BLOCKS * 16))
    assert cached["again"] == BLOCKS * 16
    assert set(cached.values()) == {BLOCKS * 16}
