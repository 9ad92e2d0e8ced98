"""What passes between the connector's two sides, in each step and once at start.

vLLM pickles these to and from its workers. Orders name kvd's jobs, acknowledgements vLLM's: one of
vLLM's is several of kvd's where it is too large for one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvd_client.scheduler import StepPlan


@dataclass
class KvdConnectorMetadata(OffloadingConnectorMetadata):
    """One step's orders to every worker. vLLM's own job tables stay empty: the daemon has them.

    `plan` is what `kvd_client.worker.Worker` takes. `refused` are new jobs that never left for the
    daemon: each worker reports them as failed, once. `lost` are jobs of earlier plans whose
    session is gone: a worker that has one open still reports it as failed, one that has reported
    it already says nothing. `owners` has vLLM's job of every new one, also of refused ones, and
    `load_requests` the request of vLLM's job where that is a load.
    `has_run` is False for a step that computes nothing: vLLM makes one after the other then.
    `begins_with_loads`: another connector, under MultiConnector, loads within the step, and vLLM
    calls the hooks that begin loads before the forward, not after it.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    owners: dict[int, int] = field(default_factory=dict)
    load_requests: dict[int, str] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    has_run: bool = True
    begins_with_loads: bool = False


@dataclass
class KvdWorkerMetadata(OffloadingWorkerMetadata):
    """What one rank reports of a step: ended jobs by vLLM's ids, and which of them failed."""

    failed_jobs: set[int] = field(default_factory=set)
    left_jobs: set[int] = field(default_factory=set)  # stores that left blocks to other engines'
    gave_up: bool = False  # stores at a mover that seems to hang

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvdWorkerMetadata:
        """Both ranks' words as one; a job that failed on one has failed."""
        merged = super().aggregate(other)
        failed = self.failed_jobs | getattr(other, "failed_jobs", set())
        left = self.left_jobs | getattr(other, "left_jobs", set())
        gave_up = self.gave_up or getattr(other, "gave_up", False)
        return KvdWorkerMetadata(
            merged.completed_jobs, merged.transfer_stats, failed, left, gave_up
        )


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """What one rank tells the scheduler side of its memory, so that it can open its session.

    `shard_bytes[g]` are the bytes of one engine block of group g on this rank; `registered` says
    whether the daemon had this rank's memory by then.
    """

    rank: int
    shard: int
    shard_bytes: tuple[int, ...]
    kv_layout: str
    registered: bool
    problem: str = ""
