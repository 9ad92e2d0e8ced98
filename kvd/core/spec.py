"""What a namespace is made of: its fingerprint, its groups, and the sizes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.keys import TenantId
from kvd_proto.groups import GroupKind


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
    fingerprint: str  # hex; the identity
    tenant: TenantId
    hash_bytes: int
    groups: tuple[GroupSpec, ...]
    unshared: bool = False  # the fingerprint names one start of one engine
