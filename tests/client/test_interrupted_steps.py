"""What a signal's handler raises amid a scheduler's call leaves no request waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvd_client import ScheduledRequest
from kvd_client.scheduler.fences import Fences
from kvd_client.scheduler.hand_offs import HandOffQueue
from kvd_client.scheduler.jobs import JobTable
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.stores import StoreQueue
from tests.client.content import TOKENS
from tests.client.small_engine import SmallEngine
from tests.daemon_process import DaemonProcess

BUILDING = [
    (StoreQueue, "submit"),
    (HandOffQueue, "put_into"),
    (LookupQueue, "step_ended"),  # the message has been sent
    (Fences, "told"),
]


class Interrupted(Exception):
    """What a signal's handler raises."""


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[SmallEngine]:
    engine = SmallEngine(daemon.socket)
    engine.wait_usable()
    yield engine
    engine.close()


def interrupt(patch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool) -> None:
    """Have this method raise, before or after its work."""
    whole = getattr(owner, name)

    def interrupted(*args: Any, **named: Any) -> None:
        if after:
            whole(*args, **named)
        raise Interrupted

    patch.setattr(owner, name, interrupted)


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
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, owner, name, after=after)
        with pytest.raises(Interrupted):
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
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, owner, name, after=after)
        with pytest.raises(Interrupted):
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
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, Fences, "told", after=True)
        with pytest.raises(Interrupted):
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
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, owner, name, after=after)
        with pytest.raises(Interrupted):
            engine.scheduler.update_state_after_alloc("r", [table], tokens)
    assert not engine.step()[0].loads
    assert not engine.scheduler.request_finished("r", [table])
    engine.step_until_idle()
    assert engine.load("again", "prompt", 4) == 4
