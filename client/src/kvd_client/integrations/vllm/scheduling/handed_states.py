"""States of recurrent groups that vLLM's scheduler hands to its connector for storing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.sched.output import SchedulerOutput


def within_bounds(
    scheduler_output: SchedulerOutput, requests: Mapping[str, RequestOffloadState]
) -> SchedulerOutput:
    """The step without states beyond what their requests let be stored.

    VLLM asserts that a state amid a block is none of these, which would end the engine, and takes
    a bound of 0 tokens for none.
    """
    block_state = scheduler_output.kv_connector_block_state
    handed = block_state.boundary_state_offloads if block_state is not None else None
    if block_state is None or not handed:
        return scheduler_output
    bounds = {name: requests[name].max_offload_tokens for name in handed if name in requests}
    bounded = {name: most for name, most in bounds.items() if most is not None}
    if not bounded:
        return scheduler_output
    kept = {
        name: [entry for entry in entries if name not in bounded or entry[2] <= bounded[name]]
        for name, entries in handed.items()
    }
    return replace(
        scheduler_output,
        kv_connector_block_state=replace(block_state, boundary_state_offloads=kept),
    )
