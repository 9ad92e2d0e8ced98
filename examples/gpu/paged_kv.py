"""The engine's paged KV cache: for each layer one tensor [2, blocks, tokens, kv heads, head dim].

On a GPU each is an allocation of PyTorch's, as in an engine. On a CPU all of them lie in one
memory file, which the daemon's mover can map.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from examples.gpu.shape import Shape
from kvd_client import Fragment, GroupLayout, SharedMemory

Memory = SharedMemory | Tensor


class PagedKv:
    """`layers` are the tensors, `memories` and `group` what a rank registers of them."""

    def __init__(self, shape: Shape, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self._fd = -1
        side, block = num_blocks * shape.side_bytes, shape.side_bytes
        dimensions = (2, num_blocks, shape.block_tokens, shape.kv_heads, shape.head_dim)
        self.memories: Sequence[Memory]
        if device.type == "cpu":
            self._fd = os.memfd_create("demo-kv", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, shape.layers * 2 * side)
            whole = torch.frombuffer(mmap.mmap(self._fd, 0), dtype=shape.dtype)
            self.layers = list(whole.view(shape.layers, *dimensions).unbind(0))
            self.memories = [
                SharedMemory(self._fd, layer * 2 * side, 2 * side) for layer in range(shape.layers)
            ]
        else:
            self.layers = [
                torch.zeros(dimensions, dtype=shape.dtype, device=device)
                for _ in range(shape.layers)
            ]
            self.memories = self.layers
        self.group = GroupLayout(
            num_blocks,
            [
                Fragment(memory=layer, base=which * side, stride=block, bytes=block)
                for layer in range(shape.layers)
                for which in (0, 1)
            ],
        )

    def equal(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two lists of blocks hold the same bytes, in every layer."""
        for layer in self.layers:
            places = [
                torch.tensor(blocks, dtype=torch.long, device=layer.device)
                for blocks in (one, other)
            ]
            left, right = (layer.index_select(1, each).view(torch.uint8) for each in places)
            if not torch.equal(left, right):
                return False
        return True

    def wipe(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks, so that nothing of what they held can be taken for loaded."""
        for layer in self.layers:
            layer.index_fill_(1, torch.tensor(blocks, device=layer.device), -1.0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
