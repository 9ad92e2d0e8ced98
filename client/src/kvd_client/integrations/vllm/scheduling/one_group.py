"""vLLM's bookkeeping of requests and stores, without what only engines with several groups need.

vLLM looks at every block of every group by itself. Here new keys are made in one go, a request
that has nothing new costs a comparison, and where all blocks of one group are stored as they
come, a request's new blocks are one slice. The outcome is vLLM's: `tests/vllm/test_one_group.py`
compares the two.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    TransferJobStatus,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingSpec,
    OffloadKey,
    make_offload_key,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvd_client.integrations.vllm.event_payloads import EventPayloads
from kvd_client.integrations.vllm.scheduling.jobs import VLLM_NULL_BLOCK, AdjacentBlocks
from kvd_client.integrations.vllm.scheduling.manager import KvdManager

MAX_FENCED_AS_LISTS = 4096  # engine blocks; each step that allocates looks at them all


class DueRequests(NamedTuple):
    """What vLLM's store scheduling reads of a step."""

    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str]


class RequestKeys(RequestOffloadState):
    """vLLM's record of a request, which makes its new keys in one go."""

    __slots__ = ()

    def update_offload_keys(self) -> None:
        hashes = self.req.block_hashes
        for group, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            keys, each = state.offload_keys, group.hashes_per_chunk
            first = each * len(keys) + each - 1
            if first >= len(hashes):
                continue
            suffix, width = _suffix(group.group_idx), group.tokens_per_chunk
            if first + each >= len(hashes):  # one, as in decoding
                key = OffloadKey(hashes[first] + suffix)
                keys.append(key)
                self.req_context._offload_key_positions[key] = len(keys) * width
                continue
            made = [OffloadKey(block_hash + suffix) for block_hash in hashes[first::each]]
            ends = range((len(keys) + 1) * width, (len(keys) + len(made) + 1) * width, width)
            keys += made
            self.req_context._offload_key_positions.update(zip(made, ends, strict=True))


@functools.cache
def _suffix(group: int) -> bytes:
    """What vLLM puts behind a block's hash in a key of the group."""
    return bytes(make_offload_key(b"", group))


class OneGroupScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler side, quicker where it can be, else vLLM's."""

    manager: KvdManager
    _events_tracker: EventPayloads

    def __init__(
        self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._events_tracker = EventPayloads(self._events_tracker, self.manager.is_being_stored)
        self._self_describing = self._events_tracker.self_describing_enabled
        self._has_one_group = len(self.config.kv_group_configs) == 1
        self._stores_simply = self._has_simple_stores()
        self._fenced_lists: dict[int, list[int]] = {}  # by job: fences that vLLM's table lacks
        self._fenced_blocks = 0  # in them

    def _has_simple_stores(self) -> bool:
        """Whether all blocks of one group are stored as they come, none of them left out."""
        groups = self.config.kv_group_configs
        every_block = SingleTypeKVCacheManager.reachable_block_mask.__func__
        return (
            len(groups) == 1
            and self.config.blocks_per_chunk == 1
            and groups[0].manager_cls.reachable_block_mask.__func__ is every_block
            and groups[0].sliding_window_size_in_chunks is None
            and not groups[0].is_eagle_group
            and not groups[0].requires_cow_source
        )

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        # The same slots, and no new ones: it stays vLLM's record in all but this.
        self._req_status[request.request_id].__class__ = RequestKeys

    def _update_req_states(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            # It brings its whole table, also where it only goes on with more input: vLLM would put
            # that behind the table that it has, and store blocks under the keys of later ones.
            for state in self._req_status[new.req_id].group_states:
                state.block_ids.clear()
        if not self._has_one_group or self._sliding_window_groups:
            super()._update_req_states(scheduler_output)
        else:
            self._note_scheduled(scheduler_output)
        if self._fenced_lists:
            reused = self._current_batch_allocated_block_ids
            self._current_batch_jobs_to_flush.update(
                job_id
                for job_id, blocks in self._fenced_lists.items()
                if not reused.isdisjoint(blocks)
            )

    def _note_scheduled(self, scheduler_output: SchedulerOutput) -> None:
        """VLLM's `_update_req_states` for one group, but for the keys: who stores makes them."""
        place = self.config.kv_group_configs[0].group_idx
        allocated = self._current_batch_allocated_block_ids
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in cached.resumed_req_ids:
            self._req_status[req_id].group_states[0].block_ids.clear()
        given = chain(
            ((new.req_id, new.block_ids) for new in scheduler_output.scheduled_new_reqs),
            zip(cached.req_ids, cached.new_block_ids, strict=True),
        )
        for req_id, blocks in given:  # every running request, in every step
            if blocks:
                self._req_status[req_id].group_states[0].block_ids += blocks[place]
                allocated.update(blocks[place])
        for copied in scheduler_output.kv_cache_block_copies or ():
            allocated.add(copied.dst_block_id)
        allocated.discard(VLLM_NULL_BLOCK)

    def request_finished(self, request: Request, *tables: Any) -> Any:
        status = self._req_status.get(request.request_id)
        if status is None:
            return super().request_finished(request, *tables)
        self._maybe_observe_lookup_async_delay(status)
        status.update_offload_keys()
        for job_id in status.transfer_jobs:
            self._fence(job_id, self._jobs[job_id].deferred_fence_block_ids or [])
        return False, None

    # -- fences: a store whose engine blocks are given to others must be flushed first -----------

    def _fence(self, job_id: int, blocks: list[int]) -> None:
        """VLLM makes a set for each block; as a list it costs nothing, while there are few."""
        if self._fenced_blocks + len(blocks) <= MAX_FENCED_AS_LISTS:
            self._fenced_lists[job_id] = blocks
            self._fenced_blocks += len(blocks)
            return
        for block in blocks:
            self._block_id_to_pending_jobs.setdefault(block, set()).add(job_id)

    def _remove_pending_job(self, job_id: int, block_ids: list[int] | None) -> None:
        if block_ids is not None and self._fenced_lists.get(job_id) is block_ids:
            self._unfence(job_id)
        else:
            super()._remove_pending_job(job_id, block_ids)

    def _unfence(self, job_id: int) -> None:
        self._fenced_blocks -= len(self._fenced_lists.pop(job_id))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        # vLLM says nothing of a job that ended while its own table was empty.
        for job_id in self._fenced_lists.keys() - self._jobs.keys():
            self._unfence(job_id)

    def reset_cache(self) -> None:
        # Of two resets between two steps vLLM takes the second for one amid a step.
        to_flush: set[int] = self._current_batch_jobs_to_flush
        flushed = to_flush.copy()
        to_flush.clear()
        super().reset_cache()
        self._current_batch_jobs_to_flush.update(flushed)
        self._fenced_lists.clear()
        self._fenced_blocks = 0

    def _store_new_blocks(self, due: dict[str, int]) -> dict[int, TransferJob]:
        """Jobs of the requests' new blocks; takes out of `due` whom it has dealt with.

        What vLLM would do where `_stores_simply`. What it says and counts of a request without
        room is left to it.
        """
        (group,) = self.config.kv_group_configs
        made: dict[int, TransferJob] = {}
        for req_id, scheduled in list(due.items()):
            status = self._req_status[req_id]
            req, (state,) = status.req, status.group_states
            if req.is_finished():
                continue
            tokens = self._calc_num_offloadable_tokens(status, req.num_computed_tokens + scheduled)
            first, known = state.next_stored_chunk_idx, len(state.offload_keys)
            end = min(tokens // group.tokens_per_chunk, len(state.block_ids), known)
            if end <= first:  # it may store no more
                del due[req_id]
                continue
            row = state.block_ids[first:end]
            if VLLM_NULL_BLOCK in row:
                continue
            keys = state.offload_keys[first:end]
            output = self.manager.prepare_blocks(
                keys, [(group.group_idx, self._hashes(req, first, end))], status.req_context
            )
            if output is None:
                continue
            del due[req_id]
            state.next_stored_chunk_idx = end
            stored = output.keys_to_store
            if not stored:
                continue
            source: LoadStoreSpec = AdjacentBlocks(first, row)
            if len(stored) < len(keys):
                wanted = set(stored)
                row = [block for block, key in zip(row, keys, strict=True) if key in wanted]
                first += next(place for place, key in enumerate(keys) if key in wanted)
                source = GPULoadStoreSpec(row, group_sizes=[len(row)], block_indices=[first])
            job_id = self._note_store(status, stored, row)
            made[job_id] = TransferJob(req_id, source, output.store_spec)
        return made

    def _hashes(self, request: Request, first: int, end: int) -> list[bytes]:
        """Of the request's blocks of the one group."""
        each = self.config.kv_group_configs[0].hashes_per_chunk
        hashes: list[bytes] = request.block_hashes[(first + 1) * each - 1 : end * each : each]
        return hashes

    def _note_store(self, status: RequestOffloadState, keys: Any, engine_blocks: list[int]) -> int:
        """The job in vLLM's own books, which fence its engine blocks and count its reports."""
        job_id: int = self._generate_job_id()
        status.transfer_jobs.add(job_id)
        self._jobs[job_id] = TransferJobStatus(
            req_id=status.req.request_id,
            pending_count=self.config.num_workers,
            keys=set(keys),
            is_store=True,
            deferred_fence_block_ids=engine_blocks,
        )
        if self._self_describing:
            self._describe(status, keys)
        return job_id

    def _describe(self, status: RequestOffloadState, keys: Any) -> None:
        (group,) = self.config.kv_group_configs
        for key in keys:
            place = self.manager.block_of(key, status.req_context)
            self._events_tracker.record_store(status.req, group, place, key)
