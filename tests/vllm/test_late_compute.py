"""A device that runs behind its launches, as a GPU does: what the daemon copies, and when.

The KV is host memory here, and what the device "runs" is a function that writes it late: when
a rank waits for the end of what was launched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvd_client.integrations.vllm.rank import worker as rank_side
from tests.daemon_process import DaemonProcess
from tests.vllm.conftest import StartRig
from tests.vllm.late_device import LateDevice
from tests.vllm.rank_rig import PATIENCE_S, RankRig


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    made = LateDevice()
    monkeypatch.setattr(rank_side, "compute_end", made.end)
    return made


@pytest.fixture
def rig(kvd: DaemonProcess, device: LateDevice, start_rig: StartRig) -> Iterator[RankRig]:
    yield start_rig(kvd)
    device.let_run()  # before the rig ends


def filled(like: torch.Tensor, value: int) -> torch.Tensor:
    return torch.full_like(like, value)


def check_stored(rig: RankRig, name: str, block: int, content: torch.Tensor) -> None:
    """A load into another block finds this."""
    (rank,) = rig.ranks
    job = rig.load(name, [block])
    assert rig.was_done(job) == [True]
    assert torch.equal(rank.block(0, block), content)


def test_a_store_reads_what_its_step_writes_late(rig: RankRig, device: LateDevice) -> None:
    (rank,) = rig.ranks
    content = filled(rank.block(0, 3), 33)
    job = rig.draft("late store", [3])
    rig.send(stores=[job])
    device.launch(lambda: rank.put(0, 3, content))
    rig.run(rig.metadata(stores=[job]))
    assert rig.ended == [{}]
    device.let_run()
    rig.run_until_ended(job)
    check_stored(rig, "late store", 10, content)


def test_a_store_that_is_flushed_at_once_reads_what_an_earlier_step_writes_late(
    rig: RankRig, device: LateDevice
) -> None:
    """Blocks of a request that ended may be offered, and given to another, in one step."""
    (rank,) = rig.ranks
    content = filled(rank.block(0, 4), 44)
    job = rig.draft("late flush", [4])
    rig.send(stores=[job])
    device.launch(lambda: rank.put(0, 4, content))
    threading.Timer(0.05, device.let_run).start()
    step = rig.metadata(stores=[job], flush=[job.job_id])
    rank.worker.handle_preemptions(step)
    rank.put(0, 4, filled(content, 99))  # whoever has the block now
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    rig.run_until_ended(job)
    assert rig.was_done(job) == [True]
    check_stored(rig, "late flush", 11, content)


@pytest.mark.parametrize("is_bound_first", [True, False])
def test_a_load_is_not_overwritten_by_a_step_that_still_runs(
    rig: RankRig, device: LateDevice, is_bound_first: bool
) -> None:
    """The step that ended a request may still write its blocks when they are another's."""
    (rank,) = rig.ranks
    device.let_run()
    content = rank.block(0, 5)
    rig.store("stale", [5])
    job = rig.draft("stale", [12])
    rig.send(loads=[job])
    overwritten = threading.Event()

    def overwrite() -> None:
        assert not overwritten.wait(0.05)  # time for a copy that does not wait
        rank.put(0, 12, filled(content, 1))
        overwritten.set()

    device.launch(overwrite)
    step = rig.metadata(loads=[job])
    rank.worker.handle_preemptions(step)
    if is_bound_first:
        rank.worker.note_launched(step)
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    rig.run_until_ended(job)
    assert overwritten.is_set()
    assert rig.was_done(job) == [True]
    assert torch.equal(rank.block(0, 12), content)


def test_a_load_does_not_wait_for_the_forward_of_its_own_step(
    rig: RankRig, device: LateDevice
) -> None:
    (rank,) = rig.ranks
    device.let_run()
    content = rank.block(0, 6)
    rig.store("ahead", [6])
    job = rig.draft("ahead", [13])
    rig.send(loads=[job])
    step = rig.metadata(loads=[job])
    rank.worker.handle_preemptions(step)
    rank.worker.note_launched(step)
    ran: list[str] = []
    device.launch(lambda: ran.append("forward"))
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    rig.run_until_ended(job)
    assert ran == []
    assert torch.equal(rank.block(0, 13), content)


def test_unregistering_while_a_load_waits_leaves_its_blocks_alone(
    rig: RankRig, device: LateDevice
) -> None:
    (rank,) = rig.ranks
    device.let_run()
    rig.store("asleep", [7])
    blocked = threading.Event()
    job = rig.draft("asleep", [14])
    rig.send(loads=[job])
    device.launch(lambda: _assert_set(blocked))
    rig.run(rig.metadata(loads=[job]))
    rank.worker.unregister_kv_caches()
    rank.memory.zero_()
    blocked.set()
    rig.collect()
    assert rig.was_done(job) == [False]
    rank.worker.restore_kv_caches()
    assert rank.worker.get_handshake_metadata().registered
    assert not rank.memory.any(), "a copy came after the memory was taken back"


def _assert_set(event: threading.Event) -> Any:
    assert event.wait(PATIENCE_S)
