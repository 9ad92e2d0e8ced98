"""Blocks that a store left to another engine's: told as stored only where the daemon has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from kvd_client.integrations.vllm.options import KvdOptions
from kvd_client.integrations.vllm.scheduling.manager import KvdManager

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
CONTEXT = ReqContext(req_id="r")


def answers_that_see(shown: list[OffloadKey] | None) -> KvdManager:
    """With vLLM's events on. None: without a session."""
    group = SimpleNamespace(group_id=0, tokens_per_block=16)
    cache = SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16)
    config: Any = SimpleNamespace(groups=[group], cache=cache, enable_kv_cache_events=True)
    made = KvdManager(config, KvdOptions())
    if shown is not None:
        on_page = {bytes(key)[:32] for key in shown}
        session = SimpleNamespace(
            store_threshold=1, shows=lambda _group, _account, block_hash: block_hash in on_page
        )
        made._enter_open_session = lambda: session  # type: ignore[method-assign]
    made.on_new_request(CONTEXT)
    return made


@pytest.mark.parametrize(
    ("shown", "offered_again"),
    [(KEYS[:3], {KEYS[3]}), ([], set(KEYS)), (None, set())],
    ids=["a page with most", "a page without", "no session"],
)
def test_only_what_the_page_shows_is_told_as_stored(
    shown: list[OffloadKey] | None, offered_again: set[OffloadKey]
) -> None:
    manager = answers_that_see(shown)
    assert manager.leave_stores(manager.tracked(CONTEXT), KEYS) == offered_again
    manager.complete_store(KEYS, CONTEXT)
    told = [key for event in manager.take_events() for key in event.keys]
    assert told == (shown or [])
