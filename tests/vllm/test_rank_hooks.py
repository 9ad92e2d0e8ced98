"""vLLM's hooks on the rank side without any mover: what is told to vLLM, and when."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvd_client.integrations.vllm.metadata import (
    KvdConnectorMetadata,
    KvdWorkerMetadata,
    RankHandshake,
)
from kvd_client.integrations.vllm.rank import memory, worker
from kvd_client.integrations.vllm.rank.memory import compute_end
from kvd_client.integrations.vllm.rank.worker import KvdConnectorWorker
from kvd_client.scheduler import JobReport, StepPlan, WorkerReport
from tests.vllm.rank_rig import LAYER_BYTES, Rank, cache_config, vllm_job


def make_rank(directory: Path, **more: Any) -> Rank:
    settings = {"socket_path": str(directory / "nobody.sock"), "register_wait_s": 0.05}
    return Rank(0, 1, "alone", caches=cache_config(), **settings | more)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """A rank whose daemon is absent."""
    made = make_rank(tmp_path)
    yield made
    made.worker.shutdown()


def orders(plan: StepPlan, **more: Any) -> KvdConnectorMetadata:
    """A step's; `load_requests` are of vLLM's jobs, whose ids are one less than kvd's here."""
    made = KvdConnectorMetadata(load_jobs={}, store_jobs={}, plan=plan, **more)
    jobs = (*plan.loads, *plan.stores, *plan.computed_stores, *made.refused)
    made.owners = {job: vllm_job(job) for job in jobs}
    return made


def told(worker: KvdConnectorWorker) -> tuple[dict[int, int], set[int]]:
    """Acknowledged and failed jobs since the last call, by vLLM's ids."""
    meta = worker.build_connector_worker_meta()
    return ({}, set()) if meta is None else (meta.completed_jobs, meta.failed_jobs)


def test_without_a_daemon_every_job_fails_at_once_and_is_acknowledged_once(rank: Rank) -> None:
    worker = rank.worker
    step = orders(StepPlan(loads=(1,), stores=(2,), computed_stores=(3,)), load_requests={0: "r"})
    worker.handle_preemptions(step)
    worker.start_kv_transfers(step)
    worker.prepare_store_kv(step)
    results = worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"r"}
    assert not results.finished_sending
    assert told(worker) == ({0: 1, 1: 1, 2: 1}, {0, 1, 2})
    worker.handle_preemptions(orders(StepPlan(flush=(1, 2, 3)), lost=(1, 2, 3)))
    assert not worker.get_transfer_results(set()).finished_recving
    assert worker.build_connector_worker_meta() is None


def test_jobs_that_never_left_are_told_as_failed_in_the_same_step(rank: Rank) -> None:
    worker = rank.worker
    step = orders(StepPlan(), refused=(7, 8), load_requests={6: "r"})
    worker.handle_preemptions(step)
    worker.start_kv_transfers(step)
    worker.prepare_store_kv(step)
    results = worker.get_transfer_results(set())
    assert results.failed_recving == results.finished_recving == {"r"}
    assert told(worker) == ({6: 1, 7: 1}, {6, 7})


def test_a_job_in_parts_is_told_once_its_last_part_has_ended_and_fails_with_any(rank: Rank) -> None:
    worker = rank.worker
    step = orders(StepPlan(loads=(1, 2), stores=(3, 4, 5)), load_requests={0: "r"})
    step.owners = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}
    worker.handle_preemptions(step)
    ends: list[JobReport] = []
    worker._worker.get_finished = lambda: WorkerReport(0, tuple(ends))  # type: ignore[method-assign]
    ends[:] = [JobReport(1, done=False), JobReport(3, done=True), JobReport(5, done=True)]
    assert not worker.get_transfer_results(set()).finished_recving, "2 may still write"
    assert told(worker) == ({2: 1}, set())
    ends[:] = [JobReport(2, done=True), JobReport(3, done=True), JobReport(4, done=True)]
    results = worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"r"}
    assert told(worker) == ({0: 1, 1: 1}, {0})


def test_what_any_part_left_or_gave_up_is_told_of_the_whole_job(rank: Rank) -> None:
    step = orders(StepPlan(stores=(1, 2, 3)))
    step.owners = {1: 0, 2: 0, 3: 1}
    rank.worker.handle_preemptions(step)
    ends = (
        JobReport(1, done=True, left=True),
        JobReport(2, done=True),
        JobReport(3, done=False, given_up=True),
    )
    rank.worker._worker.get_finished = lambda: WorkerReport(0, ends)  # type: ignore[method-assign]
    rank.worker.get_transfer_results(set())
    meta = rank.worker.build_connector_worker_meta()
    assert meta is not None
    assert (meta.left_jobs, meta.failed_jobs, meta.gave_up) == ({0}, {1}, True)


def test_a_step_whose_hooks_come_twice_is_carried_out_once(rank: Rank) -> None:
    worker = rank.worker
    step = orders(StepPlan(loads=(1,), stores=(2,)), refused=(3,), load_requests={0: "r"})
    for _ in range(2):
        worker.handle_preemptions(step)
        worker.start_kv_transfers(step)
        worker.prepare_store_kv(step)
        worker.get_transfer_results(set())
    assert told(worker) == ({0: 1, 1: 1, 2: 1}, {0, 1, 2})
    assert worker.build_connector_worker_meta() is None


def test_a_step_that_is_never_finalized_begins_its_stores_before_the_next_ones_flush(
    rank: Rank,
) -> None:
    worker = rank.worker
    first = orders(StepPlan(stores=(2,)))
    worker.handle_preemptions(first)
    worker.start_kv_transfers(first)
    worker.get_transfer_results(set())
    assert worker.build_connector_worker_meta() is None
    second = orders(StepPlan(flush=(2,), stores=(4,)))
    worker.handle_preemptions(second)
    worker.start_kv_transfers(second)
    worker.prepare_store_kv(first)
    worker.get_transfer_results(set())
    assert told(worker) == ({1: 1}, {1})
    worker.prepare_store_kv(second)
    worker.prepare_store_kv(second)
    worker.get_transfer_results(set())
    assert told(worker) == ({3: 1}, {3})


def test_a_load_does_not_wait_for_what_an_earlier_steps_hook_saw_launched(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for all that was launched by now: the earlier step's own loads never began."""
    ends = iter(["earlier", "now"])
    monkeypatch.setattr(worker, "compute_end", lambda _device: next(ends))
    waited: list[Any] = []
    monkeypatch.setattr(rank.worker._worker, "start_loads", lambda _plan, end: waited.append(end))
    rank.worker.note_launched(orders(StepPlan(loads=(1,))))
    rank.worker.start_kv_transfers(orders(StepPlan(loads=(2,))))
    assert waited == ["now"]


def test_an_error_once_a_steps_stores_have_begun_says_nothing_of_its_kv(rank: Rank) -> None:
    step = orders(StepPlan(stores=(1,)))
    rank.worker.handle_preemptions(step)
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    try:
        raise RuntimeError
    except RuntimeError:
        rank.worker.get_transfer_results(set())
    assert not rank.worker._is_kv_wrong


def test_the_flush_runs_with_whichever_hook_comes_first(rank: Rank) -> None:
    worker = rank.worker
    worker.start_kv_transfers(orders(StepPlan(computed_stores=(1,), flush=(1,))))
    worker.prepare_store_kv(orders(StepPlan(computed_stores=(2,), stores=(3,))))
    worker.get_transfer_results(set())
    assert told(worker) == ({0: 1, 1: 1, 2: 1}, {0, 1, 2})


def test_equal_steps_are_not_taken_for_the_same(rank: Rank) -> None:
    worker = rank.worker
    for job_id in range(1, 9):
        worker.handle_preemptions(orders(StepPlan()))
        worker.handle_preemptions(orders(StepPlan(), refused=(job_id,)))
    worker.get_transfer_results(set())
    assert told(worker)[1] == set(range(8))


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_rank_says_of_a_job_is_said_of_it_by_all(first: int) -> None:
    ranks = [KvdWorkerMetadata({1: 1, 2: 1}), KvdWorkerMetadata({1: 1, 2: 1})]
    ranks[1].failed_jobs, ranks[1].left_jobs, ranks[1].gave_up = {1}, {2}, True
    both = ranks[first].aggregate(ranks[1 - first])
    assert both.completed_jobs == {1: 2, 2: 2}
    assert (both.failed_jobs, both.left_jobs, both.gave_up) == ({1}, {2}, True)


def test_a_rank_may_rest_where_a_step_ran_nothing_and_refused_nothing(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[bool] = []
    monkeypatch.setattr(rank.worker._worker, "rest", lambda *, has_run: steps.append(has_run))
    for has_run, refused in ((True, ()), (False, (1,)), (False, ())):
        rank.worker.handle_preemptions(orders(StepPlan(), has_run=has_run, refused=refused))
        rank.worker.get_transfer_results(set())
    assert steps == [True, False]


def test_get_finished_says_the_same_in_two_sets(rank: Rank) -> None:
    rank.worker.handle_preemptions(orders(StepPlan(), refused=(1,), load_requests={0: "r"}))
    assert rank.worker.get_finished(set()) == (set(), {"r"})


def test_the_handshake_of_a_rank_without_a_daemon_says_so_and_what_its_memory_is(
    rank: Rank,
) -> None:
    shake = rank.worker.get_handshake_metadata()
    assert isinstance(shake, RankHandshake)
    assert not shake.registered
    assert "nobody.sock" in shake.problem
    assert shake.shard_bytes == (3 * LAYER_BYTES,)
    assert (shake.rank, shake.shard) == (0, 0)
    assert shake.kv_layout.startswith("LBHNC")


def test_sleep_without_a_daemon_neither_waits_nor_raises(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        rank.worker.unregister_kv_caches()
    for _ in range(2):
        rank.worker.restore_kv_caches()
    rank.worker.unregister_kv_caches()
    assert "waiting for it" not in caplog.text


def test_registering_again_takes_the_new_tensors_and_trusts_them(rank: Rank) -> None:
    before = rank.worker.get_handshake_metadata()
    rank.worker._is_kv_wrong = True
    rank.worker.register_kv_caches(rank.kv)
    assert rank.worker.get_handshake_metadata() == before
    assert not rank.worker._is_kv_wrong


@pytest.mark.parametrize("other_id", ["second", "first"])
def test_another_engine_of_the_process_is_refused_before_its_kv_takes_this_ones_place(
    other_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first engine's jobs would copy the second one's memory, under its own hashes."""

    def set_up(engine: str, start: str) -> None:
        transfer = SimpleNamespace(engine_id=engine)
        config = SimpleNamespace(kv_transfer_config=transfer, instance_id=start)
        monkeypatch.setattr(worker, "get_current_vllm_config_or_none", lambda: config)

    set_up("first", "1")
    made = make_rank(tmp_path)
    made.worker.register_kv_caches(made.kv)
    set_up(other_id, "2")
    with pytest.raises(RuntimeError, match="has an engine already"):
        made.worker.get_mem_pool_context()
    with pytest.raises(RuntimeError, match="VLLM_ENABLE_V1_MULTIPROCESSING"):
        made.worker.register_kv_caches(made.kv)
    made.worker.shutdown()


def test_shutdown_leaves_nothing_to_tell(rank: Rank) -> None:
    rank.worker.handle_preemptions(orders(StepPlan(), refused=(1,), load_requests={0: "r"}))
    rank.worker.shutdown()
    rank.worker.shutdown()
    assert not rank.worker.get_transfer_results(set()).finished_recving
    assert rank.worker.build_connector_worker_meta() is None


def test_kv_on_another_device_is_refused_with_the_way_out(rank: Rank) -> None:
    elsewhere = {name: tensor.to("meta") for name, tensor in rank.kv.items()}
    with pytest.raises(RuntimeError, match=r"NVIDIA GPU.*lies on meta.*--kv-transfer-config"):
        rank.worker.register_kv_caches(elsewhere)


def test_kv_on_two_devices_is_refused_with_both_named(rank: Rank) -> None:
    (name, *_) = rank.kv
    with pytest.raises(RuntimeError, match="lies on cpu, meta"):
        rank.worker.register_kv_caches({**rank.kv, name: rank.kv[name].to("meta")})


def test_kv_that_vllm_allocated_outside_of_our_context_is_refused(tmp_path: Path) -> None:
    made = make_rank(tmp_path)
    foreign = {name: tensor.clone() for name, tensor in made.kv.items()}
    with pytest.raises(ValueError, match="can't map this engine's KV cache"):
        made.worker.register_kv_caches(foreign)
    made.worker.shutdown()


def test_on_a_cpu_the_hooks_come_when_the_kv_is_written() -> None:
    assert compute_end(torch.device("cpu")) is None


def test_on_a_gpu_the_end_is_that_of_the_threads_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[object] = []
    streams = {1: SimpleNamespace(cuda_stream=77)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    monkeypatch.setattr(memory, "stream_end", lambda stream: partial(waited.append, stream))
    wait = compute_end(torch.device("cuda", 1))
    assert wait is not None
    assert waited == []
    wait()
    assert waited == [streams[1]]
