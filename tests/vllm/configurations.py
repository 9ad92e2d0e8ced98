"""vLLM's own configuration objects, as an engine over the tiny model has them, and variations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import EngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvd_client import NamespaceFields
from kvd_client.integrations.vllm.identity.namespace import build_namespace
from kvd_client.integrations.vllm.metadata import RankHandshake
from kvd_client.integrations.vllm.options import KvdOptions

BLOCK_TOKENS = 32
LAYERS = tuple(f"model.layers.{number}.self_attn.attn" for number in range(4))
LAYOUT = "LBHNC;CPU_ATTN;avx512/vec"


class Configuration(NamedTuple):
    """All that the connector is given, in each of an engine's processes."""

    vllm: VllmConfig
    cache: KVCacheConfig
    offloading: OffloadingConfig
    options: KvdOptions

    def namespace(self, handshakes: Sequence[RankHandshake] | None = None) -> NamespaceFields:
        """What the scheduler side makes of it; ranks that hold the same where none are given."""
        world_size = self.offloading.parallel.world_size
        ranks = (
            [handshake(rank) for rank in range(world_size)] if handshakes is None else handshakes
        )
        return build_namespace(self.vllm, self.cache, self.offloading, self.options, ranks)


def full_attention(dtype: torch.dtype = torch.float32, tokens: int = BLOCK_TOKENS) -> KVCacheSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=64, dtype=dtype)


def cache_of(*specs: KVCacheSpec, drafter: bool = False) -> KVCacheConfig:
    """One group of all layers, or several, each of as many."""
    groups = [
        KVCacheGroupSpec([f"{number}.{name}" for name in LAYERS], spec, is_eagle_group=drafter)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)


def configure(
    model: Path,
    options: dict[str, Any] | None = None,
    cache: KVCacheConfig | None = None,
    **settings: Any,
) -> Configuration:
    """As vLLM makes it from the command line; `options` are the connector's."""
    transfer = KVTransferConfig(
        kv_connector="KvdConnector",
        kv_connector_module_path="kvd_client.integrations.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=options or {},
    )
    wanted = {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 2048,
        "enforce_eager": True,
        "kv_transfer_config": transfer,
        **settings,
    }
    made = EngineArgs(model=str(model), **wanted).create_engine_config()
    return joined(made, cache or cache_of(full_attention(tokens=wanted["block_size"])))


def joined(vllm_config: VllmConfig, cache: KVCacheConfig) -> Configuration:
    """What follows from vLLM's two objects."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    options = KvdOptions.from_extra_config(transfer.kv_connector_extra_config)
    return Configuration(vllm_config, cache, build_offloading_config(vllm_config, cache), options)


def handshake(
    rank: int,
    shard: int | None = None,
    shard_bytes: tuple[int, ...] = (131072,),
    layout: str = LAYOUT,
) -> RankHandshake:
    """What a rank says of its memory."""
    own = rank if shard is None else shard
    return RankHandshake(rank, own, shard_bytes, layout, registered=True)
