"""Where a rank's KV lies: regions of shared memory, and the fragments of an engine block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd_proto.v1 import worker_pb2

ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A region of a shared-memory file (memfd or a file on a tmpfs); all in bytes."""

    fd: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """One piece of every engine block: block b's lies at base + b * stride of a region.

    Sizes in bytes, multiples of 8. `memory` is the region's place in the list registered.
    """

    memory: int
    base: int
    stride: int
    bytes: int

    def __post_init__(self) -> None:
        for name in ("base", "stride", "bytes"):
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
    """One group's engine blocks: their number, and an engine block's fragments in order.

    `blocks_per_block` as in the scheduler's `Group`; 0 leaves it to the scheduler, which costs
    a second registration where the worker came first and it is not 1.
    """

    num_blocks: int
    fragments: Sequence[Fragment]
    blocks_per_block: int = 0

    def to_proto(self, group: int) -> worker_pb2.GroupLayout:
        return worker_pb2.GroupLayout(
            group=group,
            num_blocks=self.num_blocks,
            blocks_per_block=self.blocks_per_block,
            fragments=[fragment.to_proto() for fragment in self.fragments],
        )
