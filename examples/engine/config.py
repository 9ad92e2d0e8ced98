"""What an engine is told at its start: the model's shape, the rank's part of it, the limits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

FLOAT_BYTES = 4  # KV and weights are float32: outputs must not depend on the batch
EXCHANGE_BYTES = 16 << 20  # one rank's largest partial result; untouched pages cost nothing


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder with grouped-query attention and rotary embedding."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    end_tokens: tuple[int, ...] = ()

    def digest(self) -> str:
        """Hex digest of the shape: two engines may share KV only where it agrees."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


TINY = ModelConfig(
    name="tiny",
    layers=3,
    hidden=48,
    heads=6,
    kv_heads=3,  # an odd number, so that two ranks hold shards of different sizes
    head_dim=8,
    feed_forward=96,
    vocabulary=256,
)


@dataclass(frozen=True)
class Shard:
    """The part of every layer that one tensor-parallel rank holds."""

    rank: int
    world_size: int
    kv_heads: tuple[int, int]  # half-open range
    feed_forward: tuple[int, int]

    @classmethod
    def of(cls, model: ModelConfig, rank: int, world_size: int) -> Shard:
        """Split KV heads (with their query heads) and the MLP as evenly as they go."""
        return cls(
            rank,
            world_size,
            _share(model.kv_heads, rank, world_size),
            _share(model.feed_forward, rank, world_size),
        )

    @property
    def local_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def _share(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rank's half-open range of `count` things; earlier ranks get the remainder."""
    if world_size > count:
        raise ValueError(f"{count} parts cannot be split over {world_size} ranks")
    base, extra = divmod(count, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (1 if rank < extra else 0)


@dataclass(frozen=True)
class EngineConfig:
    """One engine: sizes, limits, and where its kvd daemon listens ('' = without one)."""

    model: str = "tiny"  # "tiny" or "smollm2"
    ranks: int = 1
    block_tokens: int = 16
    num_blocks: int = 256
    step_tokens: int = 512  # prefill span and decode tokens of one forward
    max_running: int = 8
    socket: str = ""
    engine_id: str = "engine-0"
    connect_s: float = 5.0  # an engine that starts without its daemon waits so long for it, once
    # Computing a prompt on a CPU takes seconds, so an answer that takes a while is worth waiting
    # for: the default of milliseconds is made for GPUs.
    lookup_patience_s: float = 1.0
    seed: int = 0  # of the tiny model's random weights
    cache_dir: str = ""  # where dequantised weights are kept

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)


def layer_block_bytes(model: ModelConfig, shard: Shard, block_tokens: int) -> int:
    """Bytes of one block in one layer on one rank: keys and values side by side."""
    return shard.local_kv_heads * block_tokens * 2 * model.head_dim * FLOAT_BYTES
