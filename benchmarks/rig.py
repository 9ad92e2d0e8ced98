"""A real daemon, and engines for benchmarks: kvd's own client, no model.

`DaemonProcess` is the tests' own; an engine's workers run in the benchmark's process, while
control and movers are the daemon's processes, as in production.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ends import end_in_order
from kvd_client import StepPlan
from kvd_client.draft import AFTER_THE_STEP, BlockRun, JobDraft, StepDraft
from kvd_proto.v1 import common_pb2
from tests.client.content import HASH_BYTES, TOKENS
from tests.client.kv_memory import HostMemory, KvMemory
from tests.client.small_engine import IMPATIENT, SmallEngine
from tests.daemon_process import DaemonProcess

MIB = 1 << 20
TOKENS_PER_BLOCK = TOKENS
BLOCK_BYTES = 2 * MIB  # a Llama-8B-like block: 32 layers x 8 KV heads x 128 x K and V x 16 x bf16
JOB_BLOCKS = 256  # one prompt of 4096 tokens
# Engines look at their board once a step, every few ms. To look more often takes processor time
# from copies: every 0.5 ms two engines' threads took a tenth of two cores.
POLL_SECONDS = 0.002
REGISTER_SECONDS = 60.0


@contextlib.contextmanager
def daemon(
    pool_bytes: int, extent_bytes: int = 64 * MIB, **flags: object
) -> Iterator[DaemonProcess]:
    """`kvd serve` with a pool of its own on shared memory, removed at the end."""
    with daemon_in_session(pool_bytes, extent_bytes, flags, is_own=False) as running:
        yield running


@contextlib.contextmanager
def daemon_in_session(
    pool_bytes: int, extent_bytes: int, flags: Mapping[str, object], *, is_own: bool
) -> Iterator[DaemonProcess]:
    """The same, in a login session of its own or in this process's.

    From here on a signal that ends the benchmark ends what it has started, too.
    """
    end_in_order()
    scratch = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    pool = Path(tempfile.mkdtemp(prefix=f"kvd-bench-{os.getpid()}-", dir="/dev/shm"))
    running = DaemonProcess(scratch, pool)
    running.pool_bytes, running.extent_bytes = pool_bytes, extent_bytes
    running.own_session = is_own
    running.flags = {"log-level": "warning", **flags}
    try:
        running.start()
        yield running
    finally:
        running.end()
        shutil.rmtree(scratch)
        shutil.rmtree(pool)


def keys(prefix: int, count: int, first: int = 0) -> list[bytes]:
    """`count` different block hashes of one prompt, uniform like a real hash."""
    made = np.random.default_rng([prefix, 7]).bytes(HASH_BYTES * (first + count))
    return [made[i : i + HASH_BYTES] for i in range(HASH_BYTES * first, len(made), HASH_BYTES)]


class BenchEngine(SmallEngine):
    """An engine over mapped, touched memory that chooses its own jobs.

    Of each rank's memory fragment lies after fragment, each of all blocks. It waits for its
    daemon as the client does by itself; `changes` are of the small engine's settings.
    """

    def __init__(
        self,
        socket: str,
        name: str,
        blocks: int,
        block_bytes: int = BLOCK_BYTES,
        fragments: int = 1,
        **changes: Any,
    ) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self.job_blocks = JOB_BLOCKS
        settings = {
            "model": f"bench-{block_bytes}-{fragments}",
            "num_blocks": blocks,
            "block_bytes": block_bytes,
            "layers": fragments,
            **IMPATIENT,
            **changes,
        }
        super().__init__(socket, name, **settings)
        self._job = 0
        try:
            self.wait_usable(REGISTER_SECONDS)
        except BaseException:
            self.close()
            raise

    def make_memory(self) -> KvMemory:
        memory = super().make_memory()
        assert isinstance(memory, HostMemory)
        memory.kv[:] = 1
        return memory

    def run(
        self, kind: str, hashes: Sequence[bytes], engine_blocks: Sequence[int], check: bool = True
    ) -> float:
        """Store or load these blocks in jobs of `job_blocks`; seconds until the board says so."""
        step, plan = self.step_of(kind, hashes, engine_blocks)
        began = time.perf_counter()
        failed = self.run_jobs(step, plan)
        seconds = time.perf_counter() - began
        assert not (check and failed), f"{failed} of {len(step.job_ids())} jobs failed"
        return seconds

    def run_jobs(self, step: StepDraft, plan: StepPlan, pause_s: float = POLL_SECONDS) -> int:
        """Send a step's jobs, and look every `pause_s` until each rank was told of each; how many
        have failed."""
        assert self.connection.send_step(step)
        return self.see_jobs(plan, pause_s)

    def see_jobs(self, plan: StepPlan, pause_s: float = POLL_SECONDS) -> int:
        """Let each rank submit its half of the plan's jobs, and look as `run_jobs` does."""
        for rank in self.ranks:
            rank.worker.start_step(plan)
            rank.worker.finish_step(plan)
        failed = 0
        for rank in self.ranks:
            left = {*plan.stores, *plan.loads}
            while True:
                for report in rank.worker.get_finished().ended:
                    left.discard(report.job_id)
                    failed += not report.done
                if not left:
                    break  # at once: a pause more would count as the daemon's time
                time.sleep(pause_s)
        return failed

    def step_of(
        self, kind: str, hashes: Sequence[bytes], engine_blocks: Sequence[int]
    ) -> tuple[StepDraft, StepPlan]:
        """A step of stores or loads, and its plan."""
        step = StepDraft()
        if kind == "store":
            return step, StepPlan(stores=self.draft(step.stores, hashes, engine_blocks))
        return step, StepPlan(loads=self.draft(step.loads, hashes, engine_blocks))

    def draft(
        self,
        jobs: list[JobDraft],
        hashes: Sequence[bytes],
        engine_blocks: Sequence[int],
    ) -> tuple[int, ...]:
        """Add jobs of at most `job_blocks` blocks; their ids."""
        ids, most = [], self.job_blocks
        for at in range(0, len(hashes), most):
            self._job += 1
            ids.append(self._job)
            run = BlockRun(0, at, hashes[at : at + most], engine_blocks[at : at + most])
            context = common_pb2.ReqContext(request_id=f"r{self._job}")
            jobs.append(JobDraft(self._job, context, [run], ready_together=AFTER_THE_STEP))
        return tuple(ids)
