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
import numpy.typing as npt

from benchmarks.ends import end_in_order
from kvd_client import (
    EngineIdentity,
    Fragment,
    Group,
    GroupLayout,
    NamespaceFields,
    SchedulerConnection,
    SharedMemory,
    StepPlan,
    Worker,
)
from kvd_client.draft import BlockRun, JobDraft, StepDraft
from kvd_proto.v1 import common_pb2
from tests.daemon_process import DaemonProcess

MIB = 1 << 20
TOKENS_PER_BLOCK = 16
BLOCK_BYTES = 2 * MIB  # a Llama-8B-like block: 32 layers x 8 KV heads x 128 x K and V x 16 x bf16
JOB_BLOCKS = 256  # one prompt of 4096 tokens
POLL_SECONDS = 0.0005  # engines look at their board once a step, every few ms
HASH_BYTES = 32
REGISTER_SECONDS = 30.0


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


class BenchEngine:
    """One engine of one rank over `blocks` engine blocks of mapped, touched memory."""

    def __init__(
        self,
        socket: str,
        name: str,
        blocks: int,
        block_bytes: int = BLOCK_BYTES,
        fragments: int = 1,
    ) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self.fd = os.memfd_create(f"bench-{name}")
        os.ftruncate(self.fd, blocks * block_bytes)
        self.memory: npt.NDArray[np.uint8] = np.memmap(
            f"/proc/self/fd/{self.fd}", dtype=np.uint8, mode="r+"
        )
        self.memory[:] = 1
        self._join(socket, name, fragments, SharedMemory(self.fd, 0, blocks * block_bytes))

    def _join(self, socket: str, name: str, fragments: int, memory: Any) -> None:
        """Open a session and register the memory: fragment after fragment, each of all blocks."""
        blocks, block_bytes = self.blocks, self.block_bytes
        identity = EngineIdentity(name, os.urandom(16))
        group = Group(tokens_per_block=TOKENS_PER_BLOCK, shard_bytes=(block_bytes,))
        namespace = NamespaceFields(
            model=f"bench-{block_bytes}-{fragments}",
            kv_dtype="bfloat16",
            hash_algorithm="sha256",
            hash_bytes=HASH_BYTES,
            groups=(group,),
        )
        size = block_bytes // fragments
        layout = GroupLayout(
            blocks, [Fragment(0, f * blocks * size, size, size) for f in range(fragments)], 1
        )
        self.connection = SchedulerConnection(socket, identity, namespace)
        self.worker = Worker(socket, identity)
        self.worker.register([memory], [layout])
        assert self.worker.wait_registered(REGISTER_SECONDS), self.worker.problem
        assert self.connection.wait_usable(30), self.connection.problem
        self._job = 0

    def run(
        self, kind: str, hashes: Sequence[bytes], engine_blocks: Sequence[int], check: bool = True
    ) -> float:
        """Store or load these blocks in jobs of JOB_BLOCKS; seconds until the board has said so."""
        step, jobs = self.step_of(kind, hashes, engine_blocks)
        plan = StepPlan(stores=jobs) if kind == "store" else StepPlan(loads=jobs)
        began = time.perf_counter()
        assert self.connection.send_step(step)
        self.worker.start_step(plan)
        self.worker.finish_step(plan)
        left, failed = set(jobs), []
        while left:
            for report in self.worker.get_finished().ended:
                left.discard(report.job_id)
                failed += [] if report.done else [report.job_id]
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - began
        assert not (check and failed), f"{len(failed)} of {len(jobs)} jobs failed"
        return seconds

    def step_of(
        self, kind: str, hashes: Sequence[bytes], engine_blocks: Sequence[int]
    ) -> tuple[StepDraft, tuple[int, ...]]:
        """A step of jobs of at most JOB_BLOCKS blocks, and their ids."""
        step = StepDraft()
        jobs = step.stores if kind == "store" else step.loads
        for at in range(0, len(hashes), JOB_BLOCKS):
            self._job += 1
            cut = slice(at, at + JOB_BLOCKS)
            run = BlockRun(0, at, hashes[cut], engine_blocks[cut])
            context = common_pb2.ReqContext(request_id=f"r{self._job}")
            jobs.append(JobDraft(self._job, context, [run]))
        return step, tuple(job.job_id for job in jobs)

    def close(self) -> None:
        """Leave the daemon and give the memory back."""
        self.worker.close()
        self.connection.close()
        os.close(self.fd)
