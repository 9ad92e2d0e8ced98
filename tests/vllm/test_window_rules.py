"""Which blocks of a request are stored, and which of a window never, by vLLM's own records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kvd_client.integrations.vllm.scheduling.scheduler import KvdConnectorScheduler

WIDTH = 2
BLOCKS = [0, 3, 4, 5, 0, 6, 7, 0, 8]
CONTEXT = ReqContext(req_id="r")


def scheduler_of(window: int | None, *, recurrent: bool = False) -> Any:
    """Records of one request in one group, of which two blocks were offered already."""
    made: Any = object.__new__(KvdConnectorScheduler)
    group = SimpleNamespace(requires_cow_source=recurrent, sliding_window_size_in_chunks=window)
    state = SimpleNamespace(block_ids=list(BLOCKS), next_stored_chunk_idx=2)
    made.config = SimpleNamespace(kv_group_configs=[group])
    made._req_status = {"r": SimpleNamespace(group_states=[state], req_context=CONTEXT)}
    made._width = WIDTH
    made._next_look = {}
    made.manager = SimpleNamespace(
        groups={0: SimpleNamespace(index=0)}, block_of=lambda _key, _context: 1
    )
    return made


@pytest.mark.parametrize(
    ("window", "recurrent", "whole"),
    [
        (None, False, [False, True, False, False, False]),
        (1, False, [False, False, False, False, False]),
        (1, True, [True] * 5),
    ],
)
def test_a_block_with_a_gap_or_behind_a_window_is_not_whole(
    window: int | None, recurrent: bool, whole: list[bool]
) -> None:
    made = scheduler_of(window, recurrent=recurrent)
    assert [made._is_whole(CONTEXT, 0, block) for block in range(5)] == whole


def test_a_window_is_offered_from_where_it_is_on() -> None:
    made = scheduler_of(1)
    made._req_status["r"].group_states[0].block_ids = list(range(1, 10))
    assert [made._is_whole(CONTEXT, 0, block) for block in range(5)] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("window", "offered_from"), [(None, 1), (1, 2)])
def test_a_failed_store_is_offered_again_only_where_blocks_stay(
    window: int | None, offered_from: int
) -> None:
    made = scheduler_of(window)
    status = made._req_status["r"]
    made._rewind(status, {make_offload_key(b"hash", 0)})
    assert status.group_states[0].next_stored_chunk_idx == offered_from


@pytest.mark.parametrize("window", [None, 1])
def test_what_a_failed_load_did_not_bring_is_offered_once_it_is_computed(
    window: int | None,
) -> None:
    made = scheduler_of(window)
    made._jobs = {7: SimpleNamespace(req_id="r", is_store=False, keys=set())}
    failed: list[Any] = []
    made.manager.tracked, made.manager.fail_load = (lambda context: context), failed.append
    made._fail(7)
    assert failed == [CONTEXT]
    assert made._req_status["r"].group_states[0].next_stored_chunk_idx == 0
