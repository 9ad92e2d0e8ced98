"""Prefill here, decode there: when a hand-off leaves, and that the daemon keeps its word."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_client import NULL_BLOCK, RequestParams, ScheduledRequest, SchedulerOptions
from kvd_client.connection import SchedulerConnection
from kvd_client.draft import HandOffDraft
from kvd_client.scheduler.hand_offs import HandOffQueue
from tests.client.conftest import StartEngine
from tests.client.content import block_hashes
from tests.client.engine_rig import FULL, SLIDING, TOKENS, Rig, blocks
from tests.client.interrupts import interrupted
from tests.client.small_engine import SmallEngine
from tests.daemon_process import DaemonProcess
from tests.faults.probe import Probe

REMOTE = {"do_remote_decode": True}


def prefilled(rig: Rig, count: int = 3, name: str = "r", **params: Any) -> list[list[int]]:
    """A request that computed `count` blocks; its stores are in flight."""
    rig.arrive(name, count * TOKENS, prefix=name, kv_transfer_params={**REMOTE, **params})
    tables = [blocks(0, count) for _ in rig.groups]
    rig.allocate(name, tables)
    rig.step((name, tables, count * TOKENS))
    return tables


def stores_of(rig: Rig) -> list[int]:
    return [job.job_id for job in rig.daemon.last_step.stores]


def hand_offs(rig: Rig) -> list[HandOffDraft]:
    return rig.daemon.last_step.hand_offs


# -- when it leaves, and with what --------------------------------------------------------------


def test_a_hand_off_leaves_once_all_stores_have_ended() -> None:
    rig = Rig()
    tables = prefilled(rig)
    jobs = stores_of(rig)
    rig.scheduler.request_finished("r", tables)
    rig.step()
    assert not hand_offs(rig)
    rig.report(*jobs)
    assert rig.scheduler.has_pending_work()
    rig.step()
    (sent,) = hand_offs(rig)
    assert sent.context.request_id == "r"
    assert [run.block_hashes for run in sent.runs] == rig.keys("r", 3 * TOKENS)
    rig.step()
    assert not hand_offs(rig)
    assert not rig.scheduler.has_pending_work()


def test_blocks_that_are_stored_at_the_request_s_end_are_waited_for() -> None:
    rig = Rig()
    tables = prefilled(rig)
    rig.report(*stores_of(rig), done=False)
    rig.scheduler.request_finished("r", tables)
    rig.step()
    assert rig.stored_hashes() == rig.keys("r", 3 * TOKENS)[0]
    assert not hand_offs(rig)
    rig.report(*stores_of(rig))
    rig.step()
    assert len(hand_offs(rig)) == 1


def test_with_nothing_in_flight_the_next_step_carries_it() -> None:
    rig = Rig()
    tables = prefilled(rig)
    rig.report(*stores_of(rig))
    rig.scheduler.request_finished("r", tables)
    assert rig.scheduler.has_pending_work()
    rig.step()
    assert len(hand_offs(rig)) == 1


def test_what_was_loaded_is_handed_off_too() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS, kv_transfer_params=REMOTE)
    assert rig.ask("r") == 3 * TOKENS
    rig.allocate("r", [blocks(0, 5)], 3 * TOKENS)
    rig.report(*rig.step().loads)
    rig.report(*rig.step(("r", [blocks(0, 5)], 5 * TOKENS)).stores)
    rig.scheduler.request_finished("r", [blocks(0, 5)])
    rig.step()
    (sent,) = hand_offs(rig)
    assert [run.block_hashes for run in sent.runs] == rig.keys("p", 5 * TOKENS)


def test_of_a_sliding_window_what_the_engine_still_holds_is_handed_off() -> None:
    rig = Rig(FULL, SLIDING)
    prefilled(rig, 4)
    rig.report(*stores_of(rig))
    rig.scheduler.request_finished("r", [blocks(0, 4), [NULL_BLOCK, NULL_BLOCK, 2, 3]])
    rig.step()
    (sent,) = hand_offs(rig)
    full, sliding = rig.keys("r", 4 * TOKENS)
    assert [run.block_hashes for run in sent.runs] == [full, sliding[2:]]


def test_a_request_that_decodes_here_is_not_handed_off() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    rig.report(*rig.step(("r", [blocks(0, 3)], 3 * TOKENS)).stores)
    rig.scheduler.request_finished("r", [blocks(0, 3)])
    rig.step()
    assert not hand_offs(rig)


def test_after_a_reset_nothing_is_handed_off() -> None:
    rig = Rig()
    tables = prefilled(rig)
    rig.scheduler.request_finished("r", tables)
    rig.scheduler.reset_cache()
    rig.step()
    assert not hand_offs(rig)
    rig.report(1)
    rig.step()
    assert not hand_offs(rig)


def test_without_a_daemon_a_hand_off_holds_nobody_up() -> None:
    rig = Rig()
    tables = prefilled(rig)
    rig.report(*stores_of(rig))
    rig.scheduler.request_finished("r", tables)
    rig.daemon.is_there = False
    rig.step()
    rig.daemon.is_there = True
    rig.step()
    assert not hand_offs(rig)
    assert not rig.scheduler.has_pending_work()


def test_a_large_hand_off_leaves_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FULL, FULL)
    prefilled(rig, 5)
    rig.report(*stores_of(rig))
    rig.scheduler.request_finished("r", [blocks(0, 5)] * 2)
    monkeypatch.setattr("kvd_client.scheduler.hand_offs.MAX_KEYS_PER_MESSAGE", 4)
    sent: list[list[bytes]] = [[], []]
    while rig.scheduler.has_pending_work():
        rig.step()
        assert rig.daemon.last_step.count_keys() <= 4
        for part in hand_offs(rig):
            for run in part.runs:
                sent[run.group] += run.block_hashes
    assert sent == rig.keys("r", 5 * TOKENS)


@pytest.mark.parametrize(
    ("asked", "deadline_ms"),
    [
        (1500, 1500),
        (None, 7000),
        ("soon", 7000),
        (True, 7000),
        (-1, 7000),
        (float("nan"), 7000),
        (1e12, 600_000),
    ],
)
def test_the_deadline_is_the_request_s_or_the_option_s(asked: object, deadline_ms: int) -> None:
    params = RequestParams(kv_transfer_params={**REMOTE, "hand_off_ms": asked})
    assert params.hand_off_ms(SchedulerOptions(hand_off_s=7)) == deadline_ms


def test_the_step_s_message_says_it_all() -> None:
    rig = Rig()
    tables = prefilled(rig, hand_off_ms=1234)
    rig.report(*stores_of(rig))
    rig.scheduler.request_finished("r", tables)
    rig.step()
    (message,) = rig.daemon.last_step.to_proto(1).hand_offs
    assert (message.deadline_ms, message.context.request_id) == (1234, "r")
    assert message.runs[0].hashes == b"".join(rig.keys("r", 3 * TOKENS)[0])


# -- with a real daemon, real movers, real shared memory ----------------------------------------

BLOCKS = 48
POOL_BLOCKS = 512


@pytest.fixture
def daemon(tmp_path: Path, shared_directory: Path) -> Iterator[DaemonProcess]:
    """A pool of POOL_BLOCKS of the small engine's blocks."""
    running = DaemonProcess(tmp_path, shared_directory)
    running.pool_bytes, running.extent_bytes = POOL_BLOCKS * 4096, 64 * 4096
    running.start()
    yield running
    running.end()


def prefill_and_die(daemon: DaemonProcess, log: Path, milliseconds: int) -> int:
    """Run a prefill engine until it has handed off, kill -9 it; blocks that it had loaded."""
    engine = Probe(daemon.socket, "prefill", log)
    try:
        engine.wait_usable()
        order = {"prefix": "prompt", "count": BLOCKS, "milliseconds": milliseconds}
        return int(engine.ask("hand_off", **order)["loaded"])
    finally:
        engine.kill()


def flood(engine: SmallEngine, name: str) -> None:
    """Store more than the pool holds."""
    for number in range(4):
        engine.store(f"{name}{number}", f"{name} {number}", 200)


def test_a_decode_engine_loads_all_that_a_dead_prefill_engine_left(
    daemon: DaemonProcess, start_engine: StartEngine, tmp_path: Path
) -> None:
    other, decode = start_engine("other"), start_engine("decode")
    other.store("shared", "prompt", 8)
    assert prefill_and_die(daemon, tmp_path / "prefill.log", 60_000) == 8
    flood(other, "flood")
    assert decode.load("d", "prompt", BLOCKS) == BLOCKS
    decode.step_until_idle()
    flood(other, "again")
    assert decode.load("e", "prompt", BLOCKS) == 0


def test_what_nobody_fetched_can_be_evicted_after_the_deadline(
    daemon: DaemonProcess, start_engine: StartEngine, tmp_path: Path
) -> None:
    other, decode = start_engine("other"), start_engine("decode")
    prefill_and_die(daemon, tmp_path / "prefill.log", 500)
    time.sleep(1.0)
    flood(other, "flood")
    assert decode.load("late", "prompt", BLOCKS) == 0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"), [(HandOffQueue, "put_into"), (SchedulerConnection, "send_step")]
)
def test_what_an_interrupted_step_was_to_hand_off_is_held(
    start_engine: StartEngine, owner: type, name: str, *, after: bool
) -> None:
    engine, other = start_engine("prefill"), start_engine("other")
    engine.arrive("r", "prompt", BLOCKS, kv_transfer_params=REMOTE)
    table = engine.table(BLOCKS, 0)
    engine.compute(table, engine.contents(block_hashes("prompt", BLOCKS)))
    engine.scheduler.update_state_after_alloc("r", [table], 0)
    engine.step(ScheduledRequest("r", [table], BLOCKS * TOKENS))
    engine.step_until_idle()
    engine.scheduler.request_finished("r", [table])
    with interrupted(owner, name, after=after):
        engine.step()
    engine.step_until_idle()
    flood(other, "flood")
    assert other.load("d", "prompt", BLOCKS) == BLOCKS
