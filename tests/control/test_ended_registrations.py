"""Registrations whose worker ends before they do leave nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.errors import MoverStartFailed
from kvd.control.registration.rendezvous import Rendezvous, process_of
from kvd.control.services import worker as worker_service
from kvd.control.services.worker import WorkerServicer
from kvd.core.engines.meeting import RegistrationState, SchedulerSide
from kvd.core.errors import UnknownRegistration
from kvd.core.keys import MoverId, SessionId
from kvd.mover.facts import MoverFacts
from kvd.processes.mappings import ExtentFiles
from kvd.runtime.turns import FairQueue
from kvd_proto.v1 import worker_pb2
from tests.control.daemon_rig import BLOCK_BYTES, NUM_BLOCKS, group_layout, identity, memory
from tests.control.live_session import SPEC


def worker_with_memory() -> Peer:
    """It has offered what it registers."""
    peer = Peer(Credentials(1, 1, 0, None), Role.WORKER, "test", lambda _message, _fds: None)
    kv = os.memfd_create("kv")
    os.ftruncate(kv, NUM_BLOCKS * BLOCK_BYTES)
    peer.offer(7, kv, is_device=False)
    return peer


def driver_that(start: Callable[..., Any], end_rank: Callable[..., Any]) -> Any:
    """A driver that starts and ends movers so, and has no session."""
    numbers = itertools.count(1)
    return SimpleNamespace(
        turns=FairQueue(),
        fleet=SimpleNamespace(start=start),
        pool=SimpleNamespace(extent_files=ExtentFiles(Path(), 0, 1 << 20), payload_checksums=False),
        allocate_mover_id=lambda: MoverId(next(numbers)),
        end_rank=end_rank,
        has_ends_to_come=lambda _session: False,
    )


def servicer_of(driver: Any, engines: Rendezvous) -> WorkerServicer:
    """One whose calls say who made them."""
    common: Any = SimpleNamespace(driver=driver, engines=engines, draining=False)
    peers: Any = SimpleNamespace(behind=lambda context, _role: context.peer)
    gpus: Any = None
    return WorkerServicer(common, peers, gpus)


def context_of(worker: Peer, *, is_given_up: bool = False) -> Any:
    return SimpleNamespace(peer=worker, cancelled=lambda: is_given_up)


def rank(number: int, world_size: int) -> worker_pb2.RegisterRankRequest:
    """The registration of one rank, with a shard of its own."""
    return worker_pb2.RegisterRankRequest(
        identity=identity("engine"),
        rank=number,
        world_size=world_size,
        shard=number,
        writer=True,
        memories=[memory()],
        groups=[group_layout(blocks_per_block=0)],  # as one that comes first may
    )


async def test_engine_whose_workers_end_while_its_movers_start_is_forgotten() -> None:
    """The first of two that fail lets go of the engine's record, and the other makes a new one."""
    started = asyncio.Semaphore(0)

    async def start(*_: object) -> Any:
        await started.acquire()
        return SimpleNamespace(mover=MoverId(0))

    async def end_rank(*_: object) -> None:
        return

    driver = driver_that(start, end_rank)
    engines = Rendezvous(driver)
    servicer = servicer_of(driver, engines)
    workers = [worker_with_memory() for _ in range(2)]
    registering = [
        asyncio.create_task(servicer.RegisterRank(rank(number, 2), context_of(worker)))
        for number, worker in enumerate(workers)
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    for worker in workers:
        worker.end()
    for task in registering:
        started.release()
        with pytest.raises(UnknownRegistration, match="ended meanwhile"):
            await task
    assert not engines._meeting.starts


async def test_a_scheduler_that_comes_with_another_size_while_the_mover_starts_ends_it() -> None:
    """The rank guessed one engine block a block; its mover would copy the wrong bytes."""
    begun, may_start = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def start(*_: object) -> Any:
        begun.set()
        await may_start.wait()
        return SimpleNamespace(mover=MoverId(1))

    async def end_rank(_mover: MoverId, reason: str) -> None:
        ended.append(reason)

    driver = driver_that(start, end_rank)
    engines = Rendezvous(driver)
    servicer, worker = servicer_of(driver, engines), worker_with_memory()
    registering = asyncio.create_task(servicer.RegisterRank(rank(0, 1), context_of(worker)))
    await begun.wait()
    (group,) = SPEC.groups
    spec = replace(SPEC, groups=(replace(group, blocks_per_block=2),))
    scheduler: Any = SchedulerSide(SessionId(1), process_of(worker), spec, 1)
    engines._meeting.starts[(worker.uid, "engine")].session = scheduler
    may_start.set()
    with pytest.raises(MoverStartFailed, match="another block size; register again"):
        await registering
    assert ended == ["its registration failed"]
    worker.end()


@pytest.mark.parametrize("how", ["it was sent", "the call was given up", "it could not be sent"])
async def test_only_a_rank_whose_worker_was_sent_the_answer_counts_as_ready(how: str) -> None:
    mover: Any = SimpleNamespace(
        mover=MoverId(1), pid=1, ring_fd=0, board_fd=0, event_fd=0, pidfd=0, facts=MoverFacts()
    )

    async def start(*_: object) -> Any:
        return mover

    driver = driver_that(start, start)
    driver.fleet.process_of = lambda _mover: mover
    engines = Rendezvous(driver)
    servicer, worker = servicer_of(driver, engines), worker_with_memory()
    context = context_of(worker, is_given_up=how == "the call was given up")

    async def answer() -> None:
        await servicer.RegisterRank(rank(0, 1), context)
        if how == "it could not be sent":
            raise ConnectionError

    await asyncio.gather(asyncio.create_task(answer()), return_exceptions=True)
    state = engines._meeting.registrations[MoverId(1)].state
    is_ready = state is RegistrationState.ANSWERED
    assert is_ready == (how == "it was sent")
    worker.end()
    await asyncio.sleep(0)


@pytest.mark.parametrize("has_thread", [True, False], ids=["in a thread", "without one"])
async def test_exports_of_device_memory_are_closed_with_their_registration(
    has_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def end_rank(*_: object) -> None:
        return

    if not has_thread:
        monkeypatch.setattr(worker_service, "to_its_end", no_thread)
    driver = driver_that(end_rank, end_rank)
    servicer, worker = servicer_of(driver, Rendezvous(driver)), worker_with_memory()
    export = os.open("/dev/null", os.O_RDWR)  # a character device, as drivers export by
    worker.offer(8, export, is_device=True)
    worker.registrations.add(1)
    request = worker_pb2.UnregisterRankRequest(registration_id=1)
    await servicer.UnregisterRank(request, context_of(worker))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(export)
    assert list(worker.memories) == [7], "host memory may be registered again"
    worker.end()
