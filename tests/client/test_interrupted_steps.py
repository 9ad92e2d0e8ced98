"""What a signal's handler raises amid a scheduler's call leaves no request waiting for ever."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvd_client import ScheduledRequest, WorkerReport
from kvd_client.scheduler.fences import Fences
from kvd_client.scheduler.hand_offs import HandOffQueue
from kvd_client.scheduler.jobs import JobTable
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.outcomes import JobEnds
from kvd_client.scheduler.sent_jobs import SentJob, SentJobs
from kvd_client.scheduler.stores import StoreQueue
from tests.client.content import TOKENS, block_hashes
from tests.client.interrupts import Interrupted, interrupted, interrupted_at
from tests.client.small_engine import SmallEngine
from tests.daemon_process import DaemonProcess
from tests.waiting import wait_until

BUILDING = [
    (StoreQueue, "submit"),
    (HandOffQueue, "put_into"),
    (LookupQueue, "step_ended"),  # the message has been sent
    (Fences, "told"),
]


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[SmallEngine]:
    engine = SmallEngine(daemon.socket)
    engine.wait_usable()
    yield engine
    engine.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), BUILDING)
def test_loads_of_an_interrupted_step_fail(
    engine: SmallEngine, owner: type, name: str, *, after: bool
) -> None:
    engine.store("s", "prompt", 4)
    engine.arrive("r", "prompt", 4)
    tokens = engine.match("r")
    table = engine.table(4, 100)
    engine.scheduler.update_state_after_alloc("r", [table], tokens)
    with interrupted(owner, name, after=after):
        engine.scheduler.build_step([])
    engine.step_until_loaded("r")
    assert engine.failed_loads == {"r"}
    engine.scheduler.request_finished("r", [table])
    engine.step_until_idle()
    assert engine.load("again", "prompt", 4) == 4


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), [*BUILDING, (JobTable, "begin")])
def test_stores_of_an_interrupted_step_end(
    engine: SmallEngine, owner: type, name: str, *, after: bool
) -> None:
    engine.arrive("r", "prompt", 4)
    table = engine.table(4, 0)
    engine.scheduler.update_state_after_alloc("r", [table], 0)
    with interrupted(owner, name, after=after):
        engine.scheduler.build_step([ScheduledRequest("r", [table], 4 * TOKENS)])
    engine.scheduler.request_finished("r", [table])
    engine.step_until_idle()
    engine.store("other", "another", 4, 40)  # no job of before has these blocks
    assert engine.load("loads", "another", 4) == 4


def test_the_plan_after_an_interrupted_step_flushes_for_it(engine: SmallEngine) -> None:
    table = engine.prefill("r", "prompt", 4, hold=True)
    engine.scheduler.request_finished("r", [table])
    engine.arrive("next", "another", 4)
    engine.scheduler.update_state_after_alloc("next", [table], 0)
    with interrupted(Fences, "told", after=True):
        engine.scheduler.build_step([])
    assert engine.scheduler.build_step([]).flush
    engine.ready()
    engine.step_until_idle()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"), [(JobTable, "add"), (JobTable, "begin"), (LookupQueue, "release")]
)
def test_an_interrupted_allocation_loads_nothing(
    engine: SmallEngine, owner: type, name: str, *, after: bool
) -> None:
    engine.store("s", "prompt", 4)
    engine.arrive("r", "prompt", 4)
    tokens = engine.match("r")
    table = engine.table(4, 100)
    with interrupted(owner, name, after=after):
        engine.scheduler.update_state_after_alloc("r", [table], tokens)
    assert not engine.step()[0].loads
    assert not engine.scheduler.request_finished("r", [table])
    engine.step_until_idle()
    assert engine.load("again", "prompt", 4) == 4


class Interrupting(dict[int, Any]):
    """A table of which a signal's handler interrupts the next removal."""

    is_due = True

    def interrupt(self) -> None:
        if self.is_due:
            self.is_due = False
            raise Interrupted

    def pop(self, *key: Any) -> Any:
        self.interrupt()
        return super().pop(*key)

    def __delitem__(self, key: int) -> None:
        self.interrupt()
        super().__delitem__(key)


@pytest.mark.parametrize("table", ["_jobs", "_told", "_owners"])
def test_no_later_step_raises_for_a_job_whose_end_was_interrupted(table: str) -> None:
    jobs = SentJobs[SentJob](world_size=1)
    jobs.add(1, SentJob(generation=0, parts=[1]))
    setattr(jobs, table, Interrupting(getattr(jobs, table)))
    with contextlib.suppress(Interrupted):
        jobs.report(1, 1, failed=False)
    jobs.told([(1, True)], now=0.0)
    for job_id, _ in jobs.overdue(now=10.0):
        jobs.drop(job_id)
    assert not jobs.overdue(now=20.0)


def test_a_request_of_an_interrupted_step_can_end(engine: SmallEngine) -> None:
    engine.arrive("r", "prompt", 4)
    table = engine.table(4, 0)
    engine.scheduler.update_state_after_alloc("r", [table], 0)

    class Hashes(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise Interrupted

    hashes = Hashes([block_hashes("prompt", 4)])
    with pytest.raises(Interrupted):
        engine.scheduler.build_step([ScheduledRequest("r", [table], 4 * TOKENS, hashes)])
    engine.scheduler.request_finished("r", [table])
    engine.step_until_idle()


@pytest.mark.parametrize("in_between", ["steps", "ends"])
def test_an_outcome_that_was_interrupted_comes_with_the_next(
    engine: SmallEngine, in_between: str
) -> None:
    engine.store("s", "prompt", 4)
    engine.arrive("r", "prompt", 4)
    table = engine.table(4, 100)
    engine.start_load("r", engine.match("r"), table, hold=True)
    report, ends = only_end(engine), engine.scheduler._ends

    class Interrupting(set[str]):
        def discard(self, _: object) -> None:
            raise Interrupted

        def difference_update(self, *_: Iterable[object]) -> None:
            raise Interrupted

    ends.loading_ended = Interrupting()
    with pytest.raises(Interrupted):
        engine.scheduler.update_from_workers([report])
    ends.loading_ended = set()
    if in_between == "ends":
        assert engine.scheduler.request_finished("r", [table]), "an outcome names it yet"
    assert engine.step()[1].finished_loads == ("r",)
    assert not ends.loading_ended
    assert not engine.step()[1].finished_loads


def only_end(engine: SmallEngine) -> WorkerReport:
    """What the rank reports of the one job that was held back."""
    engine.ready()
    reports: list[WorkerReport] = []

    def has_ended() -> bool:
        reports.append(engine.ranks[0].worker.get_finished())
        return bool(reports[-1].ended)

    wait_until(has_ended, "the job's end")
    return reports[-1]


@pytest.mark.parametrize("kind", ["finished", "failed", "stored"])
def test_no_end_is_lost_wherever_a_handler_raises(engine: SmallEngine, kind: str) -> None:
    engine.store("s", "prompt", 2)
    scheduler, jobs = engine.scheduler, engine.scheduler._jobs
    for count in itertools.count(1):
        name = f"{kind} {count}"
        if kind == "stored":
            table = engine.prefill(name, name, 2, hold=True)
        else:
            engine.arrive(name, "prompt", 2)
            table = engine.table(2, 100)
            engine.start_load(name, engine.match(name), table, hold=True)
        report = only_end(engine)
        if kind == "failed":
            report = replace(report, ended=(report.ended[0]._replace(done=False),))
        was_interrupted = interrupted_at(count, partial(scheduler._ends.report, [report]))
        outcome = scheduler.update_from_workers([report])  # it may not have heard of it
        assert outcome.finished_loads == (name,) * (kind == "finished")
        assert outcome.failed_loads == (name,) * (kind == "failed")
        assert bool(outcome.stored) == (kind == "stored")
        assert not any((len(jobs), jobs._storing, jobs._reading, jobs._loading)), count
        assert not scheduler.request_finished(name, [table])
        engine.step()
        if not was_interrupted:
            assert count > 10
            return


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"), [(SentJobs, "enter"), (JobEnds, "enter_session"), (JobTable, "drop")]
)
def test_jobs_of_a_lost_session_end_although_the_next_ones_beginning_is_interrupted(
    engine: SmallEngine, daemon: DaemonProcess, owner: type, name: str, *, after: bool
) -> None:
    engine.store("s", "prompt", 2)
    engine.arrive("r", "prompt", 2)
    engine.start_load("r", engine.match("r"), engine.table(2, 100), hold=True)
    daemon.kill()
    daemon.start()
    engine.wait_usable()
    with interrupted(owner, name, after=after):
        engine.scheduler.build_step([])
    engine.step()
    assert engine.failed_loads == {"r"}
