"""From a question to a load: what is asked, what is held, and what is copied where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvd_client import NULL_BLOCK, SchedulerOptions
from tests.client.content import TOKENS as SMALL_TOKENS
from tests.client.engine_rig import FULL, RECURRENT, SLIDING, TOKENS, WIDE, Rig, blocks
from tests.client.fake_daemon import HIT, PENDING, RETRY
from tests.client.small_engine import SmallEngine
from tests.daemon_process import DaemonProcess

WIDE_RECURRENT = replace(RECURRENT, blocks_per_block=4)


def test_a_lookup_asks_for_every_whole_block_of_every_group_in_order() -> None:
    rig = Rig(FULL, WIDE)
    rig.holds("p", 9 * TOKENS, group=0)
    rig.holds("p", 9 * TOKENS, group=1)
    rig.arrive("r", 9 * TOKENS + 3)
    [queries] = rig.daemon.lookups
    assert [(q.run.group, q.run.first_block, list(q.run.block_hashes)) for q in queries] == [
        (0, 0, rig.keys("p", 9 * TOKENS)[0]),
        (1, 0, rig.keys("p", 8 * TOKENS)[1]),
    ]
    assert [query.lease_all for query in queries] == [False, False]


def test_windows_and_states_are_leased_wherever_they_lie() -> None:
    rig = Rig(SLIDING, RECURRENT)
    rig.holds("p", 8 * TOKENS, group=0)
    rig.holds("p", 8 * TOKENS, group=1)
    rig.arrive("r", 9 * TOKENS)
    [queries] = rig.daemon.lookups
    assert [query.lease_all for query in queries] == [True, True]


def test_a_doubtful_block_does_not_keep_those_behind_it_from_being_found() -> None:
    rig = Rig()
    keys = rig.keys("p", 5 * TOKENS)[0]
    rig.daemon.holds(keys)
    rig.daemon.holds(keys[1:2], RETRY)
    rig.daemon.on_page = set(keys)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") is None
    rig.daemon.holds(keys[1:2], HIT)
    rig.now += 0.01
    assert rig.ask("r") is None  # the question leaves again
    assert rig.ask("r") == 5 * TOKENS


def test_a_doubtful_block_that_no_hit_could_use_does_not_defer() -> None:
    rig = Rig(FULL, SLIDING)
    rig.holds("p", 4 * TOKENS, group=0)
    sliding = rig.keys("p", 9 * TOKENS)[1]
    rig.daemon.holds(sliding[2:4])
    rig.daemon.holds(sliding[6:8], PENDING)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 4 * TOKENS


def test_less_than_an_engine_block_is_no_hit() -> None:
    rig = Rig(FULL, WIDE)
    rig.holds("p", 3 * TOKENS, group=0)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 0


def test_a_request_that_is_loading_is_asked_for_nothing_else() -> None:
    rig = Rig()
    rig.begin_load(5)
    asked = len(rig.daemon.lookups)
    rig.now += 10
    assert rig.ask("r") is None
    assert len(rig.daemon.lookups) == asked


def test_a_request_has_one_load_at_a_time() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    rig.ask("r")
    rig.allocate("r", [blocks(0, 5)], 3 * TOKENS)
    with pytest.raises(ValueError, match="loading already"):
        rig.allocate("r", [blocks(0, 5)], 3 * TOKENS)


def test_tokens_that_were_not_found_can_not_be_loaded() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    rig.ask("r")
    for count in (4 * TOKENS, TOKENS + 1):
        with pytest.raises(ValueError, match="were not found"):
            rig.allocate("r", [blocks(0, 5)], count)


def test_a_table_without_a_block_for_each_token_can_not_be_loaded_into() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r", TOKENS) == 2 * TOKENS
    for tables in ([blocks(5, 2)], []):  # the new blocks alone; none
        with pytest.raises(ValueError, match="r: "):
            rig.allocate("r", tables, 2 * TOKENS)
    rig.allocate("r", [blocks(4, 3)], 2 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert (run.first_block, list(run.engine_blocks)) == (1, [5, 6])


def test_a_null_block_is_loaded_into_by_nobody() -> None:
    rig = Rig(SLIDING, options=SchedulerOptions(null_block=0))
    rig.holds("p", 8 * TOKENS)
    rig.arrive("r", 9 * TOKENS)
    assert rig.ask("r") == 8 * TOKENS
    rig.allocate("r", [[0, 0, NULL_BLOCK, 0, 0, 0, 0, 17, 18]], 8 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert (run.first_block, list(run.engine_blocks)) == (7, [17])


def test_of_a_recurrent_block_only_its_last_state_is_loaded() -> None:
    rig = Rig(WIDE_RECURRENT)
    rig.holds("p", 8 * TOKENS)
    rig.arrive("r", 9 * TOKENS)
    assert rig.ask("r") == 8 * TOKENS
    rig.allocate("r", [blocks(10, 9)], 8 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert (run.first_block, list(run.engine_blocks)) == (1, [*[NULL_BLOCK] * 3, 17])


def test_a_failed_load_lets_the_engine_take_the_blocks_back_and_compute_everything() -> None:
    rig = Rig()
    job = rig.begin_load(4)
    assert rig.report(job, done=False).failed_loads == ("r",)
    rig.step(preempted=["r"])
    assert rig.ask("r") == 0
    rig.allocate("r", [blocks(10, 4)])
    rig.daemon.statuses.clear()
    rig.step(("r", [blocks(10, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 4 * TOKENS)[0]


def test_what_was_found_is_not_evicted_before_it_is_loaded(
    tmp_path: Path, shared_directory: Path
) -> None:
    daemon = DaemonProcess(tmp_path, shared_directory)
    daemon.pool_bytes, daemon.extent_bytes = 256 * 4096, 64 * 4096
    daemon.start()
    reader, writer = SmallEngine(daemon.socket, "reader"), SmallEngine(daemon.socket, "writer")
    try:
        reader.wait_usable()
        writer.wait_usable()
        reader.store("a", "hello", 8)
        hashes = reader.arrive("b", "hello", 8)
        assert reader.match("b") == 8 * SMALL_TOKENS
        for number in range(20):  # twice what the pool holds, and each step renews the lease
            writer.store(f"w{number}", f"flood {number}", 26)
            reader.step()
        table = list(range(100, 108))
        reader.scheduler.update_state_after_alloc("b", [table], 8 * SMALL_TOKENS)
        reader.step_until_loaded("b")
        assert reader.finished_loads == {"b"}
        reader.check(table, reader.contents(hashes))
    finally:
        reader.close()
        writer.close()
        daemon.end()


@pytest.mark.parametrize("make", [tuple, np.array])
def test_a_table_may_be_a_tuple_or_an_array(make: Callable[[list[int]], Sequence[int]]) -> None:
    rig = Rig(WIDE)
    rig.holds("p", 8 * TOKENS)
    rig.arrive("r", 9 * TOKENS)
    assert rig.ask("r", 2 * TOKENS) == 6 * TOKENS
    rig.allocate("r", [make(blocks(10, 9))], 6 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert list(run.engine_blocks) == [NULL_BLOCK, NULL_BLOCK, *blocks(12, 6)]


def test_a_load_waits_for_a_free_job_instead_of_being_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd_client.scheduler.sent_jobs.MAX_JOBS_IN_FLIGHT", 1)
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.holds("q", 3 * TOKENS)
    rig.arrive("r", 4 * TOKENS)
    rig.arrive("s", 4 * TOKENS, prefix="q")
    assert (rig.ask("r"), rig.ask("s")) == (3 * TOKENS, 3 * TOKENS)
    rig.allocate("r", [blocks(0, 4)], 3 * TOKENS)
    assert rig.ask("s") is None
    [job] = rig.step().loads
    assert rig.ask("s") is None
    rig.report(job)
    assert rig.ask("s") == 3 * TOKENS
