"""Registrations whose worker ends before they do leave nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.registration.rendezvous import Rendezvous
from kvd.control.services.worker import WorkerServicer
from kvd.core.errors import UnknownRegistration
from kvd.core.keys import MoverId
from kvd.processes.mappings import ExtentFiles
from kvd.runtime.turns import FairQueue
from kvd_proto.v1 import worker_pb2
from tests.control.daemon_rig import BLOCK_BYTES, NUM_BLOCKS, group_layout, identity, memory


def worker_with_memory() -> Peer:
    """It has offered what it registers."""
    peer = Peer(Credentials(1, 1, 0, None), Role.WORKER, "test", lambda _message, _fds: None)
    kv = os.memfd_create("kv")
    os.ftruncate(kv, NUM_BLOCKS * BLOCK_BYTES)
    peer.offer(7, kv, is_device=False)
    return peer


async def test_engine_whose_workers_end_while_its_movers_start_is_forgotten() -> None:
    """The first of two that fail lets go of the engine's record, and the other makes a new one."""
    started = asyncio.Semaphore(0)

    async def start(*_: object) -> Any:
        await started.acquire()
        return SimpleNamespace(mover=MoverId(0))

    async def end_rank(*_: object) -> None:
        return

    numbers = itertools.count(1)
    driver: Any = SimpleNamespace(
        turns=FairQueue(),
        fleet=SimpleNamespace(start=start),
        pool=SimpleNamespace(extent_files=ExtentFiles(Path(), 0, 1 << 20), payload_checksums=False),
        allocate_mover_id=lambda: MoverId(next(numbers)),
        end_rank=end_rank,
        has_ends_to_come=lambda _session: False,
    )
    engines = Rendezvous(driver)
    common: Any = SimpleNamespace(driver=driver, engines=engines, draining=False)
    peers: Any = SimpleNamespace(behind=lambda context, _role: context)
    gpus: Any = None
    servicer = WorkerServicer(common, peers, gpus)
    workers: list[Any] = [worker_with_memory() for _ in range(2)]
    registering = []
    for rank, worker in enumerate(workers):
        request = worker_pb2.RegisterRankRequest(
            identity=identity("engine"),
            rank=rank,
            world_size=2,
            shard=rank,
            writer=True,
            memories=[memory()],
            groups=[group_layout()],
        )
        registering.append(asyncio.create_task(servicer.RegisterRank(request, worker)))
    for _ in range(20):
        await asyncio.sleep(0)
    for worker in workers:
        worker.end()
    for task in registering:
        started.release()
        with pytest.raises(UnknownRegistration, match="ended meanwhile"):
            await task
    assert not engines._meeting.starts
