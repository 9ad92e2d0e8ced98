"""An engine whose KV lies on the GPU, at a real daemon: kvd's own client, no model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from benchmarks.gpu.peers import DeviceMemory
from benchmarks.rig import BenchEngine, keys
from kvd_client import DeviceSpan, Fragment, GroupLayout, StepPlan, Worker
from kvd_client.draft import StepDraft
from tests.client.kv_memory import KvMemory

GPU_JOB_BLOCKS = 512  # a step of 8192 tokens, in blocks of 16
LOOK_SECONDS = 50e-6
SOON_SECONDS = 1e-6
TOLD_SECONDS = 0.02  # what the daemon may plan a large step in; a model computes it for longer
STEP_SECONDS = 0.004  # from the scheduler's step until the worker has its plan, and a model runs


class GpuKv:
    """Memory of somebody else's: fragment after fragment, each of all blocks.

    It is only offered: nobody here looks at its bytes. `order`: where each fragment lies among
    the others, one after the other if it is not told.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        block_bytes: int,
        fragments: int,
        order: Sequence[int] | None = None,
    ) -> None:
        self._memory, self._blocks = memory, memory.bytes // block_bytes
        self._order, self._size = order or range(fragments), block_bytes // fragments

    def register(self, worker: Worker) -> None:
        memory, size = self._memory, self._size
        span = memory.tensor if memory.is_torch else DeviceSpan(memory.address, memory.bytes)
        places = [Fragment(0, number * self._blocks * size, size, size) for number in self._order]
        worker.register([span], [GroupLayout(self._blocks, places)])

    def close(self) -> None:
        """The memory is its owner's."""


class GpuEngine(BenchEngine):
    """One rank over `memory`."""

    def __init__(self, socket: str, memory: DeviceMemory, block_bytes: int, fragments: int) -> None:
        self._kv = GpuKv(memory, block_bytes, fragments)
        self._prefix = 0
        self._keys: list[bytes] = []  # of what the pass before stored
        name, blocks = f"gpu-{block_bytes}-{fragments}", memory.bytes // block_bytes
        super().__init__(socket, name, blocks, block_bytes, fragments)

    def make_memory(self) -> KvMemory:
        return cast("KvMemory", self._kv)

    def move(self, kinds: list[str], order: list[int], told_s: float = 0.0) -> float:
        """Store and load those engine blocks, a half each when both; seconds until all is seen.

        What is stored has new keys; what is loaded was stored by the pass before. From the
        scheduler's step on; with `told_s`: from the worker's submission on, that much later.
        """
        step, plan = self._drafted(kinds, order)
        began = time.perf_counter()
        assert self.connection.send_step(step)
        if told_s:
            time.sleep(told_s)
            began = time.perf_counter()
        failed = self.see_jobs(plan, LOOK_SECONDS)
        seconds = time.perf_counter() - began
        assert not failed, f"{failed} jobs failed"
        return seconds

    def move_one(self, kind: str, *, is_known: bool) -> float:
        """Store or load one engine block; seconds until its end is seen.

        From the scheduler's step on; `is_known`: from the worker's submission on, of a step that
        the daemon got STEP_SECONDS before, as it does from an engine with a worker of its own.
        """
        step, plan = self._drafted([kind], [0])
        began = time.perf_counter()
        assert self.connection.send_step(step)
        if is_known:
            time.sleep(STEP_SECONDS)
            began = time.perf_counter()
        failed = self.see_jobs(plan, SOON_SECONDS)
        seconds = time.perf_counter() - began
        assert not failed, f"{failed} jobs failed"
        return seconds

    def _drafted(self, kinds: list[str], order: list[int]) -> tuple[StepDraft, StepPlan]:
        """A step and its plan, as `move` says."""
        self.job_blocks = GPU_JOB_BLOCKS
        both = len(kinds) == 2
        half = len(order) // 2 if both else len(order)
        step, plan_of = StepDraft(), {}
        if "load" in kinds:
            loaded = order[half:] if both else order
            hashes = self._keys[: len(loaded)]
            plan_of["loads"] = self.draft(step.loads, hashes, loaded[: len(hashes)])
        if "store" in kinds:
            self._prefix += 1
            self._keys = keys(self._prefix, half)
            plan_of["stores"] = self.draft(step.stores, self._keys, order[:half])
        return step, StepPlan(**plan_of)
