"""A device that runs behind its launches, as a GPU does: what the daemon copies, and when.

The KV is host memory here, and what the device "runs" is a function that writes it late: when
a rank waits for the end of what was launched.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.vllm.late_device import LateDevice
from tests.vllm.rank_rig import PATIENCE_S, RankRig


def filled(like: torch.Tensor, value: int) -> torch.Tensor:
    return torch.full_like(like, value)


def check_stored(late_rig: RankRig, name: str, block: int, content: torch.Tensor) -> None:
    """A load into another block finds this."""
    (rank,) = late_rig.ranks
    job = late_rig.load(name, [block])
    assert late_rig.was_done(job) == [True]
    assert torch.equal(rank.block(0, block), content)


def test_a_store_reads_what_its_step_writes_late(
    late_rig: RankRig, late_device: LateDevice
) -> None:
    (rank,) = late_rig.ranks
    content = filled(rank.block(0, 3), 33)
    job = late_rig.draft("late store", [3])
    late_rig.send(stores=[job])
    late_device.launch(lambda: rank.put(0, 3, content))
    late_rig.run(late_rig.metadata(stores=[job]))
    assert late_rig.ended == [{}]
    late_device.let_run()
    late_rig.run_until_ended(job)
    check_stored(late_rig, "late store", 10, content)


def test_a_store_that_is_flushed_at_once_reads_what_an_earlier_step_writes_late(
    late_rig: RankRig, late_device: LateDevice
) -> None:
    """Blocks of a request that ended may be offered, and given to another, in one step."""
    (rank,) = late_rig.ranks
    content = filled(rank.block(0, 4), 44)
    job = late_rig.draft("late flush", [4])
    late_rig.send(stores=[job])
    late_device.launch(lambda: rank.put(0, 4, content))
    threading.Timer(0.05, late_device.let_run).start()
    step = late_rig.metadata(stores=[job], flush=[job.job_id])
    rank.worker.handle_preemptions(step)
    rank.put(0, 4, filled(content, 99))  # whoever has the block now
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    late_rig.run_until_ended(job)
    assert late_rig.was_done(job) == [True]
    check_stored(late_rig, "late flush", 11, content)


@pytest.mark.parametrize("is_bound_first", [True, False])
def test_a_load_is_not_overwritten_by_a_step_that_still_runs(
    late_rig: RankRig, late_device: LateDevice, is_bound_first: bool
) -> None:
    """The step that ended a request may still write its blocks when they are another's."""
    (rank,) = late_rig.ranks
    late_device.let_run()
    content = rank.block(0, 5)
    late_rig.store("stale", [5])
    job = late_rig.draft("stale", [12])
    late_rig.send(loads=[job])
    overwritten = threading.Event()

    def overwrite() -> None:
        assert not overwritten.wait(0.05)  # time for a copy that does not wait
        rank.put(0, 12, filled(content, 1))
        overwritten.set()

    late_device.launch(overwrite)
    step = late_rig.metadata(loads=[job])
    rank.worker.handle_preemptions(step)
    if is_bound_first:
        rank.worker.note_launched(step)
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    late_rig.run_until_ended(job)
    assert overwritten.is_set()
    assert late_rig.was_done(job) == [True]
    assert torch.equal(rank.block(0, 12), content)


def test_a_load_does_not_wait_for_the_forward_of_its_own_step(
    late_rig: RankRig, late_device: LateDevice
) -> None:
    (rank,) = late_rig.ranks
    late_device.let_run()
    content = rank.block(0, 6)
    late_rig.store("ahead", [6])
    job = late_rig.draft("ahead", [13])
    late_rig.send(loads=[job])
    step = late_rig.metadata(loads=[job])
    rank.worker.handle_preemptions(step)
    rank.worker.note_launched(step)
    ran: list[str] = []
    late_device.launch(lambda: ran.append("forward"))
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    late_rig.run_until_ended(job)
    assert ran == []
    assert torch.equal(rank.block(0, 13), content)


def test_unregistering_while_a_load_waits_leaves_its_blocks_alone(
    late_rig: RankRig, late_device: LateDevice
) -> None:
    (rank,) = late_rig.ranks
    late_device.let_run()
    late_rig.store("asleep", [7])
    blocked = threading.Event()
    job = late_rig.draft("asleep", [14])
    late_rig.send(loads=[job])
    late_device.launch(lambda: _assert_set(blocked))
    late_rig.run(late_rig.metadata(loads=[job]))
    rank.worker.unregister_kv_caches()
    rank.memory.zero_()
    blocked.set()
    late_rig.collect()
    assert late_rig.was_done(job) == [False]
    rank.worker.restore_kv_caches()
    assert rank.worker.get_handshake_metadata().registered
    assert not rank.memory.any(), "a copy came after the memory was taken back"


def _assert_set(event: threading.Event) -> Any:
    assert event.wait(PATIENCE_S)
