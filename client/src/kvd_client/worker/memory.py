"""Where a rank's KV lies: regions of shared memory, and the fragments of an engine block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvd_client.arguments import require_kind, require_list, require_whole
from kvd_proto.limits import U32_MAX, U64_MAX
from kvd_proto.v1 import worker_pb2

ALIGNMENT = 8
I32_MAX = (1 << 31) - 1  # descriptors are C's int


def _require_range(of: object, name: str, most: int) -> None:
    """ValueError, naming the field, for a number that no message can carry."""
    require_whole(f"{type(of).__name__}: {name}", getattr(of, name), 0, most)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A region of a shared-memory file (memfd or a file on a tmpfs); all in bytes."""

    fd: int
    offset: int
    bytes: int

    def __post_init__(self) -> None:
        _require_range(self, "fd", I32_MAX)
        for name in ("offset", "bytes"):
            _require_range(self, name, U64_MAX)

    def to_proto(self, memory_token: int) -> worker_pb2.MemoryHandle:
        """Its handle; `memory_token` is the number that the descriptor was offered under."""
        return worker_pb2.MemoryHandle(
            host=worker_pb2.HostSharedMemory(
                memory_token=memory_token, offset=self.offset, bytes=self.bytes
            )
        )


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """A raw pointer: `bytes` bytes of GPU memory from `address` on, both multiples of 8.

    The memory is the caller's: it must stay allocated until `Worker.unregister` returned True.
    """

    address: int
    bytes: int

    def __post_init__(self) -> None:
        for name in ("address", "bytes"):
            _require_range(self, name, U64_MAX)
            if getattr(self, name) <= 0 or getattr(self, name) % ALIGNMENT:
                raise ValueError(f"a span's {name} must be a positive multiple of {ALIGNMENT}")

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + self.bytes


@runtime_checkable
class CudaTensor(Protocol):
    """A tensor as the client sees it: torch's tensors fit, and nothing of torch is imported.

    The tensor is the caller's: it must stay alive until `Worker.unregister` returned True.
    """

    @property
    def device(self) -> object: ...
    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Fragment:
    """One fragment of every engine block: block b's is at base + b * stride of a region.

    Sizes in bytes, multiples of 8. `memory` is the region's place in the list registered;
    `base` counts from its first byte (a tensor's data_ptr()).
    """

    memory: int
    base: int
    stride: int
    bytes: int

    def __post_init__(self) -> None:
        _require_range(self, "memory", U32_MAX)
        for name in ("base", "stride", "bytes"):
            _require_range(self, name, U64_MAX)
            if getattr(self, name) % ALIGNMENT:
                raise ValueError(f"a fragment's {name} must be a multiple of {ALIGNMENT}")
        if not 0 < self.bytes <= self.stride:
            raise ValueError("a fragment has at least one byte and at most its stride")

    def to_proto(self) -> worker_pb2.Fragment:
        return worker_pb2.Fragment(
            memory=self.memory, base=self.base, stride=self.stride, bytes=self.bytes
        )


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where one group's engine blocks are: their number, and an engine block's fragments in order.

    `blocks_per_block` as in the scheduler's `Group`; 0 leaves it to the scheduler, which costs
    a second registration where the worker came first and it is not 1.
    """

    num_blocks: int
    fragments: Sequence[Fragment]
    blocks_per_block: int = 0

    def __post_init__(self) -> None:
        _require_range(self, "num_blocks", U64_MAX)
        _require_range(self, "blocks_per_block", U32_MAX)
        require_list("GroupLayout: fragments", self.fragments)
        for place, fragment in enumerate(self.fragments):
            require_kind(f"GroupLayout: fragments[{place}]", fragment, Fragment)

    def to_proto(self, group: int) -> worker_pb2.GroupLayout:
        return worker_pb2.GroupLayout(
            group=group,
            num_blocks=self.num_blocks,
            blocks_per_block=self.blocks_per_block,
            fragments=[fragment.to_proto() for fragment in self.fragments],
        )
