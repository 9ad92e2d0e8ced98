"""Lazy storing: a block is stored when vLLM is about to give its place on the device away.

vLLM binds its block pool to the connector. Free blocks wait there in one queue, and new ones are
taken from its front. So what stands near the front is stored next, as far as

- this engine has seen it computed: vLLM names a block by its hash when it schedules the step that
  will compute it, and a request that is preempted or aborted before that leaves the name behind;
- the pool still has it under that name, so it is nobody else's by now.

The pool is only read: a store takes no block out of the queue and moves none. Its blocks are
fenced as those of an ended request are, by vLLM's own table: whoever is given one flushes the
store before the step computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    SchedulerOffloadConfig,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import OffloadKey

from kvd_client.draft import BlockRun
from kvd_client.integrations.vllm.scheduling.requests import TrackedRequest

STEPS_AHEAD = 2  # blocks of so many of the largest steps are stored before they are given away

LOOKED_AT_EACH = 0.25  # of these: until so many are given away, the queue isn't looked at again

Near = list[tuple[int, OffloadKey]]  # engine block, and what it holds; the first to leave first


@dataclass(frozen=True, slots=True)
class LeavingJob:
    """A store of blocks that may leave the device; vLLM has no request for it."""

    tracked: TrackedRequest
    keys: list[OffloadKey]
    engine_blocks: list[int]
    runs: list[BlockRun]
    cut: set[OffloadKey]  # found no room yet


class BlocksOnDevice:
    """Which computed blocks lie on the device, and which of them vLLM gives away next.

    Bounded by the device's blocks.
    """

    def __init__(self, depth: int) -> None:
        """`depth`: so many of the queue's first blocks are near their end."""
        self._depth = depth
        self._pool: BlockPool | None = None
        self._computed: dict[int, OffloadKey] = {}
        self._dealt_with: dict[int, OffloadKey] = {}  # since they came near
        self._taken = 0  # blocks given to requests since the queue was looked at
        self._left = 1  # of those that were near then and not dealt with
        self._free = 0  # blocks in the queue then
        self.jobs: dict[int, LeavingJob] = {}  # in flight, by vLLM's number

    def bind(self, pool: BlockPool) -> None:
        """Read this pool's queue from now on."""
        self._pool = pool

    def note(self, engine_blocks: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """These are computed once the step has run; zeros are no blocks."""
        self._computed.update(
            (block, key) for block, key in zip(engine_blocks, keys, strict=True) if block
        )

    def gave(self, engine_blocks: Collection[int]) -> None:
        """VLLM gave these to requests, those included that they found.

        Whoever has a block under another name, or none yet, writes over what was computed. The old
        name may come back to it before anything is computed again.
        """
        self._taken += len(engine_blocks)
        if self._pool is None:
            return
        blocks, computed = self._pool.blocks, self._computed
        for block in engine_blocks:
            key = computed.get(block)
            if key is not None and blocks[block].block_hash != key:
                del computed[block]

    def near(self) -> Near:
        """What came near its end and was not dealt with yet; mostly nothing."""
        if self._pool is None or not self._has_moved(self._pool.get_num_free_blocks()):
            return []
        near: Near = []
        known: dict[int, OffloadKey] = {}
        queue = self._pool.free_block_queue.iter_blocks_after(None)
        for _, block in zip(range(self._depth), queue, strict=False):
            key = self._computed.get(block.block_id)
            if key is None or block.block_hash != key:
                continue
            if self._dealt_with.get(block.block_id) == key:
                known[block.block_id] = key
            else:
                near.append((block.block_id, key))
        self._dealt_with = known
        self._taken, self._left, self._free = 0, len(near), self._pool.get_num_free_blocks()
        return near

    def _has_moved(self, free: int) -> bool:
        """Whether more may be near by now than was dealt with, as far as it matters.

        What is freed goes to the queue's end, which is near only where the queue is short.
        """
        if self._left or self._taken > self._depth * LOOKED_AT_EACH:
            return True
        return free != self._free and min(free, self._free) < self._depth

    def deal_with(self, near: Near) -> None:
        """These are being stored, or the daemon has them; so they stay until they are used."""
        self._dealt_with.update(near)
        self._left -= len(near)

    def not_stored(self, engine_blocks: Sequence[int], keys: Collection[OffloadKey]) -> None:
        """These were not, after all. They are when the queue is looked at again, not before: a
        store that is refused always must keep no engine stepping.
        """
        for block in engine_blocks:
            if self._dealt_with.get(block) in keys:
                del self._dealt_with[block]

    def clear(self) -> None:
        """The cache was reset: nothing that was computed before is to be stored."""
        self._computed.clear()
        self._dealt_with.clear()
        self._left = 1
        self.jobs.clear()


def blocks_ahead(vllm_config: VllmConfig, config: SchedulerOffloadConfig) -> int:
    """How many free blocks the next steps may take."""
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    widths = [group.tokens_per_block for group in config.kv_group_configs]
    return STEPS_AHEAD * sum(-(-step_tokens // width) for width in widths)


def check_lazy(vllm_config: VllmConfig, config: SchedulerOffloadConfig) -> None:
    """Raise ValueError, with the fix, where blocks can't be stored as they leave the device."""
    reason = ""
    if not vllm_config.cache_config.enable_prefix_caching:
        reason = "without prefix caching vLLM keeps no block that a request left"
    elif config.blocks_per_chunk != 1:
        reason = (
            "vLLM gives its blocks away one by one, and blocks_per_chunk or block_size join"
            f" {config.blocks_per_chunk} of them"
        )
    elif config.supports_partial_tail or any(
        group.requires_cow_source for group in config.kv_group_configs
    ):
        reason = "this model has recurrent states, of which requests leave no whole blocks"
    elif vllm_config.kv_transfer_config.kv_connector_extra_config.get("self_describing_kv_events"):
        reason = "self_describing_kv_events tell of a request, which has ended by then"
    if reason:
        raise ValueError(
            f'kv_connector_extra_config: store_mode "lazy": {reason}. Fix: leave store_mode out'
        )
