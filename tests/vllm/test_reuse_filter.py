"""A daemon that stores what comes for the second time, and a prompt that takes several steps."""

from __future__ import annotations

from collections.abc import Callable

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process

LENGTH = 320  # tokens of the prompt, of which a step computes 128
TIMES = 6  # a store may be put off while the daemon makes room for it


def test_all_of_a_prompt_is_stored_when_it_comes_again(
    fork_server: None, make_daemon: Callable[[], NodeDaemon]
) -> None:
    daemon = make_daemon()
    daemon.flags["store-threshold"] = 2
    daemon.start()
    with stand_process("drawn_stand", daemon.socket, [(16,), (16, 40)], {}) as ask:
        found = [ask(("served", f"for the {n}th time", LENGTH))["found"] for n in range(TIMES)]
    assert found[:2] == [0, 0]
    assert found[-1] == LENGTH - 16, "all but the block that it must compute"
