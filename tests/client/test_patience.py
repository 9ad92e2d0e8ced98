"""A late answer is waited for while computing what the page shows would take longer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvd_client import SchedulerOptions
from kvd_client.connection import MAX_SILENCE_S, SILENCE_S, SchedulerConnection
from kvd_client.draft import BlockRun
from kvd_client.lookup_calls import LookupCalls
from kvd_client.scheduler.pace import LEAST_TOKENS, REMEMBERED_TOKENS, TokenPace
from kvd_client.scheduler.request import GivenUp
from kvd_client.worker.registrar import MAX_MARKING, Registrar
from kvd_proto.v1 import engine_pb2
from tests.client.engine_rig import TOKENS, Rig, blocks
from tests.client.fake_daemon import HIT, MISS, PENDING, RETRY, hashes
from tests.client.small_engine import SmallEngine

SHOWN = 4 * TOKENS


def slow_daemon(token_s: float | None = None, **options: Any) -> Rig:
    """A daemon that doesn't answer, and an engine that takes so long for a token."""
    rig = Rig(options=SchedulerOptions(**options))
    rig.daemon.answers_at_once = rig.daemon.answers_when_waited_for = False
    rig.holds("p", SHOWN)
    if token_s is not None:
        compute(rig, 10 * TOKENS, token_s)
    return rig


def compute(rig: Rig, tokens: int, token_s: float) -> None:
    """A prompt that nobody has, in one step."""
    name = f"other {rig.now}"
    rig.arrive(name, tokens, prefix=name)
    assert rig.ask(name) == 0
    table = [blocks(100, -(-tokens // TOKENS))]
    rig.allocate(name, table)
    rig.step((name, table, tokens))
    rig.now += tokens * token_s
    rig.report()
    rig.scheduler.request_finished(name, table)


def waited(rig: Rig) -> float:
    """How long a request that is just arriving waits in vain."""
    rig.arrive("r", 6 * TOKENS)
    began = rig.now
    while rig.ask("r") is None:
        rig.step()
        rig.now += 0.01
        assert rig.now < began + 60.0, "it waits for ever"
    return rig.now - began


@pytest.mark.parametrize(
    ("token_s", "seconds"),
    [
        (0.01, SHOWN * 0.01),
        (0.05, SHOWN * 0.05),
        (1e-6, 0.1),  # nearly nothing to lose: the least
        (5.0, 10.0),  # the most
        (None, 1.0),  # nothing was computed yet
    ],
)
def test_a_lookup_is_waited_for_as_long_as_computing_would_take(
    token_s: float | None, seconds: float
) -> None:
    assert waited(slow_daemon(token_s)) == pytest.approx(seconds, abs=0.03)


def test_what_a_page_hides_is_waited_for_by_half() -> None:
    rig = slow_daemon(0.01)
    rig.daemon.page_hides_some = True
    assert waited(rig) == pytest.approx((SHOWN + TOKENS / 2) * 0.01, abs=0.03)


def test_the_most_and_the_least_can_be_chosen() -> None:
    assert waited(slow_daemon(5.0, patience_s=2.0)) == pytest.approx(2.0, abs=0.03)
    assert waited(slow_daemon(1e-6, lookup_give_up_s=0.4)) == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("status", [RETRY, PENDING])
def test_doubtful_blocks_defer_a_request_for_what_they_are_worth(status: int) -> None:
    rig = Rig(options=SchedulerOptions(pending_deadline_s=0.1))
    compute(rig, 10 * TOKENS, 0.05)
    keys = rig.keys("p", SHOWN)[0]
    rig.daemon.holds(keys, status)
    rig.daemon.on_page = set(keys)
    asked = len(rig.daemon.lookups)
    assert waited(rig) == pytest.approx(SHOWN * 0.05, abs=0.15)
    assert len(rig.daemon.lookups) - asked < 100, "it asks less and less often"


def test_what_is_given_up_is_counted_by_its_reason() -> None:
    rig = slow_daemon(0.01)
    given_up = rig.scheduler.lookups_given_up
    waited(rig)
    assert given_up == {"unanswered": 1}
    rig.daemon.is_there = False
    rig.arrive("s", 6 * TOKENS)
    assert rig.ask("s") == 0
    assert given_up == {"unanswered": 1, "no_session": 1}
    for status, reason in ((RETRY, "retry"), (PENDING, "pending")):
        rig = Rig(options=SchedulerOptions(pending_deadline_s=0.1))
        keys = rig.keys("p", SHOWN)[0]
        rig.daemon.holds(keys, status)
        rig.daemon.on_page = set(keys)
        waited(rig)
        assert rig.scheduler.lookups_given_up == {reason: 1}


def test_a_late_answer_counts() -> None:
    rig = slow_daemon(0.05)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") is None
    rig.step()
    rig.now += 2.0
    rig.daemon.answer()
    assert rig.ask("r") == SHOWN


def test_a_busy_engine_waits_for_a_lookup_once_and_an_idle_one_in_every_step() -> None:
    rig = slow_daemon(0.05)
    table = [blocks(0, 2)]
    rig.arrive("busy", 2 * TOKENS, prefix="none")
    rig.ask("busy")
    rig.allocate("busy", table)
    rig.arrive("r", 6 * TOKENS)
    for step in range(10):
        assert rig.ask("r") is None
        rig.step(("busy", table, TOKENS + step))
        rig.now += 0.001
    assert rig.daemon.blocking_calls == 1
    for _ in range(10):
        rig.step()
        assert rig.ask("r") is None
    assert rig.daemon.blocking_calls == 11


def test_the_daemon_is_doubted_by_what_all_who_wait_have_at_stake() -> None:
    rig = slow_daemon(0.05)
    rig.arrive("small", TOKENS + 1)
    rig.arrive("large", 6 * TOKENS)
    assert rig.ask("small") is None
    assert rig.daemon.doubts == [pytest.approx((SHOWN + TOKENS) * 0.05)]


def test_many_that_wait_for_the_same_answer_wait_for_what_it_is_worth_to_all() -> None:
    rig = slow_daemon(0.001)
    names = [f"r{number}" for number in range(20)]
    for name in names:
        rig.arrive(name, 6 * TOKENS)
    began = rig.now
    while None in [rig.ask(name) for name in names]:
        rig.step()
        rig.now += 0.01
    assert rig.now - began == pytest.approx(20 * SHOWN * 0.001, abs=0.03)


# -- the pace ---------------------------------------------------------------------------------


def test_the_pace_follows_the_last_prompts() -> None:
    pace = TokenPace()
    assert pace.seconds_for(10) is None
    pace.sample(100.0, LEAST_TOKENS - 1)
    assert pace.seconds_for(10) is None, "too few tokens to tell"
    pace.sample(REMEMBERED_TOKENS * 0.01, REMEMBERED_TOKENS)
    assert pace.seconds_for(10) == pytest.approx(0.1)
    for _ in range(20):
        pace.sample(REMEMBERED_TOKENS * 0.001, REMEMBERED_TOKENS)
    assert pace.seconds_for(10) == pytest.approx(0.01, rel=0.01)


def test_what_was_loaded_was_not_computed() -> None:
    rig = Rig()
    rig.holds("p", SHOWN)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") == SHOWN
    table = [blocks(0, 6)]
    rig.allocate("r", table, SHOWN)
    rig.report(*rig.step().loads)
    rig.step(("r", table, 6 * TOKENS))
    rig.now += 2 * TOKENS * 0.01
    rig.report()
    assert rig.scheduler._queue.pace.seconds_for(100) == pytest.approx(1.0)


# -- blocks beside the grid -------------------------------------------------------------------


def test_single_blocks_share_the_steps_one_wait() -> None:
    rig = slow_daemon()
    rig.daemon.holds(tails := hashes("tail", 5))
    rig.arrive("r", 6 * TOKENS, prefix="none")
    request, queue = rig.scheduler._requests["r"], rig.scheduler._queue
    runs = [BlockRun(0, 0, [tail]) for tail in [*tails, b"nobody".ljust(16)]]
    asked = len(rig.daemon.lookups)
    assert [queue.ask_alone(request, run) for run in runs] == [RETRY] * 6
    assert rig.daemon.blocking_calls == 1
    rig.step()
    assert [queue.ask_alone(request, run) for run in runs] == [RETRY] * 6
    assert len(rig.daemon.lookups) - asked == 6, "the same calls are still waited for"
    rig.daemon.answer()
    for _ in range(3):
        assert [queue.ask_alone(request, run) for run in runs] == [HIT] * 5 + [MISS]
    assert len(rig.daemon.lookups) - asked == 6
    assert rig.daemon.blocking_calls == 2
    assert len(request.lookup.leases) == 5
    queue.forget(request)
    assert len(queue.released_leases) == 5


def test_a_single_block_that_nobody_answers_for_is_a_miss_in_the_end() -> None:
    rig = slow_daemon()
    rig.arrive("r", 6 * TOKENS, prefix="none")
    request, queue = rig.scheduler._requests["r"], rig.scheduler._queue
    run = BlockRun(0, 0, hashes("tail", 1))
    assert queue.ask_alone(request, run) == RETRY
    rig.now += 0.2
    assert queue.ask_alone(request, run) == MISS
    assert rig.daemon.given_up


@pytest.mark.parametrize(("status", "why"), [(RETRY, GivenUp.RETRY), (PENDING, GivenUp.PENDING)])
def test_a_single_block_that_stays_doubtful_defers_its_request_for_no_longer_than_others(
    status: int, why: GivenUp
) -> None:
    options = SchedulerOptions(retry_deadline_s=1.0, pending_deadline_s=1.0)
    rig = Rig(options=options)
    rig.daemon.holds(tail := hashes("tail", 1), status)
    rig.arrive("r", 6 * TOKENS, prefix="none")
    request, queue = rig.scheduler._requests["r"], rig.scheduler._queue
    run = BlockRun(0, 0, tail)
    for _ in range(4):
        assert queue.ask_alone(request, run) == status
        queue._outdate(request)  # as misses are looked up again after a while
        rig.now += 0.24
    rig.now += 0.24
    assert queue.ask_alone(request, run) == MISS
    assert queue.given_up[why] == 1
    assert queue.ask_alone(request, run) == MISS
    assert queue.given_up[why] == 1


# -- silence ----------------------------------------------------------------------------------


def unthreaded(monkeypatch: pytest.MonkeyPatch) -> tuple[SchedulerConnection, SimpleNamespace]:
    """A connection without its threads, heard of last at 0 s, and the clock that it reads."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("kvd_client.connection.time", SimpleNamespace(monotonic=lambda: clock.now))
    connection = object.__new__(SchedulerConnection)
    connection._changed = threading.Condition()
    connection._lookups = LookupCalls()
    connection._silent_after_s, connection._heard_s = 0.1, 0.0
    connection._silent_until, connection._silence_s = 0.0, SILENCE_S
    return connection, clock


def test_a_silent_daemon_is_left_alone_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, clock = unthreaded(monkeypatch)
    lengths = []
    for _ in range(7):
        call = connection._lookups.start([], clock.now)
        clock.now += 4.0
        connection.doubt([call], lambda: 5.0)
        assert connection._silent_until <= clock.now, "it is worth waiting for"
        clock.now += 2.0
        connection.doubt([call], lambda: 5.0)
        lengths.append(connection._silent_until - clock.now)
        clock.now = connection._silent_until
        connection._lookups.give_up(call)
    assert lengths == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_SILENCE_S]
    connection._session = None
    connection._receive(engine_pb2.SessionResponse(), None, None)  # type: ignore[arg-type]
    assert (connection._silent_until, connection._silence_s) == (0.0, SILENCE_S)


class UsableSession:
    is_usable = True


def test_a_session_that_is_silent_for_the_first_time_takes_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, clock = unthreaded(monkeypatch)
    session: Any = UsableSession()
    connection._session = session
    for takes_stores in (True, False, False):
        assert connection.session is connection.open_session is session
        call = connection._lookups.start([], clock.now)
        clock.now += 1.0
        connection.doubt([call], lambda: 0.5)
        assert connection.session is None
        assert (connection.open_session is session) == takes_stores
        clock.now = connection._silent_until
        connection._lookups.give_up(call)
    connection._session = None
    assert connection.open_session is None


def test_what_is_computed_beside_a_late_daemon_is_stored() -> None:
    rig = Rig()
    table = [blocks(0, 4)]
    rig.daemon.is_silent = True
    rig.arrive("r", SHOWN)
    assert rig.ask("r") == 0
    rig.allocate("r", table)
    rig.step(("r", table, SHOWN))
    [store] = rig.daemon.last_step.stores
    assert len(store.runs[0].block_hashes) == 4


# -- calls that nobody needs ------------------------------------------------------------------


def test_the_daemon_answers_no_step_and_tells_of_many_ends_together(engine: SmallEngine) -> None:
    kinds: list[str | None] = []
    receive = engine.connection._receive

    def counted(response: engine_pb2.SessionResponse, *others: Any) -> None:
        kinds.append(response.WhichOneof("kind"))
        receive(response, *others)

    engine.connection._receive = counted  # type: ignore[method-assign,assignment]
    for number in range(20):
        engine.store(f"r{number}", f"prompt {number}", 2)
    assert engine.load("again", "prompt 3", 2) == 2
    assert kinds.count("step") == 0
    assert kinds.count("jobs_ended") <= 21
    assert "lookup" in kinds


def test_saying_ready_by_a_call_holds_nobody_up() -> None:
    """The daemon hangs: no call comes back, and each returns at once; few are under way."""
    calls: list[Any] = []

    class Call:
        def add_done_callback(self, done: Any) -> None:
            calls.append(done)

    registrar = object.__new__(Registrar)
    registrar._marking, registrar._metadata = set(), ()
    registrar._current = SimpleNamespace(registration_id=1)  # type: ignore[assignment]
    registrar._stub = SimpleNamespace(  # type: ignore[assignment]
        MarkReady=SimpleNamespace(future=lambda *_, **__: Call())
    )
    assert registrar._current is not None
    for number in range(2 * MAX_MARKING):
        registrar.mark_ready_by_call(registrar._current, [number])
    assert len(calls) == MAX_MARKING
