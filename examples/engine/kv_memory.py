"""A rank's paged KV cache in one shared-memory file that kvd's mover can map."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.engine.config import ModelConfig, Shard, layer_block_bytes


@dataclass(frozen=True)
class BlockFragment:
    """Where one layer's piece of every block lies: block b at base + b * stride."""

    base: int
    stride: int
    bytes: int


class KvMemory:
    """Per layer a tensor [num_blocks, kv_heads, block_tokens, 2 * head_dim], keys then values.

    All layers lie one after the other in one memfd. Closing it gives the memory back; nothing
    of it is ever visible in a file system.
    """

    def __init__(
        self, model: ModelConfig, shard: Shard, num_blocks: int, block_tokens: int
    ) -> None:
        self.num_blocks = num_blocks
        piece = layer_block_bytes(model, shard, block_tokens)
        self.bytes = model.layers * num_blocks * piece
        self.fd = os.memfd_create("engine-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.bytes)
        self._mapping = mmap.mmap(self.fd, self.bytes)
        shape = (num_blocks, shard.local_kv_heads, block_tokens, 2 * model.head_dim)
        whole = torch.frombuffer(self._mapping, dtype=torch.float32)
        self.layers = list(whole.view(model.layers, *shape).unbind(0))
        self.fragments = tuple(
            BlockFragment(layer * num_blocks * piece, piece, piece) for layer in range(model.layers)
        )

    def digests(self, blocks: Sequence[int]) -> list[str]:
        """Hex digest of each block's bytes over all layers, as they lie in memory now."""
        found = []
        view = memoryview(self._mapping)
        for block in blocks:
            digest = hashlib.blake2b(digest_size=16)
            for fragment in self.fragments:
                start = fragment.base + block * fragment.stride
                digest.update(view[start : start + fragment.bytes])
            found.append(digest.hexdigest())
        return found

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the process."""
        os.close(self.fd)
