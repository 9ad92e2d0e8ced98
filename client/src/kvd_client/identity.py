"""Who an engine is, and all that must agree before two engines may share bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from kvd_client.arguments import require_kind, require_list, require_text, require_whole
from kvd_proto.groups import GroupKind
from kvd_proto.limits import (
    MAX_BLOCKS_PER_BLOCK,
    MAX_GROUPS,
    MAX_HASH_BYTES,
    MAX_STRING_BYTES,
    U32_MAX,
    U64_MAX,
)
from kvd_proto.v1 import engine_pb2


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one attention kind, cached together.

    `tokens_per_block` counts the tokens of one kvd block, which is made of `blocks_per_block`
    engine blocks. `shard_bytes` has the bytes of ONE engine block in each distinct shard.
    """

    tokens_per_block: int
    shard_bytes: tuple[int, ...]
    kind: GroupKind = GroupKind.FULL_ATTENTION
    blocks_per_block: int = 1
    sliding_window_tokens: int = 0
    drafter: bool = False

    def __post_init__(self) -> None:
        require_whole("blocks_per_block", self.blocks_per_block, 1, MAX_BLOCKS_PER_BLOCK)
        require_whole("tokens_per_block", self.tokens_per_block, 1, U32_MAX)
        require_kind("kind", self.kind, GroupKind)
        require_whole("sliding_window_tokens", self.sliding_window_tokens, 0, U32_MAX)
        require_kind("drafter", self.drafter, bool)
        if self.tokens_per_block % self.blocks_per_block:
            raise ValueError("tokens_per_block must be a positive multiple of blocks_per_block")
        if self.kind is GroupKind.SLIDING_WINDOW and self.sliding_window_tokens < 1:
            raise ValueError("a sliding-window group needs sliding_window_tokens")
        require_list("shard_bytes", self.shard_bytes)
        if not self.shard_bytes:
            raise ValueError("shard_bytes needs one positive size for each shard")
        for shard, size in enumerate(self.shard_bytes):
            require_whole(f"shard_bytes[{shard}]", size, 1, U64_MAX)

    @property
    def engine_block_tokens(self) -> int:
        """Tokens of one engine block."""
        return self.tokens_per_block // self.blocks_per_block

    def to_proto(self) -> engine_pb2.GroupSpec:
        return engine_pb2.GroupSpec(
            kind=f"GROUP_KIND_{self.kind.name}",
            tokens_per_block=self.tokens_per_block,
            blocks_per_block=self.blocks_per_block,
            sliding_window_tokens=self.sliding_window_tokens,
            shard_bytes=self.shard_bytes,
            drafter=self.drafter,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFields:
    """The fields of kvd.v1 NamespaceFields; engines that agree in all of them share blocks.

    Where something that matters can't be known, set `unshared`.
    """

    model: str
    kv_dtype: str
    hash_algorithm: str
    hash_bytes: int
    groups: tuple[Group, ...]
    tenant: str = ""
    account: str = ""
    model_config_digest: str = ""
    weights_id: str = ""
    quantization: str = ""
    kv_scale_source: str = ""
    attention_backend: str = ""
    kv_layout: str = ""
    parallel_shape: str = ""
    lora_digest: str = ""
    unshared: bool = False

    def __post_init__(self) -> None:
        require_whole("hash_bytes", self.hash_bytes, 1, MAX_HASH_BYTES)
        require_list("groups", self.groups)
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} groups, allowed are 1..{MAX_GROUPS}")
        for number, group in enumerate(self.groups):
            require_kind(f"groups[{number}]", group, Group)
        for field in fields(self):
            if field.type == "str":
                require_text(field.name, getattr(self, field.name), MAX_STRING_BYTES)
        require_kind("unshared", self.unshared, bool)

    @property
    def boundary_tokens(self) -> int:
        """A hit ends at a multiple of this: the end of an engine block in every group."""
        return math.lcm(*(group.engine_block_tokens for group in self.groups))

    def to_proto(self) -> engine_pb2.NamespaceFields:
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        own["groups"] = [group.to_proto() for group in self.groups]
        own["tokens_per_block"] = self.groups[0].tokens_per_block
        return engine_pb2.NamespaceFields(**own)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who an engine is, and where its processes meet: all of them pass the same two values.

    `engine_id` stays the same over the engine's restarts; `boot_nonce` is 16 random bytes
    that each start of the engine draws anew.
    """

    engine_id: str
    boot_nonce: bytes

    def __post_init__(self) -> None:
        require_text("engine_id", self.engine_id, MAX_STRING_BYTES)
        if not self.engine_id:
            raise ValueError(f"engine_id must have 1..{MAX_STRING_BYTES} bytes")
        nonce: object = self.boot_nonce
        if not isinstance(nonce, bytes):
            is_a = type(nonce).__name__
            raise ValueError(f"boot_nonce is a {is_a}, needed are 16 bytes")  # noqa: TRY004
        if len(nonce) != 16:
            raise ValueError(f"boot_nonce is {len(nonce)} bytes, needed are 16 bytes")

    def to_proto(self) -> engine_pb2.EngineIdentity:
        return engine_pb2.EngineIdentity(engine_id=self.engine_id, boot_nonce=self.boot_nonce)
