"""An engine whose KV lies on the GPU, at a real daemon: kvd's own client, no model."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.peers import DeviceMemory
from benchmarks.rig import JOB_BLOCKS, BenchEngine, keys
from kvd_client import DeviceSpan, StepPlan
from kvd_client.draft import BlockRun, JobDraft, StepDraft
from kvd_proto.v1 import common_pb2

LOOK_SECONDS = 50e-6


class GpuEngine(BenchEngine):
    """One rank over `memory`: fragment after fragment, each of all blocks."""

    def __init__(self, socket: str, memory: DeviceMemory, block_bytes: int, fragments: int) -> None:
        self.blocks, self.block_bytes = memory.bytes // block_bytes, block_bytes
        span = memory.tensor if memory.is_torch else DeviceSpan(memory.address, memory.bytes)
        self._prefix = 0
        self._stored: list[bytes] = []
        try:
            self._join(socket, f"gpu-{block_bytes}-{fragments}", fragments, span)
        except BaseException:
            self.close()
            raise

    def move(self, kinds: list[str], order: list[int], job_blocks: int = JOB_BLOCKS) -> float:
        """Store and load those engine blocks, a half each when both; seconds until all is seen.

        What is stored has new keys; what is loaded was stored by the pass before.
        """
        both = len(kinds) == 2
        half = len(order) // 2 if both else len(order)
        step, plan_of = StepDraft(), {}
        if "load" in kinds:
            loaded = order[half:] if both else order
            hashes = self._stored[: len(loaded)]
            plan_of["loads"] = self._draft(step.loads, hashes, loaded[: len(hashes)], job_blocks)
        if "store" in kinds:
            self._prefix += 1
            self._stored = keys(self._prefix, half)
            plan_of["stores"] = self._draft(step.stores, self._stored, order[:half], job_blocks)
        return self._run(step, StepPlan(**plan_of))

    def _draft(
        self, jobs: list[JobDraft], hashes: list[bytes], engine_blocks: list[int], most: int
    ) -> tuple[int, ...]:
        ids = []
        for at in range(0, len(hashes), most):
            self._job += 1
            ids.append(self._job)
            run = BlockRun(0, at, hashes[at : at + most], engine_blocks[at : at + most])
            context = common_pb2.ReqContext(request_id=f"r{self._job}")
            jobs.append(JobDraft(self._job, context, [run]))
        return tuple(ids)

    def _run(self, step: StepDraft, plan: StepPlan) -> float:
        began = time.perf_counter()
        assert self.connection.send_step(step)
        self.worker.start_step(plan)
        self.worker.finish_step(plan)
        left = {*plan.stores, *plan.loads}
        failed: list[Any] = []
        while left:
            for report in self.worker.get_finished().ended:
                left.discard(report.job_id)
                failed += [] if report.done else [report]
            time.sleep(LOOK_SECONDS)
        seconds = time.perf_counter() - began
        assert not failed, f"{len(failed)} jobs failed: {failed[:2]}"
        return seconds

    def close(self) -> None:
        """Leave the daemon; the memory is its owner's."""
        self.worker.close()
        self.connection.close()
