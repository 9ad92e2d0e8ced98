"""The engine's scheduler side of kvd: names the namespace, translates requests and outcomes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from examples.engine.blocks import HashChain
from examples.engine.config import EngineConfig, Shard, layer_block_bytes
from examples.engine.offload import OffloadOutcome, Progress
from examples.engine.requests import Request
from examples.engine.weights import Checkpoint
from kvd_client import (
    EngineIdentity,
    Group,
    NamespaceFields,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerConnection,
    SchedulerOptions,
    WorkerReport,
)


def namespace_of(config: EngineConfig, checkpoint: Checkpoint) -> NamespaceFields:
    """All that must agree before two engines may share KV."""
    model = checkpoint.model
    chain = HashChain(model.digest(), checkpoint.weights_id, config.block_tokens)
    shard_bytes = tuple(
        model.layers
        * layer_block_bytes(model, Shard.of(model, rank, config.ranks), config.block_tokens)
        for rank in range(config.ranks)
    )
    return NamespaceFields(
        model=model.name,
        model_config_digest=model.digest(),
        weights_id=checkpoint.weights_id,
        kv_dtype="float32",
        attention_backend="torch-sdpa",
        kv_layout="layer-block-head-token-kv",
        parallel_shape=f"tp{config.ranks}",
        hash_algorithm=f"sha256-chain:{chain.seed.hex()}",
        hash_bytes=len(chain.seed),
        groups=(Group(tokens_per_block=config.block_tokens, shard_bytes=shard_bytes),),
    )


class KvdOffload:
    """The seam's real side. An absent daemon is a miss, never an error."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, boot_nonce: bytes) -> None:
        self._connection = SchedulerConnection(
            config.socket,
            EngineIdentity(config.engine_id, boot_nonce),
            namespace_of(config, checkpoint),
            config.ranks,
            config.lookup_patience_s,
        )
        patience_s = config.lookup_patience_s
        options = SchedulerOptions(lookup_give_up_s=patience_s, retry_deadline_s=patience_s)
        self._scheduler = Scheduler(self._connection, options)
        self._loads: set[int] = set()  # job ids, to tell loaded bytes from stored ones
        self._bytes_stored = 0
        self._bytes_loaded = 0

    def wait_until_connected(self, timeout_s: float) -> bool:
        return self._connection.wait_usable(timeout_s)

    def arrived(self, request: Request) -> None:
        self._scheduler.on_new_request(
            request.request_id,
            len(request.tokens),
            [request.hashes],
            RequestParams(skip_lookup=not request.order.use_cache),
        )

    def matched(self, request: Request, computed: int) -> int | None:
        return self._scheduler.get_num_new_matched_tokens(request.request_id, computed)

    def allocated(self, request: Request, external: int) -> None:
        self._scheduler.update_state_after_alloc(request.request_id, [request.blocks], external)

    def plan(self, progress: Iterable[Progress], preempted: Sequence[Request]) -> Any:
        scheduled = [
            ScheduledRequest(
                each.request.request_id,
                [each.request.blocks],
                each.computed_after,
                [each.request.hashes],
            )
            for each in progress
        ]
        plan = self._scheduler.build_step(scheduled, [each.request_id for each in preempted])
        self._loads.update(plan.loads)
        return plan

    def outcome(self, reports: Sequence[WorkerReport]) -> OffloadOutcome:
        for report in reports:
            for job in report.ended:
                if job.job_id in self._loads:
                    self._bytes_loaded += job.bytes_copied
                else:
                    self._bytes_stored += job.bytes_copied
        found = self._scheduler.update_from_workers(reports)
        return OffloadOutcome(found.finished_loads, found.failed_loads)

    def finished(self, request: Request) -> None:
        # The last token sampled has no KV: the count leaves it out.
        self._scheduler.request_finished(request.request_id, [request.blocks], request.computed)

    @property
    def pending(self) -> bool:
        return self._scheduler.has_pending_work()

    @property
    def copied_bytes(self) -> tuple[int, int]:
        return self._bytes_stored, self._bytes_loaded

    def close(self) -> None:
        if self._scheduler.lookups_given_up:
            print(f"engine: lookups given up: {self._scheduler.lookups_given_up}", file=sys.stderr)
        self._connection.close()
