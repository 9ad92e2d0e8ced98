"""How often the scheduler's thread waits, counted; and what it tells of its waits."""

from __future__ import annotations

import pytest

from kvd_client import SchedulerOptions, SchedulerStats
from tests.client.content import TOKENS as SMALL_TOKENS
from tests.client.engine_rig import TOKENS, Rig, blocks
from tests.client.fake_daemon import RETRY
from tests.client.small_engine import SmallEngine

REQUESTS = [f"r{number}" for number in range(64)]


def test_64_requests_without_a_hit_make_no_blocking_call(engine: SmallEngine) -> None:
    engine.store("a", "hello", 6)
    before = engine.connection.blocking_calls
    for name in REQUESTS:
        engine.arrive(name, f"other {name}", 6)
    found = [engine.scheduler.get_num_new_matched_tokens(name, 0) for name in REQUESTS]
    assert found == [0] * 64
    engine.step()
    assert engine.connection.blocking_calls == before


def test_64_requests_with_hits_make_one_blocking_call_in_a_step(engine: SmallEngine) -> None:
    for name in REQUESTS:
        engine.store(f"first-{name}", name, 3)
    before = engine.connection.blocking_calls
    for name in REQUESTS:
        engine.arrive(name, name, 3)
    found: dict[str, int | None] = dict.fromkeys(REQUESTS)
    steps = 0
    while None in found.values():
        for name in [name for name, tokens in found.items() if tokens is None]:
            found[name] = engine.scheduler.get_num_new_matched_tokens(name, 0)
        engine.step()
        steps += 1
        assert engine.connection.blocking_calls - before <= steps
    assert set(found.values()) == {3 * SMALL_TOKENS}


def test_64_requests_answered_in_time_are_one_call_together() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = False
    for name in REQUESTS:
        rig.holds(name, 3 * TOKENS)
        rig.arrive(name, 5 * TOKENS, prefix=name)
    assert {rig.ask(name) for name in REQUESTS} == {3 * TOKENS}
    assert rig.daemon.blocking_calls == 1
    for number, name in enumerate(REQUESTS):
        rig.allocate(name, [blocks(5 * number, 5)], 3 * TOKENS)
    assert len(rig.step().loads) == 64
    assert len(rig.daemon.steps) == 1


def test_stores_loads_and_ends_of_64_requests_make_no_blocking_call() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = False
    for number, name in enumerate(REQUESTS):
        rig.arrive(name, 3 * TOKENS, prefix=name)
        assert rig.ask(name) == 0
        rig.allocate(name, [blocks(3 * number, 3)])
    everyone = [(name, [blocks(3 * i, 3)], 3 * TOKENS) for i, name in enumerate(REQUESTS)]
    rig.report(*rig.step(*everyone).stores)
    for name, tables, _ in everyone:
        rig.scheduler.request_finished(name, tables)
    rig.step()
    assert not rig.scheduler.has_pending_work()
    assert rig.daemon.blocking_calls == 0


# -- what it tells ----------------------------------------------------------------------------


def test_each_question_is_told_with_the_time_that_it_held_the_scheduler_up() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = False
    rig.holds("p", 3 * TOKENS)
    gather = rig.daemon.gather

    def slow(call_ids: list[int], deadline_s: float) -> None:
        rig.now += 0.004
        gather(call_ids, deadline_s)

    rig.daemon.gather = slow  # type: ignore[method-assign,assignment]
    rig.arrive("r", 5 * TOKENS)
    rig.arrive("s", 5 * TOKENS, prefix="q")
    rig.ask("r")
    rig.ask("s")
    stats = rig.scheduler.take_stats()
    assert list(stats.lookup_delays_s) == pytest.approx([0.004, 0.0])
    assert stats.deferral_delays_s == ()


def test_a_deferral_is_told_once_it_is_over_from_its_first_question_on() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.daemon.holds(rig.keys("p", 5 * TOKENS)[0][3:4], RETRY)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") is None
    rig.now += 0.06
    rig.step()
    assert rig.ask("r") is None
    assert rig.scheduler.take_stats().deferral_delays_s == ()
    rig.now += 0.06
    rig.step()
    assert rig.ask("r") == 3 * TOKENS
    delays_s = rig.scheduler.take_stats().deferral_delays_s
    assert list(delays_s) == pytest.approx([0.12])


def test_stats_are_told_once() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    rig.ask("r")
    rig.daemon.rooms[0] = 1
    rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    stats = rig.scheduler.take_stats()
    assert (len(stats.lookup_delays_s), stats.blocks_without_room) == (1, 2)
    assert rig.scheduler.take_stats() == SchedulerStats()


def test_blocks_without_room_are_counted_each_time_that_they_are_offered() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    rig.daemon.rooms[0] = 0
    for _ in range(3):
        rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    assert rig.scheduler.take_stats().blocks_without_room == 9


# -- what a request and an engine may set -----------------------------------------------------


@pytest.mark.parametrize("nonsense", [-1, 2.5, "32", True, [16]])
def test_token_counts_that_are_nonsense_are_ignored(nonsense: object) -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS, max_load_tokens=nonsense, max_store_tokens=nonsense)
    assert rig.ask("r") == 3 * TOKENS
    rig.allocate("r", [blocks(0, 5)])
    rig.step(("r", [blocks(0, 5)], 5 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 5 * TOKENS)[0][3:]


def test_what_the_engine_keeps_to_itself_bounds_the_hit() -> None:
    rig = Rig()
    rig.holds("p", 5 * TOKENS)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r", most=2 * TOKENS + 3) == 2 * TOKENS
    assert rig.ask("r", most=0) == 0
    assert rig.ask("r", computed=TOKENS, most=2 * TOKENS) == 2 * TOKENS
    assert rig.ask("r") == 5 * TOKENS


def test_a_bounded_hit_waits_for_no_block_beyond_the_bound() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.daemon.holds(rig.keys("p", 5 * TOKENS)[0][3:4], RETRY)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r", most=3 * TOKENS) == 3 * TOKENS
    assert rig.ask("r") is None


def test_a_request_that_skips_the_lookup_asks_the_daemon_nothing_and_is_stored() -> None:
    rig = Rig(options=SchedulerOptions())
    rig.holds("p", 2 * TOKENS)
    rig.arrive("r", 4 * TOKENS, skip_lookup=True)
    assert rig.ask("r") == 0
    assert rig.daemon.lookups == []
    rig.allocate("r", [blocks(0, 4)])
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 4 * TOKENS)[0][2:]
