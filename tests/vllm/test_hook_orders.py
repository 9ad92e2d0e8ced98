"""Both of vLLM's model runners over a device that runs late: when a step's copies may begin.

The runners' own connector code runs, over the connector's hooks and one rank of a real daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import override_forward_context
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvd_client.integrations.vllm.connector import KvdConnector
from kvd_client.integrations.vllm.metadata import KvdConnectorMetadata
from tests.vllm.late_device import LateDevice
from tests.vllm.rank_rig import PATIENCE_S, RankRig, vllm_job

Forward = Callable[[], None]
RunStep = Callable[[KvdConnectorMetadata, Forward | None], Any]


@pytest.fixture
def connector(late_rig: RankRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvdConnector]:
    """The worker's connector, as vLLM's runners find it, over the late_rig's rank."""
    (rank,) = late_rig.ranks
    made = KvdConnector.__new__(KvdConnector)
    sides = {"connector_worker": rank.worker, "connector_scheduler": None}
    ours = {"_kvd_worker": rank.worker, "_kvd_scheduler": None}
    made.__dict__.update(sides | ours, _connector_metadata=None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    with override_forward_context(SimpleNamespace()):
        yield made


def scheduled(orders: KvdConnectorMetadata) -> Any:
    return SimpleNamespace(
        kv_connector_metadata=orders,
        has_sync_kv_loads=orders.begins_with_loads,
        finished_req_ids=set(),
    )


class SecondRunner:
    """As much of vLLM's second model runner as the connector sees."""

    def __init__(self, late_rig: RankRig) -> None:
        (rank,) = late_rig.ranks
        self.hooks = ActiveKVConnector(SimpleNamespace(), rank.kv)

    def run(self, orders: KvdConnectorMetadata, forward: Forward | None) -> Any:
        if forward is None:
            told = self.hooks.no_forward(scheduled(orders)).kv_connector_output
            return KVConnectorOutput() if told is None else told
        self.hooks.pre_forward(scheduled(orders))
        forward()
        self.hooks.finish_forward()
        return self.hooks.post_forward(set())


def second_runner(late_rig: RankRig, late_device: LateDevice) -> SecondRunner:
    """Such a runner, which registers the rank's memory anew; ready, and the device held."""
    late_device.let_run()
    late_rig.store("ready", [0])
    made = SecondRunner(late_rig)
    late_rig.load_when_back("ready", [0])
    late_device.hold()
    return made


def run_first(
    orders: KvdConnectorMetadata, forward: Forward | None, has_drafter: bool = False
) -> Any:
    """The same of the first one; its GPU worker calls the first hook.

    With a drafter no step is finalized, as on any but the last pipeline stage.
    """
    kv_transfer_state._KV_CONNECTOR_AGENT.handle_preemptions(orders)
    with KVConnectorModelRunnerMixin._get_kv_connector_output(
        scheduled(orders), defer_finalize=has_drafter
    ) as told:
        if forward is not None:
            forward()
    return told


@pytest.fixture(params=["first", "second"])
def run_step(
    request: pytest.FixtureRequest,
    late_rig: RankRig,
    late_device: LateDevice,
    connector: KvdConnector,
) -> RunStep:
    """Takes a step, with this launched as its forward; with None it has none."""
    if request.param == "first":
        return run_first
    return second_runner(late_rig, late_device).run


def run_until_received(late_rig: RankRig, run_step: RunStep, *names: str) -> None:
    """Steps without a forward until the loads of these requests have ended, none of them failed."""
    lacking, deadline = set(names), time.monotonic() + PATIENCE_S
    while lacking:
        assert time.monotonic() < deadline, f"the loads of {lacking} do not end"
        told = run_step(late_rig.metadata(), None)
        assert not told.failed_recving
        lacking -= told.finished_recving or set()


@pytest.mark.parametrize("has_forward", [True, False])
def test_a_load_begins_once_what_the_step_before_launched_has_run(
    late_rig: RankRig, late_device: LateDevice, run_step: RunStep, has_forward: bool
) -> None:
    """With asynchronous scheduling the block is a new request's while that step still runs."""
    (rank,) = late_rig.ranks
    late_device.let_run()
    content = rank.block(0, 5)
    late_rig.store("stale", [5])
    late_device.hold()
    ran: list[str] = []

    def overwrite() -> None:
        rank.put(0, 12, content + 1)
        ran.append("the step before")

    run_step(late_rig.metadata(), lambda: late_device.launch(overwrite))
    job = late_rig.draft("stale", [12])
    late_rig.send(loads=[job])
    forward = (lambda: late_device.launch(lambda: ran.append("its own"))) if has_forward else None
    assert not run_step(late_rig.metadata(loads=[job]), forward).finished_recving
    late_device.let_run()
    run_until_received(late_rig, run_step, "stale")
    assert ran == ["the step before"], "it waited for more, or for less"
    assert torch.equal(rank.block(0, 12), content)


def test_a_store_begins_once_its_own_forward_has_run(
    late_rig: RankRig, late_device: LateDevice, run_step: RunStep
) -> None:
    (rank,) = late_rig.ranks
    content = torch.full_like(rank.block(0, 3), 33)
    job = late_rig.draft("late store", [3])
    late_rig.send(stores=[job])
    first = run_step(
        late_rig.metadata(stores=[job]), lambda: late_device.launch(lambda: rank.put(0, 3, content))
    )
    assert first.kv_connector_worker_meta is None
    late_device.let_run()
    while (told := run_step(late_rig.metadata(), None).kv_connector_worker_meta) is None:
        time.sleep(0.001)
    assert told.completed_jobs == {vllm_job(job.job_id): 1}
    assert told.failed_jobs == set()
    again = late_rig.draft("late store", [10])
    late_rig.send(loads=[again])
    run_step(late_rig.metadata(loads=[again]), None)
    run_until_received(late_rig, run_step, "late store")
    assert torch.equal(rank.block(0, 10), content)


def test_a_capture_between_two_steps_neither_begins_nor_loses_a_copy(
    late_rig: RankRig, late_device: LateDevice, connector: KvdConnector
) -> None:
    """VLLM's second runner switches the connector off where it runs the model for itself."""
    (rank,) = late_rig.ranks
    runner = second_runner(late_rig, late_device)
    late_device.let_run()
    content = rank.block(0, 6)
    for name in ("before", "after"):
        late_rig.store(name, [6])
    before, after = late_rig.draft("before", [13]), late_rig.draft("after", [14])
    late_rig.send(loads=[before, after])
    late_device.hold()
    runner.run(late_rig.metadata(loads=[before]), lambda: None)
    runner.hooks.set_disabled(True)
    captured = scheduled(late_rig.metadata(loads=[after]))
    runner.hooks.pre_forward(captured)
    runner.hooks.reset_capture_state()
    captures: list[str] = []

    def capture() -> None:
        rank.put(0, 14, content + 1)
        captures.append("has run")

    late_device.launch(capture)
    assert runner.hooks.post_forward(set()) is None
    assert runner.hooks.no_forward(captured).kv_connector_output is None
    runner.hooks.set_disabled(False)
    assert not runner.run(late_rig.metadata(loads=[after]), None).finished_recving
    late_device.let_run()
    run_until_received(late_rig, runner.run, "before", "after")
    assert captures == ["has run"]
    assert torch.equal(rank.block(0, 13), content)
    assert torch.equal(rank.block(0, 14), content)
