"""Blocks that vLLM named for a request although no step has computed them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput


class NeverComputed:
    """Takes their names back, so that no request finds them in vLLM's prefix cache.

    VLLM names a block by its hash when it schedules the step that will compute it. With priorities
    it may preempt a request that has its place in the step already, and leaves the names behind.
    Whoever finds such a block goes on from bytes of something else, and all that is computed
    behind it would be stored under the right hashes. A name taken back in vain costs a hit.

    It leaves the names, too, where another connector's load failed within a step. All of that is
    computed anew, but maybe only steps later, or never.
    """

    def __init__(self, vllm_config: VllmConfig, tokens_per_hash: int) -> None:
        self._has_priorities = vllm_config.scheduler_config.policy == "priority"
        self._tokens_per_hash = tokens_per_hash
        self._pool: BlockPool | None = None
        self._computed: dict[str, int] = {}  # tokens of live requests, with their last step

    def bind(self, pool: BlockPool) -> None:
        """VLLM's account of the device's blocks."""
        self._pool = pool

    def step(self, step: SchedulerOutput, requests: Mapping[str, RequestOffloadState]) -> None:
        """Call once a step, before vLLM looks at its prefix cache again."""
        pool = self._pool
        if pool is None or not self._has_priorities:
            return
        for req_id in step.preempted_req_ids or ():
            if req_id in requests:
                self._take_back(pool, requests[req_id], self._computed.get(req_id, 0))
        for req_id in step.finished_req_ids:
            self._computed.pop(req_id, None)
        for req_id, scheduled in step.num_scheduled_tokens.items():
            if req_id in requests:
                self._computed[req_id] = requests[req_id].req.num_computed_tokens + scheduled

    def not_loaded(
        self, engine_blocks: AbstractSet[int], requests: Mapping[str, RequestOffloadState]
    ) -> None:
        """Call once it is known that what a step should have loaded is not in these."""
        if self._pool is None:
            return
        tables = (state.block_ids for each in requests.values() for state in each.group_states)
        for table in tables:
            lacking = (place for place, block in enumerate(table) if block in engine_blocks)
            first = next(lacking, len(table))
            self._pool.evict_blocks(set(table[first:]))  # what is behind them is no better

    def _take_back(self, pool: BlockPool, status: RequestOffloadState, computed: int) -> None:
        """Of drafts that were refused nothing stays computed, nor is it of the last token."""
        computed = min(computed, status.req.num_tokens - 1)
        for block_hash in status.req.block_hashes[computed // self._tokens_per_hash :]:
            for group in status.config.kv_group_configs:
                while found := pool.get_cached_block(block_hash, [group.group_idx]):
                    pool.evict_blocks({block.block_id for block in found})
