"""The careless engine's memory as real shared memory, its worker and its daemon real too."""

from __future__ import annotations

import hashlib
import mmap
import os
import time

from kvd_client import (
    EngineIdentity,
    Fragment,
    Group,
    GroupLayout,
    SchedulerConnection,
    SharedMemory,
    StepPlan,
    Worker,
    WorkerReport,
)
from tests.client.engine_rig import namespace
from tests.client.paged_engine import BLOCKS
from tests.client.small_engine import PATIENCE_S

LABEL_BYTES = 16
BLOCK_BYTES = 4 * LABEL_BYTES  # of every group's engine block
STEP_S = 0.002


class SharedDevice:
    """Every token's label as a digest, in memory that a mover maps."""

    def __init__(self, groups: int) -> None:
        self.bytes = groups * BLOCKS * BLOCK_BYTES
        self.fd = os.memfd_create("engine-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.bytes)
        self._map = mmap.mmap(self.fd, self.bytes)

    def write(self, group: int, block: int, offset: int, label: object) -> None:
        at = self._place(group, block, offset)
        self._map[at : at + LABEL_BYTES] = _digest(label)

    def holds(self, group: int, block: int, offset: int, label: object) -> bool:
        at = self._place(group, block, offset)
        return self._map[at : at + LABEL_BYTES] == _digest(label)

    def _place(self, group: int, block: int, offset: int) -> int:
        return (group * BLOCKS + block) * BLOCK_BYTES + offset * LABEL_BYTES

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


class RealSide:
    """One rank's worker and a session with a real daemon."""

    def __init__(self, socket: str, groups: tuple[Group, ...], engine_id: str) -> None:
        identity = EngineIdentity(engine_id, os.urandom(16))
        self.device = SharedDevice(len(groups))
        self._worker = Worker(socket, identity, flush_timeout_s=PATIENCE_S)
        layouts = [
            GroupLayout(
                BLOCKS, [Fragment(0, group * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES)]
            )
            for group in range(len(groups))
        ]
        self._worker.register([SharedMemory(self.device.fd, 0, self.device.bytes)], layouts)
        self.connection = SchedulerConnection(socket, identity, namespace(*groups), 1, PATIENCE_S)
        assert self.connection.wait_usable(PATIENCE_S), self.connection.problem
        assert self._worker.wait_registered(PATIENCE_S), self._worker.problem

    def clock(self) -> float:
        return time.monotonic()

    def start_step(self, plan: StepPlan) -> None:
        self._worker.start_step(plan)

    def finish_step(self, plan: StepPlan) -> WorkerReport:
        self._worker.finish_step(plan)
        time.sleep(STEP_S)
        return self._worker.get_finished()

    def close(self) -> None:
        self._worker.close()
        self.connection.close()
        self.device.close()


def _digest(label: object) -> bytes:
    return hashlib.blake2b(repr(label).encode(), digest_size=LABEL_BYTES).digest()
