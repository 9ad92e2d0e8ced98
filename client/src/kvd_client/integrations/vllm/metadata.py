"""What passes between the connector's two sides, in each step and once at start.

vLLM pickles these to and from its workers. Jobs are named by kvd's job ids, which are vLLM's
plus one: kvd has no job 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvd_client.scheduler import StepPlan

KvdJobId = NewType("KvdJobId", int)


def kvd_job_id(job_id: int) -> KvdJobId:
    """Kvd's id of a vLLM job."""
    return KvdJobId(job_id + 1)


def vllm_job_id(job_id: int) -> int:
    """VLLM's id of a kvd job."""
    return job_id - 1


@dataclass
class KvdConnectorMetadata(OffloadingConnectorMetadata):
    """One step's orders to every worker. vLLM's own job tables stay empty: the daemon has them.

    `plan` is what `kvd_client.worker.Worker` takes. `refused` are new jobs that never left for the
    daemon: each worker reports them as failed, once. `lost` are jobs of earlier plans whose
    session is gone: a worker that has one open still reports it as failed, one that has reported
    it already says nothing. `load_requests` has the request of every load, also of refused ones.
    `has_run` is False for a step that computes nothing: vLLM makes one after the other then.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    load_requests: dict[int, str] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    has_run: bool = True


@dataclass
class KvdWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's acknowledgements (by vLLM's job ids), and which of the jobs failed on some rank."""

    failed_jobs: set[int] = field(default_factory=set)
    left_jobs: set[int] = field(default_factory=set)  # stores that left blocks to other engines'

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvdWorkerMetadata:
        """Both ranks' words as one; a job that failed on one has failed."""
        merged = super().aggregate(other)
        failed = self.failed_jobs | getattr(other, "failed_jobs", set())
        left = self.left_jobs | getattr(other, "left_jobs", set())
        return KvdWorkerMetadata(merged.completed_jobs, merged.transfer_stats, failed, left)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """What one rank's memory turned out to be, for the scheduler to open its session with.

    `shard_bytes[g]` are the bytes of one engine block of group g on this rank; `registered` says
    whether the daemon had this rank's memory by then.
    """

    rank: int
    shard: int
    shard_bytes: tuple[int, ...]
    kv_layout: str
    registered: bool
    problem: str = ""
