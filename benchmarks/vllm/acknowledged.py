"""vLLM's in-process CPU manager with a worker that acknowledges every job at once.

The real worker needs a GPU. The scheduler side, which is what is measured, is vLLM's own; the
worker's part of it is to report each job as done, which this one does in the same step.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class AcknowledgingWorker(OffloadingWorker):
    """Copies nothing; every job is done when it is asked about."""

    def __init__(self) -> None:
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        del src_spec, dst_spec
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        del src_spec, dst_spec, expedited
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""


class AcknowledgedCpuSpec(CPUOffloadingSpec):
    """Named by `spec_name` in the connector's extra configuration."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        del kv_caches
        return AcknowledgingWorker()
