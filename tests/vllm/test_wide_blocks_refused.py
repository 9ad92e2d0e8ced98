"""Blocks of more engine blocks than kvd allows: refused as the first part of an engine is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kvd_client.integrations.vllm.connector import KvdConnector
from kvd_client.integrations.vllm.spec import KvdOffloadingSpec
from tests.vllm.configurations import BLOCK_TOKENS, configure


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize(
    ("option", "joined"),
    [
        ({"blocks_per_chunk": 65}, 65),
        ({"block_size": 65 * BLOCK_TOKENS}, 65),
        ({"blocks_per_chunk": 1 << 40}, 1 << 40),
    ],
)
def test_a_rank_refuses_them_with_the_option_before_it_asks_the_daemon(
    model: Path, role: KVConnectorRole, option: dict[str, Any], joined: int
) -> None:
    made = configure(model, option)
    with pytest.raises(ValueError, match=f"blocks_per_chunk is {joined}, .* kvd allows 64"):
        KvdConnector(made.vllm, role, made.cache)


def test_as_many_as_it_allows_are_taken(model: Path) -> None:
    made = configure(model, {"blocks_per_chunk": 64})
    [group] = made.namespace().groups
    assert group.blocks_per_block == 64
    assert KvdOffloadingSpec(made.offloading).blocks_per_chunk == 64
