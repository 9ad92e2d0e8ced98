"""The client with a real daemon, real movers and real shared memory; every byte checked."""

from __future__ import annotations

import time

import pytest

from kvd_client import ScheduledRequest, StepPlan
from kvd_client.connection import MAX_QUEUED_MESSAGES
from kvd_client.draft import BlockRun, JobDraft, QueryDraft, StepDraft
from kvd_proto.limits import MAX_PARTS_PER_STEP
from kvd_proto.v1 import common_pb2
from tests.client.conftest import StartEngine
from tests.client.content import TOKENS, block_hashes
from tests.client.small_engine import IMPATIENT, SmallEngine
from tests.daemon_process import DaemonProcess
from tests.waiting import wait_until


def test_a_restarted_engine_loads_what_it_stored(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.store("a", "hello", 8)
    assert len(engine.stored) == 8
    engine.close()
    again = start_engine()
    assert again.load("b", "hello", 12) == 8


def test_two_engines_share(start_engine: StartEngine) -> None:
    one, two = start_engine("one"), start_engine("two")
    one.store("a", "hello", 6)
    assert two.load("b", "hello", 6) == 6


def test_two_ranks_store_and_load_their_shards(start_engine: StartEngine) -> None:
    engine = start_engine(world_size=2)
    engine.store("a", "hello", 5)
    assert engine.load("b", "hello", 5) == 5


def test_a_store_that_is_flushed_at_once_waits_for_none_that_its_step_computes(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(flush_timeout_s=2.0)  # one that waited would end so, and fail
    ended, running = engine.arrive("ended", "one", 1), engine.arrive("running", "two", 1)
    engine.step(
        ScheduledRequest("ended", [[0]], TOKENS - 1), ScheduledRequest("running", [[1]], TOKENS - 1)
    )
    engine.compute([0, 1], engine.contents([*ended, *running]))
    engine.scheduler.request_finished("ended", [[0]], TOKENS)
    engine.arrive("new", "three", 1)  # has the ended one's block
    scheduled = [ScheduledRequest("running", [[1]], TOKENS), ScheduledRequest("new", [[0]], 1)]
    plan, _ = engine.step(*scheduled, overwrite=lambda: engine.ranks[0].kv.wipe(0, 1))
    assert (plan.flush, len(plan.stores)) == (plan.computed_stores, 1)
    engine.step_until_idle()
    assert set(engine.stored) == {*ended, *running}
    assert engine.load("again", "one", 1) == 1


def test_stores_in_flight_at_a_kill_end_and_the_engine_goes_on(
    daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    engine = start_engine()
    hashes = engine.arrive("a", "hello", 64)
    table = [list(range(64))]
    engine.compute(table[0], engine.contents(hashes))
    plan = engine.scheduler.build_step([ScheduledRequest("a", table, 64 * TOKENS)])
    daemon.kill()
    engine.ranks[0].worker.start_step(plan)
    engine.ranks[0].worker.finish_step(plan)
    engine.scheduler.request_finished("a", table)
    engine.step_until_idle()


def test_a_load_submitted_before_a_kill_fails_once_its_mover_is_dead(
    daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    engine = start_engine()
    engine.store("a", "hello", 8)
    engine.arrive("b", "hello", 8)
    found = engine.match("b")
    assert found == 8 * TOKENS
    daemon.freeze()
    engine.scheduler.update_state_after_alloc("b", [list(range(100, 108))], found)
    engine.step()
    for _ in range(20):
        engine.step()
        time.sleep(0.01)
    assert not engine.failed_loads
    daemon.kill()
    engine.step_until_loaded("b")
    assert engine.failed_loads == {"b"}
    assert engine.scheduler.get_num_new_matched_tokens("b", 0) == 0


def test_a_hit_goes_without_while_a_frozen_daemon_ends_no_job(
    daemon: DaemonProcess, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(**IMPATIENT)
    engine.store("a", "hello", 8)
    monkeypatch.setattr("kvd_client.scheduler.sent_jobs.MAX_JOBS_IN_FLIGHT", 1)
    table = [list(range(100, 108))]
    engine.arrive("storing", "other", 8)
    engine.arrive("b", "hello", 12)
    assert engine.match("b") == 8 * TOKENS
    daemon.freeze()
    plan = engine.scheduler.build_step([ScheduledRequest("storing", table, 8 * TOKENS)])
    assert plan.stores
    for _ in range(MAX_QUEUED_MESSAGES // 2):  # with all of them the session would be given up
        answer = engine.scheduler.get_num_new_matched_tokens("b", 0)
        if answer is not None:
            break
        engine.step()
        time.sleep(0.01)
    assert answer == 0
    daemon.thaw()
    engine.ranks[0].worker.start_step(plan)
    engine.ranks[0].worker.finish_step(plan)
    engine.scheduler.request_finished("storing", table)
    engine.step_until_idle()


def test_a_frozen_daemon_never_holds_a_step_up_for_long(
    daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    engine = start_engine(**IMPATIENT)
    engine.store("a", "hello", 8)
    daemon.freeze()
    # What the daemon holds up it holds up in every round; what the machine does, hardly in all.
    slowest: list[float] = []
    while not slowest or (slowest[-1] >= 0.1 and len(slowest) < 8):
        slowest.append(slowest_step(engine, f"round{len(slowest)}-"))
    assert min(slowest) < 0.1, slowest
    daemon.thaw()
    deadline = time.monotonic() + 20
    while engine.load(f"z{time.monotonic()}", "hello", 8) < 8:
        assert time.monotonic() < deadline, "the engine does not find its daemon again"
        time.sleep(0.05)


def slowest_step(engine: SmallEngine, name: str) -> float:
    """Of 60 steps, each with a request whose blocks the page shows and nobody answers for."""
    slowest = 0.0
    for number in range(60):
        engine.arrive(f"{name}{number}", "hello", 8)
        started = time.monotonic()
        found = engine.scheduler.get_num_new_matched_tokens(f"{name}{number}", 0)
        engine.step()
        slowest = max(slowest, time.monotonic() - started)
        assert not found
        time.sleep(0.005)
    return slowest


def test_an_absent_daemon_costs_nothing(tmp_path: object) -> None:
    engine = SmallEngine(f"{tmp_path}/nobody.sock")
    engine.store("a", "hello", 8)
    assert engine.load("b", "hello", 8) == 0
    assert engine.connection.blocking_calls == 0
    engine.close()


def test_partial_first_and_last_blocks_are_loaded(start_engine: StartEngine) -> None:
    engine = start_engine(width=4)
    engine.store("a", "hello", 3)
    # 11 engine blocks and the token that must be computed; the device has the first 2.
    hashes = engine.arrive("b", "hello", 3, more_tokens=0)
    table = list(range(100, 112))
    contents = engine.contents(hashes)
    engine.compute(table[:2], contents[:2])
    assert engine.match("b", computed=2 * TOKENS) == 9 * TOKENS
    engine.scheduler.update_state_after_alloc("b", [table], 9 * TOKENS)
    engine.step_until_loaded("b")
    assert engine.finished_loads == {"b"}
    engine.check(table[:11], contents[:11])
    assert not engine.ranks[0].kv.read(table[11]).any()


def test_a_preempted_request_finds_what_it_had_stored(start_engine: StartEngine) -> None:
    engine = start_engine()
    hashes = engine.arrive("a", "hello", 8)
    table = list(range(8))
    engine.scheduler.update_state_after_alloc("a", [table], 0)
    engine.compute(table, engine.contents(hashes))
    plan = engine.scheduler.build_step([ScheduledRequest("a", [table], 8 * TOKENS)])
    engine.ranks[0].worker.start_step(plan)
    engine.ranks[0].worker.finish_step(plan)
    flushing, _ = engine.step(preempted=["a"])
    assert flushing.flush == plan.stores
    engine.ranks[0].kv.wipe(0, 8)  # the flush has ended: the blocks may be anybody's
    assert engine.match("a") == 8 * TOKENS
    table = list(range(50, 58))
    engine.scheduler.update_state_after_alloc("a", [table], 8 * TOKENS)
    engine.step_until_loaded("a")
    engine.check(table, engine.contents(hashes))


def test_unregister_returns_when_the_mover_is_gone(
    daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    engine = start_engine()
    [mover] = daemon.movers()
    assert engine.ranks[0].worker.unregister()
    assert mover not in daemon.movers()


def test_a_second_live_engine_of_the_same_name_is_refused_and_says_so(
    daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    start_engine("same")
    second = SmallEngine(daemon.socket, "same")
    deadline = time.monotonic() + 20
    while "same" not in second.connection.problem:
        assert time.monotonic() < deadline, second.connection.problem
        time.sleep(0.01)
    assert not second.connection.wait_usable(1.0)
    second.close()


def test_an_engine_meets_its_daemon_whenever_it_comes(
    daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    daemon.end()
    engine = SmallEngine(daemon.socket)
    engine.store("a", "hello", 4)
    daemon.start()
    engine.wait_usable()
    engine.store("b", "hello", 4)
    assert engine.load("c", "hello", 4) == 4
    engine.close()


def test_a_broken_stream_is_mended_and_the_ranks_register_again(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.store("a", "hello", 6)
    first = engine.connection.session
    assert first is not None
    engine.connection._cancel()
    deadline = time.monotonic() + 15
    while (session := engine.connection.session) is None or session is first:
        assert time.monotonic() < deadline, engine.connection.problem
        engine.step()
        time.sleep(0.01)
    assert engine.load("b", "hello", 6) == 6


def test_a_step_of_a_session_that_is_gone_orders_nothing_in_the_next(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    connection = engine.connection
    hashes = engine.arrive("a", "hello", 4)
    table = [list(range(4))]
    engine.compute(table[0], engine.contents(hashes))

    def meet_another_session(_step: StepDraft) -> None:
        former = connection.sessions
        connection._cancel()
        wait_until(lambda: connection.sessions > former, "another session")
        engine.wait_usable()

    monkeypatch.setattr(engine.scheduler._hand_offs, "put_into", meet_another_session)
    plan = engine.scheduler.build_step([ScheduledRequest("a", table, 4 * TOKENS)])
    monkeypatch.undo()
    assert not plan.stores, "the next step would take them for lost, and fence their blocks no more"
    engine.scheduler.request_finished("a", table)
    engine.step_until_idle()


def test_a_refused_step_fails_its_own_jobs_and_keeps_the_session(start_engine: StartEngine) -> None:
    engine = start_engine()
    connection = engine.connection
    context = common_pb2.ReqContext(request_id="bad")
    bad = JobDraft(10_000, context, [BlockRun(7, 0, [bytes(32)], [0])])  # there is no group 7
    assert connection.send_step(StepDraft(stores=[bad], finished=["nobody"]))
    ended: list[tuple[int, bool]] = []
    deadline = time.monotonic() + 30
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended += connection.take_ended()
    assert ended == [(10_000, False)]
    assert connection.refusals["INVALID_ARGUMENT"] == 1
    engine.store("a", "hello", 8)
    assert engine.load("b", "hello", 8) == 8
    assert connection.sessions == 1


def test_a_refused_lookup_says_why_in_the_log(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    connection = start_engine().connection
    context = common_pb2.ReqContext(request_id="bad")
    asked = QueryDraft(context, BlockRun(7, 0, [bytes(32)]), lease_all=False)
    call = connection.start_lookup([asked])
    connection.gather([call], time.monotonic() + 30)
    assert not connection.take_answers(call)
    assert connection.refusals["INVALID_ARGUMENT"] == 1
    assert "lookup refused: INVALID_ARGUMENT" in caplog.text
    assert "group 7" in caplog.text


def test_more_loads_in_a_step_than_a_message_has_all_hit(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.store("a", "hello", 1)
    names = [f"r{number}" for number in range(MAX_PARTS_PER_STEP + 100)]
    draft = StepDraft()
    [content] = block_hashes("hello", 1)
    for number, name in enumerate(names):
        context = common_pb2.ReqContext(request_id=name)
        run = BlockRun(0, 0, [content], [number % 100])
        draft.loads.append(JobDraft(1000 + number, context, [run]))
    assert engine.connection.send_step(draft)
    jobs = tuple(draft.job_ids())
    engine.ranks[0].worker.start_loads(StepPlan(loads=jobs))
    done: dict[int, bool] = {}
    deadline = time.monotonic() + 60
    while len(done) < len(jobs) and time.monotonic() < deadline:
        time.sleep(0.01)
        done |= {end.job_id: end.done for end in engine.ranks[0].worker.get_finished().ended}
    assert [number for number in jobs if not done.get(number)] == []
    assert engine.connection.sessions == 1


def test_what_an_id_that_comes_again_has_found_is_not_evicted_before_it_loads_it(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(block_bytes=1 << 16)
    engine.store("first", "hello", 8)
    for _ in range(2):
        hashes = engine.arrive("r", "hello", 8)
        assert engine.match("r") == 8 * TOKENS
    for number in range(3):  # more than the pool holds
        engine.store(f"other {number}", f"other {number}", 200, first_block=50)
    assert engine.match("r") == 8 * TOKENS
    table = engine.table(8, 0)
    engine.start_load("r", 8 * TOKENS, table)
    engine.step_until_loaded("r")
    assert "r" in engine.finished_loads
    engine.check(table, engine.contents(hashes))


def test_a_message_that_only_a_later_daemon_knows_is_said_and_costs_no_session(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    connection = engine.connection
    of_number_127 = b"\xfa\x07\x01x"
    with connection._changed:
        connection._put(lambda: of_number_127)
    wait_until(lambda: connection.refusals["UNKNOWN_MESSAGE"] == 1, "its refusal")
    assert "of a later release" in connection.problem
    engine.store("a", "hello", 4)
    assert engine.load("b", "hello", 4) == 4
    assert connection.sessions == 1
