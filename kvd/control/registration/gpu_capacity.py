"""Whether a GPU has room for a mover's CUDA context, and what such a context was seen to take.

The engine has sized its KV by then, and control asks no driver: the worker says how much is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvd.core.errors import InvalidArgument
from kvd.mover import registration_errors
from kvd.mover.facts import GpuFacts, MoverFacts
from kvd.mover.layout import GpuConfig
from kvd_proto.v1 import worker_pb2 as pb

MIB = 1 << 20
MAX_GPUS = 256  # whose figures are kept; a machine has 16 at most
# A mover can only see how much less is free. Figures outside these bounds are no context: somebody
# else gave memory back meanwhile, or took much.
LEAST_CONTEXT_BYTES = 16 * MIB
MOST_CONTEXT_BYTES = 4 << 30
UTILIZATION_STEP = 0.01  # what engines' settings are written in


@dataclass(frozen=True, slots=True)
class GpuTerms:
    """The operator's settings for GPUs."""

    context_bytes: int = 640 * MIB  # assumed, unless less was measured
    staging_bytes: int = 16 * MIB


class GpuCapacity:
    """What movers' contexts take on each GPU, where any has run there.

    An engine that allocates while a mover starts (graphs, activations) makes a context look larger
    than it is, and where that barred the next mover nobody would ever measure again. So of several
    measurements the smallest counts, and one only where it is below what was assumed. Where the
    figure is too small, the mover finds no room and says so itself.
    """

    def __init__(self, terms: GpuTerms) -> None:
        self._terms = terms
        self._measured: dict[str, int] = {}  # by UUID

    def context_bytes(self, uuid: str) -> int:
        """What a mover's context on this GPU takes: assumed, or less where that was measured."""
        assumed = self._terms.context_bytes
        return min(assumed, self._measured.get(uuid, assumed))

    def config(self, uuid: str, memory: pb.GpuMemory, returning_bytes: int = 0) -> GpuConfig:
        """How a mover uses this GPU, once there is room for it.

        `returning_bytes` come free before it starts. Raises InvalidArgument, with the reason
        GPU_MEMORY_SHORT, where the context would not fit what is free.
        """
        needed = self.context_bytes(uuid)
        if memory.free_bytes + returning_bytes < needed:
            raise InvalidArgument(
                self._short(uuid, memory, needed - memory.free_bytes - returning_bytes),
                "gpu_memory.free_bytes",
                registration_errors.GPU_MEMORY_SHORT,
            )
        return GpuConfig(
            uuid,
            staging_bytes=self._terms.staging_bytes,
            free_bytes_before=memory.free_bytes,
        )

    def _short(self, uuid: str, memory: pb.GpuMemory, missing: int) -> str:
        below = self.context_bytes(uuid) < self._terms.context_bytes
        how = "measured" if below else "assumed, by gpu_context_bytes"
        step = math.ceil(missing / memory.total_bytes / UTILIZATION_STEP) * UTILIZATION_STEP
        return (
            f"{uuid}: {memory.free_bytes // MIB} MiB of {memory.total_bytes // MIB} MiB are free,"
            f" and the mover's CUDA context takes {self.context_bytes(uuid) // MIB} MiB ({how});"
            f" lower vLLM's --gpu-memory-utilization by {step:.2f} and start the engine anew"
        )

    def measured(self, facts: GpuFacts) -> None:
        """A mover has started there and says what it takes."""
        uuid, taken = facts.uuid, facts.context_bytes
        if not LEAST_CONTEXT_BYTES <= taken <= MOST_CONTEXT_BYTES:
            return
        if uuid in self._measured or len(self._measured) < MAX_GPUS:
            self._measured[uuid] = min(taken, self._measured.get(uuid, taken))


def in_words(facts: MoverFacts) -> str:
    """A rank's transport in a line, for logs."""
    gpu = facts.gpu
    if gpu is None:
        why = f", since {facts.note}" if facts.note else ""
        return f"{facts.transport}, copied by {facts.copier}{why}"
    context = f"{gpu.context_bytes // MIB} MiB" if gpu.context_bytes else "of unknown size"
    return (
        f"{facts.transport} on {gpu.uuid} ({gpu.name}, driver {gpu.driver_version});"
        f" copied by {facts.copier}; context {context}"
    )
