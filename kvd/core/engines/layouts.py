"""What ranks and scheduler say of an engine's memory, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.core.errors import LayoutMismatch
from kvd.core.spec import NamespaceSpec


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Which rank a mover serves, which shard it holds, and whether it writes that shard."""

    rank: int
    shard: int
    writer: bool


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What a rank says of one group: bytes of one engine block, and blocks in a kvd block."""

    engine_block_bytes: int
    blocks_per_block: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What a rank says of its memory's layout, and what must agree with the scheduler."""

    world_size: int
    placement: RankPlacement
    groups: tuple[GroupFigures, ...]
    # The rank came first and did not say how many engine blocks make a block: 1 was assumed.
    blocks_guessed: bool = False


def check_layout(layout: RankLayout, spec: NamespaceSpec, world_size: int) -> None:
    """Raise LayoutMismatch, naming rank, group and both figures, unless they agree."""
    rank = layout.placement.rank
    if layout.world_size != world_size:
        raise LayoutMismatch(
            f"rank {rank} says world_size {layout.world_size}, the scheduler says {world_size}",
            "world_size",
        )
    if len(layout.groups) != len(spec.groups):
        raise LayoutMismatch(
            f"rank {rank} has {len(layout.groups)} groups, the namespace has {len(spec.groups)}",
            "groups",
        )
    for number, (said, group) in enumerate(zip(layout.groups, spec.groups, strict=True)):
        shard = layout.placement.shard
        if shard >= len(group.shard_bytes):
            raise LayoutMismatch(
                f"rank {rank} holds shard {shard}, group {number} has {len(group.shard_bytes)}",
                "shard",
            )
        if said.engine_block_bytes != group.shard_bytes[shard]:
            raise LayoutMismatch(
                f"rank {rank}, group {number}: the fragments of an engine block add up to"
                f" {said.engine_block_bytes} bytes, the scheduler says"
                f" {group.shard_bytes[shard]} for shard {shard}",
                f"groups[{number}].fragments",
            )
        if said.blocks_per_block != group.blocks_per_block and not layout.blocks_guessed:
            raise LayoutMismatch(
                f"rank {rank}, group {number}: {said.blocks_per_block} engine blocks per block,"
                f" the scheduler says {group.blocks_per_block}",
                f"groups[{number}].blocks_per_block",
            )


def guessed_wrong(layout: RankLayout, spec: NamespaceSpec) -> bool:
    """True when what was assumed of the blocks' size is not what the scheduler says."""
    pairs = zip(layout.groups, spec.groups, strict=True)
    return any(said.blocks_per_block != group.blocks_per_block for said, group in pairs)


def check_writers(ranks: Sequence[RankLayout], shards: int) -> None:
    """Raise LayoutMismatch unless each shard has exactly one writing rank."""
    for shard in range(shards):
        writers = [
            r.placement.rank for r in ranks if r.placement.writer and r.placement.shard == shard
        ]
        if len(writers) != 1:
            raise LayoutMismatch(
                f"shard {shard} has {len(writers)} writing ranks {writers}, not 1", "writer"
            )
