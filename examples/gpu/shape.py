"""The models of the demo: their shapes, and what their KV takes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """A Llama-family decoder with grouped-query attention; weights are random."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    dtype_name: str
    block_tokens: int = 16
    rope_base: float = 500_000.0

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    @property
    def side_bytes(self) -> int:
        """Of one block in one layer: its keys, or its values."""
        return self.block_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers, keys and values."""
        return 2 * self.layers * self.side_bytes

    @property
    def weight_bytes(self) -> int:
        """Of all weights, without the norms'."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.feed_forward * self.hidden
        values = self.layers * layer + 2 * self.vocabulary * self.hidden
        return values * self.dtype.itemsize

    def digest(self) -> str:
        """Hex digest of the shape."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


LLAMA_8B = Shape(
    name="llama-8b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    feed_forward=14336,
    vocabulary=128_256,
    dtype_name="bfloat16",
)
TINY = Shape(
    name="tiny",
    layers=3,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    feed_forward=128,
    vocabulary=256,
    dtype_name="float32",
)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, TINY)}
