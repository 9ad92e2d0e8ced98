"""Lazy mode where it cannot be: refused as the first part of an engine is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kvd_client.integrations.vllm.connector import KvdConnector
from tests.vllm.configurations import configure


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_rank_refuses_it_too_so_that_vllm_keeps_no_connector_of_the_refused_engine(
    model: Path, role: KVConnectorRole
) -> None:
    made = configure(model, {"store_mode": "lazy", "blocks_per_chunk": 2})
    with pytest.raises(ValueError, match="join 2 of them"):
        KvdConnector(made.vllm, role, made.cache)
