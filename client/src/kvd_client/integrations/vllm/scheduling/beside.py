"""Requests for which another connector loads within a step, under vLLM's MultiConnector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.sched.output import SchedulerOutput

Begun = tuple[str, int, set[int]]  # a request, its computed tokens, its engine blocks


class LoadsBeside:
    """Finds out whose KV may lack what such a load was to bring.

    vLLM hears of a load that failed when the step is over, and computes the request anew then.
    By that time the step's stores have begun, with what was in the blocks. So nothing is stored of
    the request, nor of one that is given its blocks before the load's end is known.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        steps_ahead = 1 + vllm_config.parallel_config.pipeline_parallel_size
        self._unsure: deque[set[int]] = deque(maxlen=steps_ahead)  # engine blocks, by step
        self._asked: set[str] = set()

    def asked(self, req_id: str) -> None:
        """VLLM asks what can be loaded for a request; kvd loads nothing within the step."""
        self._asked.add(req_id)

    def doubtful(
        self, step: SchedulerOutput, requests: Mapping[str, RequestOffloadState]
    ) -> Iterable[RequestOffloadState]:
        """Requests that begin in this step over blocks of such loads. Call once a step."""
        asked, self._asked = self._asked, set()
        loads: set[int] = set()
        doubtful: list[RequestOffloadState] = []
        if step.has_sync_kv_loads or any(self._unsure):
            begun = [each for each in _begun(step) if each[0] in requests]
            for req_id, computed, blocks in begun:
                if req_id in asked and computed > requests[req_id].num_locally_computed_tokens:
                    loads |= blocks
            unsure = loads.union(*self._unsure)
            doubtful = [requests[req_id] for req_id, _, blocks in begun if blocks & unsure]
        self._unsure.append(loads)
        return doubtful


def _begun(step: SchedulerOutput) -> Iterator[Begun]:
    """Requests that were given their whole table in the step."""
    for new in step.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, _blocks(new.block_ids)
    cached = step.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    for req_id, computed, blocks in rows:
        if req_id in cached.resumed_req_ids:
            yield req_id, computed, _blocks(blocks or ())


def _blocks(tables: Iterable[list[int]]) -> set[int]:
    return set(chain.from_iterable(tables)) - {0}
