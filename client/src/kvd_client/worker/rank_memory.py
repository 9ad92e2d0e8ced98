"""What an engine gave as its KV's memory, as it is registered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd_client.arguments import require_kind, require_list
from kvd_client.worker.cuda_memory import Gpu, export_regions
from kvd_client.worker.cuda_refusals import CudaMemoryRefused, CudaRefusal
from kvd_client.worker.descriptors import close_all
from kvd_client.worker.memory import CudaTensor, DeviceSpan, GroupLayout, SharedMemory
from kvd_client.worker.regions import Region
from kvd_client.worker.spans import check_fragments, relocated, span_of


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    """The memory that a rank registers: regions, and the layout of every group in them.

    `gpu` is where they lie; None for host memory. What they hold is closed by `close`.
    """

    regions: tuple[Region, ...]
    groups: tuple[GroupLayout, ...]
    gpu: Gpu | None = None
    _open: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._open.extend(region.fd for region in self.regions if region.fd is not None)

    def close(self) -> None:
        """Call it again where a signal's handler raised amid it."""
        close_all(self._open)
        if self.gpu is not None:
            self.gpu.close()


def take_memory(
    memories: Sequence[SharedMemory | DeviceSpan | CudaTensor], groups: Sequence[GroupLayout]
) -> RegisteredMemory:
    """Descriptors and handles of our own for a rank's memory; what it raises leaves none open."""
    require_list("memories", memories)
    require_list("groups", groups)
    for place, group in enumerate(groups):
        require_kind(f"groups[{place}]", group, GroupLayout)
        if any(fragment.memory >= len(memories) for fragment in group.fragments):
            raise ValueError("a fragment names a memory that is not in the list")
    shared = [memory for memory in memories if isinstance(memory, SharedMemory)]
    if len(shared) == len(memories):
        return RegisteredMemory(_duplicated(shared), tuple(groups))
    if shared:
        raise CudaMemoryRefused(
            CudaRefusal.MIXED_MEMORY,
            f"{len(shared)} of {len(memories)} memories are not on the GPU",
        )
    spans = [_span(memory) for memory in memories if not isinstance(memory, SharedMemory)]
    check_fragments(groups, [span.bytes for span in spans])
    exported = export_regions(spans)
    return RegisteredMemory(exported.handles, relocated(groups, exported.places), exported.gpu)


def _duplicated(memories: Sequence[SharedMemory]) -> tuple[SharedMemory, ...]:
    ours: list[int] = []
    try:
        for place, memory in enumerate(memories):
            try:
                ours.append(os.dup(memory.fd))
            except OSError as error:
                what = f"memories[{place}]: fd {memory.fd}: {error.strerror}"
                raise OSError(error.errno, what) from None
        pairs = zip(ours, memories, strict=True)
        return tuple(SharedMemory(fd, memory.offset, memory.bytes) for fd, memory in pairs)
    except BaseException:
        close_all(ours)
        raise


def _span(memory: DeviceSpan | CudaTensor) -> DeviceSpan:
    if isinstance(memory, DeviceSpan):
        return memory
    if isinstance(memory, CudaTensor):
        return span_of(memory)
    raise ValueError(
        f"a {type(memory).__name__} is no memory: give SharedMemory, DeviceSpan or CUDA tensors"
    )
