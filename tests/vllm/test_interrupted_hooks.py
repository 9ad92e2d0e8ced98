"""What a signal's handler, or the forward, raises amid a step: no end and no lease is lost, and
nothing that was not computed is stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kvd_client.connection import SchedulerConnection
from kvd_client.integrations.vllm.connector import KvdConnector
from kvd_client.integrations.vllm.options import KvdOptions
from kvd_client.integrations.vllm.scheduling.manager import KvdManager
from kvd_client.integrations.vllm.scheduling.steps import StepJobs, StepSender
from tests.client.interrupts import Interrupted, interrupted, interrupted_at
from tests.vllm.conftest import StartRig
from tests.vllm.late_device import LateDevice
from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.rank_rig import Rank, RankRig, cache_config, offloading_config
from tests.vllm.test_hook_orders import RunStep, connector, run_first, second_runner

__all__ = ["connector"]  # a fixture

HOOKS = ["handle_preemptions", "start_kv_transfers", "prepare_store_kv", "get_transfer_results"]


def run_interrupted(rank: Rank, step: Any, hook: str, count: int) -> bool:
    """A step whose hooks end where a handler raises in this one; whether it did."""
    for name in HOOKS:
        given = set() if name == "get_transfer_results" else step
        call = partial(getattr(rank.worker, name), given)
        if name == hook:
            return interrupted_at(count, call)
        call()
    raise AssertionError(hook)


@pytest.mark.parametrize("hook", HOOKS)
def test_no_job_is_lost_wherever_a_handler_raises(
    kvd: NodeDaemon, start_rig: StartRig, hook: str
) -> None:
    rig = start_rig(kvd)
    (rank,) = rig.ranks
    rig.store("kept", [1, 2])
    content = rank.block(0, 1)
    for count in itertools.count(1):
        rank.put(0, 11, torch.zeros_like(content))
        load, refused = rig.draft("kept", [11, 12]), rig.draft("no", [5])
        stores = [rig.draft(f"{hook} {count} {each}", [4 + each]) for each in range(2)]
        rig.send(loads=[load], stores=stores)
        step = rig.metadata(
            loads=[load], stores=stores, flush=[stores[0].job_id], refused=(refused.job_id,)
        )
        was_interrupted = run_interrupted(rank, step, hook, count)
        if hook == "handle_preemptions" and not rank.worker._owners:
            rig.run(step)  # it was interrupted before it knew of the step
        rig.run_until_ended(load, refused, *stores)
        assert rig.was_done(load) == [True], count
        assert rig.was_done(refused) == [False], count
        assert torch.equal(rank.block(0, 11), content)
        assert rig.received[0].count("kept") == count
        assert not rank.worker._jobs
        assert not rank.worker._owners
        rank.worker._is_kv_wrong = False
        if not was_interrupted:
            assert count > 10
            return


def raising() -> None:
    raise Interrupted


RUNNERS: dict[str, Callable[[RankRig, LateDevice], RunStep]] = {
    "first": lambda *_: run_first,
    "first, with a drafter": lambda *_: partial(run_first, has_drafter=True),
    "second": lambda *given: second_runner(*given).run,
}


@pytest.mark.parametrize("begins_with_loads", [False, True], ids=["", "begins with loads"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_of_a_forward_that_raised_is_stored_nor_anything_after_it(
    late_rig: RankRig,
    late_device: LateDevice,
    connector: KvdConnector,
    runner: str,
    *,
    begins_with_loads: bool,
) -> None:
    run_step = RUNNERS[runner](late_rig, late_device)
    late_device.let_run()
    job, later = late_rig.draft("never computed", [3]), late_rig.draft("computed after it", [4])
    late_rig.send(stores=[job])
    with pytest.raises(Interrupted):
        run_step(late_rig.metadata(stores=[job], begins_with_loads=begins_with_loads), raising)
    flushed = late_rig.draft("computed after it and flushed", [5])
    late_rig.send(stores=[later, flushed])
    late_rig.run(late_rig.metadata(stores=[later, flushed], flush=[flushed.job_id]))
    late_rig.run_until_ended(job, later, flushed)
    assert [late_rig.was_done(each) for each in (job, later, flushed)] == [[False]] * 3


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_step_that_begins_with_loads_is_stored(
    late_rig: RankRig, late_device: LateDevice, connector: KvdConnector, runner: str
) -> None:
    run_step = RUNNERS[runner](late_rig, late_device)
    late_device.let_run()
    job = late_rig.draft(f"beside loads, {runner}", [3])
    late_rig.send(stores=[job])
    told = run_step(late_rig.metadata(stores=[job], begins_with_loads=True), lambda: None)
    if told.kv_connector_worker_meta is None:
        late_rig.run_until_ended(job)
        assert late_rig.was_done(job) == [True]
    else:
        assert not told.kv_connector_worker_meta.failed_jobs


def test_what_ended_in_a_step_that_raises_is_told_with_the_next(
    late_rig: RankRig, late_device: LateDevice, connector: KvdConnector
) -> None:
    late_device.let_run()
    late_rig.store("kept", [1])
    load = late_rig.draft("kept", [11])
    orders = late_rig.metadata(refused=(load.job_id,))
    orders.load_requests = {load.job_id - 1: "r"}
    with pytest.raises(Interrupted):
        run_first(orders, raising)
    told = run_first(late_rig.metadata(), None)
    assert told.failed_recving == told.finished_recving == {"r"}
    assert told.kv_connector_worker_meta.completed_jobs == {load.job_id - 1: 1}


def test_an_engine_that_steps_as_it_handles_an_error_stores(
    late_rig: RankRig, late_device: LateDevice, connector: KvdConnector
) -> None:
    late_device.let_run()
    job = late_rig.draft("computed", [3])
    late_rig.send(stores=[job])
    try:
        raising()
    except Interrupted:
        late_rig.run(late_rig.metadata(stores=[job]))
    late_rig.run_until_ended(job)
    assert late_rig.was_done(job) == [True]


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (StepSender, "lost_jobs", False),
        (SchedulerConnection, "send_step", False),
        (SchedulerConnection, "send_step", True),
    ],
)
def test_what_an_interrupted_step_was_to_say_is_said_with_the_next(
    kvd: NodeDaemon, start_rig: StartRig, owner: type, name: str, *, after: bool
) -> None:
    connection = start_rig(kvd).connection
    manager = KvdManager(offloading_config(0, 1, caches=cache_config()), KvdOptions())
    manager.open(connection)
    assert manager.enter_session() is not None
    assert manager.steps is not None
    assert manager._queue is not None
    manager.steps.draft.finished.append("r")
    manager._queue.released_leases.append(7)
    with interrupted(owner, name, after=after):
        manager.send_step(StepJobs(itertools.count(1)))
    assert manager.steps.draft.finished == ["r"]
    assert manager.steps.draft.released_leases == [7]
    manager.send_step(StepJobs(itertools.count(1)))
    assert not manager.steps.draft.released_leases


def test_a_new_session_hears_nothing_that_was_meant_for_the_one_before(
    kvd: NodeDaemon, start_rig: StartRig
) -> None:
    """A lease of its own may have the number of an earlier session's."""
    manager = KvdManager(offloading_config(0, 1, caches=cache_config()), KvdOptions())
    manager.open(start_rig(kvd).connection)
    assert manager.steps is not None
    assert manager._queue is not None
    manager.steps.draft.finished.append("r")
    manager.steps.draft.released_leases.append(7)
    manager._queue.released_leases.append(8)
    assert manager.enter_session() is not None
    assert not manager.steps.draft.finished
    assert not manager.steps.draft.released_leases
    assert not manager._queue.released_leases
