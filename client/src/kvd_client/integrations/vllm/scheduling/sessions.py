"""Requests whose input comes in pieces, in an engine that speculates."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.sched.output import SchedulerOutput

log = logging.getLogger(__name__)


class LastStep(NamedTuple):
    """What a request was given to compute when it ran last."""

    known: int  # its tokens then
    drafts: list[int]  # behind them


class SpeculatedSessions:
    """Finds out which of them go on from KV of tokens that they do not have.

    vLLM 0.32 without asynchronous scheduling: where a request stops amid drafts that were
    accepted, those after the stop stay counted as computed, and its further input takes their
    places. What it computes from there on has the wrong bytes under the right hashes.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        speculates = vllm_config.num_speculative_tokens > 0
        self._may_be_wrong = speculates and not vllm_config.scheduler_config.async_scheduling
        self._last: dict[str, LastStep] = {}  # by live request
        self._has_warned = False

    def gone_wrong(
        self, step: SchedulerOutput, requests: Mapping[str, RequestOffloadState]
    ) -> Iterable[RequestOffloadState]:
        """Requests that go on in this step from such KV. Call once a step."""
        if not self._may_be_wrong:
            return ()
        wrong = [
            requests[new.req_id]
            for new in step.scheduled_new_reqs
            if new.req_id in self._last
            and not self._are_its_own(requests[new.req_id], new.num_computed_tokens)
        ]
        for req_id in step.num_scheduled_tokens:
            status = requests.get(req_id)
            if status is not None and status.req.resumable:
                drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
                self._last[req_id] = LastStep(status.req.num_tokens, drafts)
        if wrong and not self._has_warned:
            self._has_warned = True
            log.warning(
                "kvd: request %.64s got more input after it had stopped amid accepted drafts: vLLM"
                " then reads KV of tokens that it threw away. Its answers are wrong, and kvd stores"
                " nothing more of it. Start vLLM with asynchronous scheduling, or without"
                " speculative decoding",
                wrong[0].req.request_id,
            )
        return wrong

    def _are_its_own(self, status: RequestOffloadState, computed: int) -> bool:
        """Whether the drafts that count as computed are the request's tokens still."""
        request, (known, drafts) = status.req, self._last[status.req.request_id]
        return list(request.all_token_ids[known:computed]) == drafts[: max(0, computed - known)]

    def ended(self, req_id: str) -> None:
        self._last.pop(req_id, None)
