"""What a mover says of itself: how it reaches the rank's memory, and how fast."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

HOST_SHARED_MEMORY = "host-shm"
CUDA_IPC = "cuda-ipc"
CUDA_VMM = "cuda-vmm"
NODE_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class CopyPath:
    """How one direction's bytes are moved, and its speed in the calibration (0: none was made)."""

    copier: str = "memcpy"  # or "batch", "plain", "strided", "kernel"
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The GPU that the rank's memory lies on.

    context_bytes: device memory that the mover takes, 0 where that can't be known.
    unregistered_extents could not be pinned; staged_bytes went through the staging buffer.
    """

    uuid: str
    name: str
    driver_version: str
    context_bytes: int = 0
    registered_bytes: int = 0
    unregistered_extents: int = 0
    staged_bytes: int = 0
    numa_node: int = NODE_UNKNOWN


@dataclass(frozen=True, slots=True)
class MoverFacts:
    """The transport in use; `gpu` is None for host shared memory."""

    transport: str = HOST_SHARED_MEMORY
    store: CopyPath = field(default_factory=CopyPath)
    load: CopyPath = field(default_factory=CopyPath)
    gpu: GpuFacts | None = None

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, body: bytes) -> MoverFacts:
        """The inverse of `pack`; TypeError or ValueError for what is no facts."""
        told = json.loads(body.rstrip(b"\0"))
        gpu = told["gpu"]
        return cls(
            told["transport"],
            CopyPath(**told["store"]),
            CopyPath(**told["load"]),
            None if gpu is None else GpuFacts(**gpu),
        )
