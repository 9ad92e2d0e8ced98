"""What a signal's handler raises amid a rank's registration or its end leaves nothing open."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_client import EngineIdentity, Fragment, GroupLayout, SharedMemory, Worker
from kvd_client.scheduler.plan import StepPlan
from kvd_client.worker.rank_memory import RegisteredMemory, take_memory
from kvd_client.worker.registrar import Registrar
from kvd_client.worker.registration import Registration
from tests.client.interrupts import interrupted, interrupted_at
from tests.client.worker_bench import FAILED, LOAD, STORE, Bench, MoverStandIn
from tests.daemon_process import DaemonProcess
from tests.waiting import PATIENCE_SECONDS, wait_until

BLOCKS, BLOCK_BYTES = 16, 4096
LAYOUT = GroupLayout(BLOCKS, [Fragment(0, 0, BLOCK_BYTES, BLOCK_BYTES)])
RANK_THREAD = "kvd-rank"


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    fd = os.memfd_create("interrupted")
    os.ftruncate(fd, BLOCKS * BLOCK_BYTES)
    yield SharedMemory(fd, 0, BLOCKS * BLOCK_BYTES)
    os.close(fd)


def descriptors() -> dict[str, str]:
    """This process's, and what each is."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found[fd.name] = str(fd.readlink())
        except FileNotFoundError:
            continue  # the listing's own
    return found


def rank_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == RANK_THREAD]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SharedMemory, "__post_init__"),
        (Registrar, "__init__"),
        (os, "eventfd"),
        (threading.Thread, "start"),
    ],
)
def test_an_interrupted_registration_leaves_nothing_and_can_be_had_again(
    daemon: DaemonProcess, memory: SharedMemory, owner: Any, name: str, *, after: bool
) -> None:
    if name == "eventfd" and after:
        pytest.skip("nobody has the descriptor then, not even Python")
    worker = Worker(daemon.socket, EngineIdentity("e", bytes(16)))
    before = descriptors()
    with interrupted(owner, name, after=after):
        worker.register([memory], [LAYOUT])
    wait_until(lambda: not rank_threads(), "the thread's end")
    wait_until(lambda: descriptors() == before, "the descriptors' end")  # gRPC closes its own later
    worker.register([memory], [LAYOUT])
    assert worker.wait_registered(PATIENCE_SECONDS), worker.problem
    assert worker.unregister()
    wait_until(lambda: not rank_threads(), "the thread's end")
    wait_until(lambda: not daemon.movers(), "the mover's end")
    wait_until(lambda: descriptors() == before, "the descriptors' end")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Registrar, "stop"),
        (Registrar, "_unregister"),
        (Worker, "_poll"),
        (Registration, "close"),
        (RegisteredMemory, "close"),
    ],
)
def test_an_interrupted_unregistration_is_ended_by_the_next(
    daemon: DaemonProcess, memory: SharedMemory, owner: Any, name: str, *, after: bool
) -> None:
    worker = Worker(daemon.socket, EngineIdentity("e", bytes(16)))
    before = descriptors()
    worker.register([memory], [LAYOUT])
    assert worker.wait_registered(PATIENCE_SECONDS), worker.problem
    with interrupted(owner, name, after=after):
        worker.unregister()
    assert worker.unregister()
    wait_until(lambda: not rank_threads(), "the thread's end")
    wait_until(lambda: not daemon.movers(), "the mover's end")
    wait_until(lambda: descriptors() == before, "the descriptors' end")


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", ["_ring.close", "_board.close", "os.close"])
def test_a_dead_movers_channel_is_closed_though_a_handler_raises_amid_it(
    mover: MoverStandIn, name: str, at: int
) -> None:
    bench, registration = Bench(mover), mover.registration
    bench.registrar.lose()
    mover.die()
    assert registration.wait_dead(PATIENCE_SECONDS)
    ours = {str(registration.pidfd), str(registration._event_fd)}
    path, name = name.split(".")
    owner = os if path == "os" else getattr(registration, path)
    with interrupted(owner, name, after=True, at=at if path == "os" else 1):
        bench.worker.get_finished()
    bench.worker.get_finished()
    assert not bench.registrar.lost
    assert not ours & descriptors().keys()


def test_memory_of_which_one_descriptor_is_wrong_leaves_none_open(memory: SharedMemory) -> None:
    before = descriptors()
    with pytest.raises(OSError, match="descriptor"):
        take_memory([memory, SharedMemory(999_999, 0, BLOCK_BYTES)], [])
    assert descriptors() == before


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_no_end_is_lost_wherever_a_handler_raises(
    mover: MoverStandIn, monkeypatch: pytest.MonkeyPatch, *, dies: bool
) -> None:
    bench, registration = Bench(mover), mover.registration
    monkeypatch.setattr(registration, "close", lambda: None)  # it is lost again and again
    for count in itertools.count(1):
        load, store, refused = range(3 * count, 3 * count + 3)
        bench.registrar.current = registration
        bench.worker.start_loads(StepPlan(loads=(load,)))
        bench.worker.finish_step(StepPlan(stores=(store, refused)))
        mover.post(load, LOAD)
        mover.post(store, STORE, lane=1)
        if dies:
            bench.registrar.lose()
            registration.is_dead = True
        else:
            mover.post(refused, STORE, FAILED)
        was_interrupted = interrupted_at(count, bench.worker.get_finished)
        if not was_interrupted:
            assert count > 10
            return
        assert sorted(bench.ended()) == [(load, True), (store, True), (refused, False)], count
        registration.is_dead = False
        bench.registrar.lost.clear()
