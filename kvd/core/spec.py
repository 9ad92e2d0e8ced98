"""What a namespace is made of: its fingerprint, its groups, and the sizes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.errors import BLOCKS_PER_BLOCK, GROUP_COUNT, HASH_BYTES, RANK_COUNT, InvalidArgument
from kvd.core.keys import TenantId
from kvd_proto.groups import GroupKind
from kvd_proto.limits import MAX_BLOCKS_PER_BLOCK, MAX_GROUPS, MAX_HASH_BYTES, MAX_RANKS

# Keeps every size that is computed from a client's figures far from overflow.
MAX_PART_BYTES = 1 << 40
WORD_BYTES = 8  # every size of a part is a multiple: copies go word by word


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of a namespace: its hit rule and the bytes of its blocks."""

    kind: GroupKind
    blocks_per_block: int  # engine blocks in one kvd block
    shard_bytes: tuple[int, ...]  # bytes of one engine block in each shard

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of one slot's part in each shard."""
        return tuple(self.blocks_per_block * b for b in self.shard_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot over all shards."""
        return sum(self.part_bytes)


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What engines of one namespace agree in: groups, ranks, shards and bytes."""

    fingerprint: str  # hex; the identity
    tenant: TenantId
    hash_bytes: int
    groups: tuple[GroupSpec, ...]
    unshared: bool = False  # the fingerprint names one start of one engine

    def check(self) -> None:
        """Raise InvalidArgument, naming the field, unless every figure is possible."""
        if not 1 <= self.hash_bytes <= MAX_HASH_BYTES:
            raise InvalidArgument(
                f"hash_bytes is {self.hash_bytes}, not 1..{MAX_HASH_BYTES}",
                "namespace.hash_bytes",
                HASH_BYTES,
            )
        check_group_count(len(self.groups))
        shards = len(self.groups[0].shard_bytes)
        for number, group in enumerate(self.groups):
            _check_group(group, f"namespace.groups[{number}]")
            if len(group.shard_bytes) != shards:
                raise InvalidArgument(
                    f"group {number} has {len(group.shard_bytes)} shards, group 0 has {shards}: a"
                    " rank holds one shard of every group",
                    f"namespace.groups[{number}].shard_bytes",
                    RANK_COUNT,
                )


def check_group_count(count: int) -> None:
    """Raise InvalidArgument where a namespace can't have so many groups.

    Who makes a spec of a stranger's message asks before: to read all of it may take long.
    """
    if not 1 <= count <= MAX_GROUPS:
        raise InvalidArgument(
            f"{count} groups, not 1..{MAX_GROUPS}", "namespace.groups", GROUP_COUNT
        )


def check_shard_count(count: int, where: str) -> None:
    """The same of a group's shards."""
    if not 1 <= count <= MAX_RANKS:
        raise InvalidArgument(
            f"{where} has {count} shards, not 1..{MAX_RANKS}", f"{where}.shard_bytes", RANK_COUNT
        )


def _check_group(group: GroupSpec, where: str) -> None:
    if not 1 <= group.blocks_per_block <= MAX_BLOCKS_PER_BLOCK:
        raise InvalidArgument(
            f"{where}.blocks_per_block is {group.blocks_per_block}, not 1..{MAX_BLOCKS_PER_BLOCK}",
            f"{where}.blocks_per_block",
            BLOCKS_PER_BLOCK,
        )
    check_shard_count(len(group.shard_bytes), where)
    most = MAX_PART_BYTES // group.blocks_per_block
    for shard, size in enumerate(group.shard_bytes):
        if not 0 < size <= most or size % WORD_BYTES:
            raise InvalidArgument(
                f"{where}.shard_bytes[{shard}] is {size}: not a positive multiple of {WORD_BYTES}"
                f" of at most {most}",
                f"{where}.shard_bytes",
            )
