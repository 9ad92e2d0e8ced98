"""A request that goes on with more input, as speech does: what is stored of it is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import Ask, stand_process

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def ask(fork_server: None, kvd: NodeDaemon) -> Iterator[Ask]:
    """Runs a request on a stand: vLLM's scheduler, connector and worker hooks without a model."""
    with stand_process("streaming_stand", kvd.socket) as asked:
        yield asked


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("lengths", [(64, 64), (40, 8, 100), (16, 15, 1, 33)])
def test_blocks_of_later_input_are_stored_from_where_they_lie(
    ask: Ask, lengths: tuple[int, ...], alone: bool
) -> None:
    told = ask((f"{lengths} {alone}", lengths, alone))
    assert len(told["right"]) >= sum(lengths) // BLOCK_TOKENS - 1, "its last block ends with it"
    assert all(told["right"]), told
