"""Blocks that a store left out: told as stored only where the daemon has them, and stored later."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from kvd_client.draft import StepDraft
from kvd_client.integrations.vllm.options import KvdOptions
from kvd_client.integrations.vllm.scheduling.manager import KvdManager
from kvd_client.integrations.vllm.scheduling.steps import StepJobs, StepSender
from kvd_client.integrations.vllm.stats import STORES_SKIPPED
from kvd_client.scheduler.store_pause import StorePause

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
CONTEXT = ReqContext(req_id="r")
ROOM = 2


def answers_that_see(shown: list[OffloadKey] | None) -> KvdManager:
    """With vLLM's events on. None: without a session."""
    group = SimpleNamespace(group_id=0, tokens_per_block=16)
    cache = SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16)
    config: Any = SimpleNamespace(groups=[group], cache=cache, enable_kv_cache_events=True)
    made = KvdManager(config, KvdOptions())
    if shown is not None:
        on_page = {bytes(key)[:32] for key in shown}
        session = SimpleNamespace(
            store_threshold=1,
            shows=lambda _group, _account, block_hash: block_hash in on_page,
            present=lambda _group, _account, hashes: np.array([h in on_page for h in hashes]),
            room=lambda _group: ROOM,
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


def sender(*, is_full: bool = False) -> StepSender:
    pause = StorePause(time.monotonic)
    return cast(StepSender, SimpleNamespace(is_full=is_full, draft=StepDraft(), pause=pause))


def test_of_blocks_that_leave_the_device_those_without_room_wait() -> None:
    manager = answers_that_see(KEYS[:1])
    manager.steps = sender()
    near = list(enumerate(reversed(KEYS), 1))  # the tail leaves first
    job = manager.prepare_leaving(near, number=1)
    assert job is not None
    assert (job.keys, job.engine_blocks, job.cut) == (KEYS[1:3], [3, 2], {KEYS[3]})
    request = job.tracked.request
    ((context, used),) = manager.steps.draft.touches
    assert (context, used.block_hashes) == (request.context, [bytes(KEYS[0])[:32]])
    assert manager.steps.draft.finished == [request.request_id]


def test_with_so_many_stores_in_flight_no_other_begins() -> None:
    manager = answers_that_see([])
    manager.steps = sender(is_full=True)
    assert manager.prepare_leaving([(1, KEYS[0])], number=1) is None
    assert manager.prepare_blocks(KEYS[:1], None, CONTEXT) is None, "it is offered again"


def test_while_the_daemon_gives_up_no_store_begins() -> None:
    manager = answers_that_see([])
    manager.steps = sender()
    manager.steps.pause.note(gave_up=True, done=False)
    assert manager.prepare_leaving([(1, KEYS[0])], number=1) is None
    kept = manager.prepare_blocks(KEYS[:1], None, CONTEXT)
    assert kept is not None
    assert kept.keys_to_store == []


@pytest.mark.parametrize(
    ("failed", "left", "missing"),
    [(True, False, set(KEYS[1:3])), (False, True, {KEYS[2]}), (False, False, set())],
    ids=["refused", "left to another", "stored"],
)
def test_of_blocks_that_left_the_device_those_not_stored_are_named(
    failed: bool, left: bool, missing: set[OffloadKey]
) -> None:
    manager = answers_that_see([])
    manager.steps = sender()
    job = manager.prepare_leaving([(2, KEYS[1]), (3, KEYS[2])], number=1)
    assert job is not None
    manager = answers_that_see(KEYS[:2])
    assert manager.end_leaving(job, failed=failed, left=left) == missing


@pytest.mark.parametrize("attempts_before", [0, 2])
def test_a_store_that_failed_is_offered_again_some_times(attempts_before: int) -> None:
    manager = answers_that_see([])
    tracked = manager.tracked(CONTEXT)
    tracked.request.failed_stores = attempts_before
    assert manager.fail_stores(tracked, KEYS) == (attempts_before == 0)
    tracked.has_ended = True
    assert not manager.fail_stores(tracked, KEYS)


def test_behind_a_reuse_filter_what_was_left_to_another_is_not_offered_again() -> None:
    manager = answers_that_see(KEYS[:3])
    session: Any = manager._enter_open_session()
    session.store_threshold = 2
    assert manager.leave_stores(manager.tracked(CONTEXT), KEYS) == set()
    manager.complete_store(KEYS[3:], CONTEXT)
    assert list(manager.take_events()) == [], "an event without blocks"


def test_what_the_reuse_filter_keeps_out_is_told_once_for_each_request() -> None:
    manager = answers_that_see([])
    manager.steps = sender()
    session: Any = manager._enter_open_session()
    session.store_threshold = 2
    manager._is_admitted = lambda *_: False  # type: ignore[method-assign]
    request = ReqContext(req_id="kept out")
    request._offload_key_positions.update((key, 16 + 16 * n) for n, key in enumerate(KEYS))
    for offered in (KEYS[:2], KEYS[:2], KEYS[1:3], KEYS[:3]):
        kept = manager.prepare_blocks(offered, None, request)
        assert kept is not None
        assert kept.keys_to_store == []
    told = [used.block_hashes for _, used in manager.steps.draft.touches]
    assert told == [[bytes(key)[:32] for key in KEYS[:2]], [bytes(KEYS[2])[:32]]]
    assert manager.stats.counts[STORES_SKIPPED] == 2 + 2 + 2 + 3


def test_what_a_step_left_out_is_named_in_that_step() -> None:
    manager = answers_that_see([])
    manager.steps = sender()
    assert manager.prepare_blocks(KEYS, None, CONTEXT) is not None
    assert manager.cut == [("r", set(KEYS[ROOM:]))]
    manager.send_step(StepJobs(itertools.count(1)))
    assert manager.cut == []


def test_after_a_reset_nothing_is_on_its_way_and_what_lives_stores_nothing() -> None:
    manager = answers_that_see([])
    manager.steps = sender()
    near = list(enumerate(KEYS[1:2], 1))
    assert manager.prepare_leaving(near, number=1) is not None
    assert manager.is_being_stored(KEYS[1])
    manager.fail_stores(manager.tracked(CONTEXT), KEYS[2:])
    manager.reset_cache()
    assert not manager.is_being_stored(KEYS[1])
    assert manager.forget_failures() == set()
    kept = manager.prepare_blocks(KEYS[3:], None, CONTEXT)
    assert kept is not None
    assert kept.keys_to_store == []
    manager.begin_anew(CONTEXT)
    kept = manager.prepare_blocks(KEYS[3:], None, CONTEXT)
    assert kept is not None
    assert kept.keys_to_store == KEYS[3:]
