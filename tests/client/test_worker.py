"""The worker side against a real ring, a real board and a process that stands for the mover."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from kvd_client import StepPlan
from kvd_client.worker.jobs import Half, JobLedger
from kvd_client.worker.registrar import Registrar
from kvd_proto import layout
from tests.client.worker_bench import (
    FAILED,
    LOAD,
    REFUSED,
    STORE,
    Bench,
    MoverStandIn,
)
from tests.waiting import wait_until

PATIENCE_S = 20.0


def test_loads_are_ready_at_the_steps_start(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    bench.worker.start_step(StepPlan(loads=(1, 2)))
    assert mover.ring.take() == [1, 2]
    assert bench.ended() == []
    mover.post(1, LOAD)
    mover.post(2, LOAD, FAILED)
    assert bench.ended() == [(1, True), (2, False)]
    assert bench.ended() == []


def test_stores_are_ready_only_when_computed(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    computed = threading.Event()
    plan = StepPlan(stores=(5,))
    bench.worker.start_step(plan)
    bench.worker.finish_step(plan, lambda: assert_set(computed))  # which fails who waits for it
    assert mover.ring.take() == []
    computed.set()
    assert taken(mover) == [5]


def test_stores_of_earlier_steps_are_ready_at_once(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    bench.worker.start_step(StepPlan(computed_stores=(5,)))
    assert mover.ring.take() == [5]


def test_loads_are_ready_once_earlier_steps_have_left_their_blocks(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    ran = threading.Event()
    bench.worker.start_step(StepPlan(loads=(1, 2)), lambda: assert_set(ran))  # as above
    assert mover.ring.take() == []
    ran.set()
    assert taken(mover) == [1, 2]


def test_stores_that_are_flushed_at_once_are_ready_only_when_computed(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    ran, order = threading.Event(), list[str]()

    def compute() -> None:
        assert_set(ran)
        order.append("computed")

    def post() -> None:
        assert mover.ring.take() == []
        ran.set()
        order.append(f"ready {taken(mover)}")
        mover.post(5, STORE, lane=1)

    poster = threading.Timer(0.05, post)
    poster.start()
    bench.worker.flush_step(StepPlan(computed_stores=(5,), flush=(5,)), compute)
    poster.join()
    assert order == ["computed", "ready [5]"]
    assert bench.ended() == [(5, True)]


def test_loads_whose_wait_failed_are_never_ready_and_stay_their_movers(
    mover: MoverStandIn,
) -> None:
    bench = Bench(mover)
    asked = threading.Event()

    def fail() -> None:
        asked.set()
        raise RuntimeError("an illegal memory access was encountered")

    bench.worker.start_loads(StepPlan(loads=(1,)), fail)
    assert_set(asked)
    bench.worker.finish_step(StepPlan(stores=(2,)), lambda: None)
    assert taken(mover) == [2]
    assert bench.ended() == []
    mover.post(1, LOAD, FAILED)
    assert bench.ended() == [(1, False)]


def test_a_task_that_fails_aside_does_not_end_the_tasks_to_come(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    full = tuple(range(1, layout.RING_ENTRIES + 1))
    bench.worker.start_step(StepPlan(loads=full))
    bench.registrar.by_call = None  # type: ignore[assignment] # the fallback's call raises
    bench.worker.start_step(StepPlan(loads=(90_000,)))
    mover.ring.take()
    bench.worker.finish_step(StepPlan(stores=(90_001,)), lambda: None)
    assert taken(mover) == [90_001]


def test_without_a_thread_the_step_itself_waits_for_its_compute(
    mover: MoverStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, computed = Bench(mover), list[int]()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        bench.worker.finish_step(StepPlan(stores=(5,)), lambda: computed.append(5))
    assert computed == mover.ring.take() == [5]
    bench.worker.finish_step(StepPlan(stores=(6,)), lambda: computed.append(6))
    assert taken(mover) == [6]
    bench.worker.close()


def test_a_failed_compute_gives_its_stores_up(mover: MoverStandIn) -> None:
    bench = Bench(mover)

    def fail() -> None:
        raise RuntimeError("no such kernel")

    bench.worker.finish_step(StepPlan(stores=(5,)), fail)
    deadline = time.monotonic() + PATIENCE_S
    while not (ended := bench.ended()):
        assert time.monotonic() < deadline
    assert ended == [(5, False)]
    assert mover.ring.abandoned(5)
    assert mover.ring.take() == [5]  # its copy ends at once, and fails


def test_a_flush_waits_for_the_board(mover: MoverStandIn) -> None:
    bench = Bench(mover, flush_timeout_s=60.0)
    bench.worker.finish_step(StepPlan(stores=(5,)))
    posting = threading.Event()

    def post() -> None:
        posting.set()
        mover.post(5, STORE, lane=1)

    poster = threading.Timer(0.05, post)
    poster.start()
    bench.worker.start_step(StepPlan(flush=(5,)))
    assert posting.is_set()
    poster.join()
    assert bench.ended() == [(5, True)]
    assert not mover.ring.abandoned(5)


def test_a_flush_that_takes_too_long_abandons_the_store(mover: MoverStandIn) -> None:
    bench = Bench(mover, flush_timeout_s=0.02)
    bench.worker.finish_step(StepPlan(stores=(5,)))
    bench.worker.start_step(StepPlan(flush=(5,), loads=(6,)))
    assert mover.ring.abandoned(5)
    assert bench.ended() == [(5, False)]
    assert mover.ring.take() == [5, 6]


def test_where_no_end_is_heard_all_stores_are_given_up_with_a_late_one(
    mover: MoverStandIn,
) -> None:
    """A mover that ends none of them would hold up the flush of each."""
    bench, computed = Bench(mover, flush_timeout_s=0.02), threading.Event()
    bench.worker.finish_step(StepPlan(stores=(5, 6)))
    bench.worker.finish_step(StepPlan(stores=(7,)))

    def compute() -> None:
        computed.wait()

    bench.worker.finish_step(StepPlan(stores=(8,)), compute)
    bench.worker.start_step(StepPlan(flush=(6,)))
    ended = bench.worker.get_finished().ended
    assert {job.job_id for job in ended} == {5, 6, 7}, "8 is not computed yet"
    assert all(job.given_up and not job.done for job in ended)
    assert all(mover.ring.abandoned(job) for job in (5, 6, 7))
    computed.set()


def test_a_mover_that_ends_stores_is_only_late_with_the_others(mover: MoverStandIn) -> None:
    bench = Bench(mover, flush_timeout_s=0.2)
    bench.worker.finish_step(StepPlan(stores=(5, 6, 7)))
    threading.Timer(0.05, lambda: mover.post(5, STORE, lane=1)).start()
    bench.worker.start_step(StepPlan(flush=(6,)))
    ended = {job.job_id: job for job in bench.worker.get_finished().ended}
    assert {job_id: job.done for job_id, job in ended.items()} == {5: True, 6: False}
    assert not any(job.given_up for job in ended.values())
    assert not mover.ring.abandoned(7)


def test_a_store_given_up_before_it_was_computed_does_not_keep_others_waiting(
    mover: MoverStandIn,
) -> None:
    bench, computed = Bench(mover, flush_timeout_s=0.02), threading.Event()

    def compute() -> None:
        computed.wait()

    bench.worker.finish_step(StepPlan(stores=(5, 6)), compute)
    bench.worker.start_step(StepPlan(flush=(5,)))
    assert mover.ring.abandoned(5)
    assert mover.ring.take() == [5]  # its copy ends at once, with those that began with it
    computed.set()
    wait_until(lambda: mover.ring.take() == [6], "the other one's turn", PATIENCE_S)
    bench.worker.write_off([6])
    assert sorted(bench.ended()) == [(5, False), (6, False)]
    assert mover.ring.take() == []  # once is enough


def test_a_flush_covers_a_store_of_the_same_plan(mover: MoverStandIn) -> None:
    bench = Bench(mover, flush_timeout_s=60.0)
    threading.Timer(0.05, lambda: mover.post(5, STORE, lane=1)).start()
    bench.worker.start_step(StepPlan(flush=(5,), computed_stores=(5,)))
    assert mover.ring.take() == [5]
    assert bench.ended() == [(5, True)]


def test_a_store_that_was_given_up_is_not_reported_again_by_the_board(mover: MoverStandIn) -> None:
    bench = Bench(mover, flush_timeout_s=0.0)
    bench.worker.finish_step(StepPlan(stores=(5,)))
    bench.worker.start_step(StepPlan(flush=(5,)))
    assert bench.ended() == [(5, False)]
    mover.post(5, STORE, FAILED, lane=1)
    assert bench.ended() == []


def test_a_flushed_load_is_waited_for_beyond_the_stores_timeout(mover: MoverStandIn) -> None:
    bench = Bench(mover, flush_timeout_s=0.0)
    bench.worker.start_step(StepPlan(loads=(1,)))
    threading.Timer(0.05, lambda: mover.post(1, LOAD)).start()
    bench.worker.flush_step(StepPlan(flush=(1,)))
    assert bench.ended() == [(1, True)]


def test_a_flushed_load_that_never_ends_is_ended_with_its_mover(mover: MoverStandIn) -> None:
    bench = Bench(mover, flush_timeout_s=0.0, load_flush_timeout_s=0.05)
    bench.worker.start_step(StepPlan(loads=(1,)))
    bench.worker.flush_step(StepPlan(flush=(1,)))
    assert mover.registration.is_dead
    assert bench.ended() == [(1, False)]


def ended_in_the_end(bench: Bench) -> list[tuple[int, bool]]:
    deadline = time.monotonic() + PATIENCE_S
    while not (ended := bench.ended()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return ended


def test_a_load_past_its_deadline_ends_with_its_mover(mover: MoverStandIn) -> None:
    bench = Bench(mover, load_deadline_s=0.05)
    bench.worker.start_step(StepPlan(loads=(1,)))
    bench.worker.finish_step(StepPlan(stores=(2,)))
    deadline = time.monotonic() + PATIENCE_S
    while not mover.registration.wait_dead(0.0):
        assert bench.ended() == [], "its mover may still write"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert mover.ring.leave_asked, "where no signal reaches it"
    bench.registrar.lose()
    assert sorted(ended_in_the_end(bench)) == [(1, False), (2, False)]


def test_a_store_has_no_deadline_of_its_own(mover: MoverStandIn) -> None:
    bench = Bench(mover, load_deadline_s=0.0)
    bench.worker.finish_step(StepPlan(stores=(2,)))
    bench.ended()
    assert not mover.registration.is_unwanted


def test_a_load_that_stands_behind_others_has_time_while_they_end(mover: MoverStandIn) -> None:
    jobs = JobLedger()
    registration = mover.registration
    jobs.begin([1], Half.LOAD, registration)
    job = jobs.open_job(1)
    assert job is not None
    job.is_ready = True
    for age, heard, is_late in [(9, 0, False), (11, 0, True), (11, 2, False), (38, 37, False)]:
        registration.heard_s = job.since_s + heard
        late = jobs.end_overdue_loads(job.since_s + age, deadline_s=10.0)
        assert bool(late) is is_late, (age, heard)
    registration.heard_s = job.since_s + 40
    assert jobs.end_overdue_loads(job.since_s + 41, deadline_s=10.0) == [registration]


def test_a_load_that_was_never_ready_fails_and_its_mover_lives(mover: MoverStandIn) -> None:
    bench = Bench(mover, load_deadline_s=0.05)
    ran = threading.Event()
    bench.worker.start_loads(StepPlan(loads=(1,)), lambda: assert_set(ran))
    assert ended_in_the_end(bench) == [(1, False)]
    ran.set()
    bench.worker.finish_step(StepPlan(stores=(2,)), lambda: None)
    assert taken(mover) == [2], "nor is it ready once the wait is over"
    assert not mover.registration.is_unwanted


def test_an_engine_that_only_waits_rests_longer_and_longer(
    mover: MoverStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(mover)
    slept = Sleeps(monkeypatch)
    bench.worker.rest()
    assert sum(slept.seconds) == 0.0, "nothing has run since now"
    bench.worker.start_step(StepPlan(loads=(1,)))
    rests, began = 0, slept.now
    while slept.now < began + 40.0:
        slept.now += 0.0005  # what a step that runs nothing takes
        bench.worker.rest()
        rests += 1
    assert rests < 5000
    assert max(slept.seconds) <= 0.01
    bench.worker.rest(has_run=True)
    slept.seconds.clear()
    bench.worker.rest()
    assert sum(slept.seconds) < 0.0011, "it has just run something"
    slept.seconds.clear()
    mover.post(1, LOAD)
    slept.now += 5.0
    bench.worker.rest()
    assert slept.seconds == []


def test_the_first_steps_that_only_wait_for_a_load_rest_for_a_moment(
    mover: MoverStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(mover)
    slept = Sleeps(monkeypatch)
    bench.worker.finish_step(StepPlan(stores=(1,)))
    bench.worker.rest()
    assert slept.seconds == [], "a store is waited for by nobody"
    bench.worker.start_step(StepPlan(loads=(2,)))
    bench.worker.rest()
    assert 0.0039 < sum(slept.seconds) < 0.0041, "until the load is so old"
    assert max(slept.seconds) < 0.0003, "it looks for the end meanwhile"
    slept.seconds.clear()
    bench.worker.rest()
    assert 0.0009 < sum(slept.seconds) < 0.0011, "the load is old now"
    slept.seconds.clear()
    mover.post(2, LOAD)
    bench.worker.rest()
    assert slept.seconds == []


def test_a_step_that_only_waits_ends_with_a_new_load(
    mover: MoverStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(mover)
    slept = Sleeps(monkeypatch)
    bench.worker.start_step(StepPlan(loads=(1,)))
    slept.after(0.0025, lambda: mover.post(1, LOAD))
    bench.worker.rest()
    assert 0.0024 < sum(slept.seconds) < 0.0028
    assert bench.ended() == [(1, True)], "the step that began the load says that it has ended"


def test_open_loads_are_looked_for_under_the_lock(
    mover: MoverStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, slept = Bench(mover), Sleeps(monkeypatch)
    bench.worker.start_step(StepPlan(loads=(1,)))
    looked = []

    def newest_load_s(_: JobLedger) -> float:
        looked.append(bench.worker._lock.locked())
        return slept.now

    monkeypatch.setattr(JobLedger, "newest_load_s", property(newest_load_s))
    bench.worker.rest()
    assert looked == [True]
    assert slept.seconds


def test_a_long_wait_looks_at_the_board_less_and_less_often(
    mover: MoverStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(mover)
    bench.worker.start_step(StepPlan(loads=(1,)))
    slept = Sleeps(monkeypatch)
    assert bench.worker.wait([1], 5.0) == {1}
    assert len(slept.seconds) < 1200


class Sleeps:
    """The worker's clock, which only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        self.seconds: list[float] = []
        self._events: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr("kvd_client.worker.worker.time", self)
        monkeypatch.setattr("kvd_client.worker.jobs.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.now += seconds
        while self._events and self._events[0][0] <= self.now:
            self._events.pop(0)[1]()

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Call it in the sleep that reaches that moment."""
        self._events.append((self.now + seconds, happens))


def test_jobs_that_nobody_will_end_are_written_off_once(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    bench.worker.start_step(StepPlan(loads=(1,)))
    bench.worker.finish_step(StepPlan(stores=(2, 3)))
    mover.post(3, STORE, lane=1)
    bench.worker.write_off([1, 2, 3, 9])
    assert sorted(bench.ended()) == [(1, False), (2, False), (3, True)]
    bench.worker.write_off([1, 2, 3, 9])
    assert bench.ended() == []
    assert mover.ring.abandoned(2)


def test_a_load_is_not_written_off_while_its_old_mover_may_still_write(
    mover: MoverStandIn,
) -> None:
    bench = Bench(mover)
    bench.worker.start_step(StepPlan(loads=(1,)))
    bench.registrar.lose()
    bench.worker.write_off([1])
    assert bench.ended() == []
    mover.die()
    assert mover.registration.wait_dead(2.0)
    assert bench.ended() == [(1, False)]


def test_a_submitted_load_fails_only_with_its_movers_death(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    bench.worker.start_step(StepPlan(loads=(1,)))
    bench.registrar.lose()
    assert bench.worker.wait([1], 0.05) == {1}
    assert bench.ended() == []
    mover.die()
    assert mover.registration.wait_dead(2.0)
    assert bench.ended() == [(1, False)]


def test_what_a_dying_mover_said_last_counts(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    bench.worker.start_step(StepPlan(loads=(1, 2)))
    mover.post(1, LOAD)
    bench.registrar.lose()
    mover.die()
    assert mover.registration.wait_dead(2.0)
    assert bench.ended() == [(1, True), (2, False)]


def test_a_refusal_that_comes_before_its_plan_is_reported_with_it(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    mover.post(5, STORE, REFUSED, lane=1)
    assert bench.ended() == []
    bench.worker.finish_step(StepPlan(stores=(5,)))
    assert mover.ring.take() == []
    assert bench.ended() == [(5, False)]
    assert bench.ended() == []


def test_without_a_registration_every_job_fails_at_once() -> None:
    bench = Bench(None)
    bench.worker.start_step(StepPlan(loads=(1,)))
    bench.worker.finish_step(StepPlan(stores=(2,)))
    assert bench.ended() == [(1, False), (2, False)]


def test_a_rank_that_does_not_write_hears_of_stores_and_is_not_held_up(
    mover: MoverStandIn,
) -> None:
    bench = Bench(mover, writer=False)
    bench.worker.finish_step(StepPlan(stores=(5,)))
    assert mover.ring.take() == []
    assert bench.worker.wait([5], 1.0) == set()
    mover.post(5, STORE, lane=1)
    assert bench.ended() == [(5, True)]


def test_a_full_ring_falls_back_to_a_call(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    first = tuple(range(1, layout.RING_ENTRIES + 1))
    bench.worker.start_step(StepPlan(loads=first))
    bench.worker.start_step(StepPlan(loads=(90_000,)))
    deadline = time.monotonic() + PATIENCE_S
    while bench.registrar.by_call != [90_000]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def fill_ring(bench: Bench) -> None:
    bench.worker.start_step(StepPlan(loads=tuple(range(1, layout.RING_ENTRIES + 1))))


def test_stores_given_up_while_the_ring_is_full_are_told_by_one_call(mover: MoverStandIn) -> None:
    """Or they would wait in the mover for their deadline, and whoever wants their blocks, too."""
    bench, computed = Bench(mover, flush_timeout_s=0.02), threading.Event()
    bench.worker.finish_step(StepPlan(stores=(90_001, 90_002)), lambda: assert_set(computed))
    fill_ring(bench)
    bench.worker.start_step(StepPlan(flush=(90_001, 90_002)))
    assert mover.ring.abandoned(90_001)
    assert mover.ring.abandoned(90_002)
    computed.set()
    told = [90_001, 90_002]
    wait_until(lambda: sorted(bench.registrar.by_call) == told, "the call", PATIENCE_S)
    bench.worker.close()
    assert sorted(bench.registrar.by_call) == told, "once is enough"


def test_stores_written_off_while_the_ring_is_full_are_told_by_a_call(mover: MoverStandIn) -> None:
    bench, computed = Bench(mover), threading.Event()
    bench.worker.finish_step(StepPlan(stores=(90_001,)), lambda: assert_set(computed))
    fill_ring(bench)
    bench.worker.write_off([90_001])
    computed.set()
    wait_until(lambda: bench.registrar.by_call == [90_001], "the call", PATIENCE_S)


def test_stores_whose_compute_failed_while_the_ring_is_full_are_told_by_a_call(
    mover: MoverStandIn,
) -> None:
    bench, launched = Bench(mover), threading.Event()

    def fail() -> None:
        launched.wait()
        raise RuntimeError("no such kernel")

    bench.worker.finish_step(StepPlan(stores=(90_001,)), fail)
    fill_ring(bench)
    launched.set()
    wait_until(lambda: bench.registrar.by_call == [90_001], "the call", PATIENCE_S)


def test_a_forgotten_job_is_not_waited_for(mover: MoverStandIn) -> None:
    bench = Bench(mover)
    bench.worker.finish_step(StepPlan(stores=(5,)))
    bench.worker.start_step(StepPlan(forget=(5,)))
    assert bench.worker.wait([5], 1.0) == set()
    assert bench.ended() == []


def test_jobs_wait_a_moment_for_a_registration_that_is_being_made(mover: MoverStandIn) -> None:
    registrar = object.__new__(Registrar)
    registrar._changed = threading.Condition()
    registrar._current = None
    registrar._stopping = False
    registrar._registering = None
    assert registrar.awaited(60.0) is None
    registrar._registering = Future()  # type: ignore[assignment]
    assert registrar.awaited(0.01) is None

    def answer() -> None:
        with registrar._changed:
            registrar._current = mover.registration
            registrar._changed.notify_all()

    threading.Timer(0.05, answer).start()
    assert registrar.awaited(60.0) is mover.registration


def assert_set(event: threading.Event) -> None:
    assert event.wait(20.0)


def taken(mover: MoverStandIn) -> list[int]:
    deadline = time.monotonic() + PATIENCE_S
    while not (ids := mover.ring.take()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return ids
