"""What an engine gave as its KV's memory, as it is registered."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvd_client.worker.cuda_memory import export_regions
from kvd_client.worker.cuda_refusals import CudaMemoryRefused, CudaRefusal
from kvd_client.worker.memory import CudaTensor, DeviceSpan, GroupLayout, SharedMemory
from kvd_client.worker.registrar import RegisteredMemory
from kvd_client.worker.spans import check_fragments, relocated, span_of


def take_memory(
    memories: Sequence[SharedMemory | DeviceSpan | CudaTensor], groups: Sequence[GroupLayout]
) -> RegisteredMemory:
    """Descriptors and handles of our own for a rank's memory; ValueError leaves nothing open."""
    for group in groups:
        if any(fragment.memory >= len(memories) for fragment in group.fragments):
            raise ValueError("a fragment names a memory that is not in the list")
    shared = [memory for memory in memories if isinstance(memory, SharedMemory)]
    if len(shared) == len(memories):
        regions = tuple(SharedMemory(os.dup(m.fd), m.offset, m.bytes) for m in shared)
        return RegisteredMemory(regions, tuple(groups))
    if shared:
        raise CudaMemoryRefused(
            CudaRefusal.MIXED_MEMORY,
            f"{len(shared)} of {len(memories)} memories are not on the GPU",
        )
    spans = [_span(memory) for memory in memories if not isinstance(memory, SharedMemory)]
    check_fragments(groups, [span.bytes for span in spans])
    exported = export_regions(spans)
    return RegisteredMemory(exported.handles, relocated(groups, exported.places), exported.gpu)


def _span(memory: DeviceSpan | CudaTensor) -> DeviceSpan:
    if isinstance(memory, DeviceSpan):
        return memory
    if isinstance(memory, CudaTensor):
        return span_of(memory)
    raise ValueError(
        f"a {type(memory).__name__} is no memory: give SharedMemory, DeviceSpan or CUDA tensors"
    )
