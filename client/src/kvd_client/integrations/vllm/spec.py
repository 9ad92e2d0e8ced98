"""vLLM's offloading spec for kvd: makes the manager, and says what the metrics are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvd_client.integrations.vllm.options import WHERE, KvdOptions
from kvd_client.integrations.vllm.scheduling.manager import KvdManager
from kvd_client.integrations.vllm.stats import build_metric_definitions
from kvd_proto.limits import MAX_BLOCKS_PER_BLOCK

SPEC_NAME = "KvdOffloadingSpec"


class KvdOffloadingSpec(OffloadingSpec):
    """What vLLM offloads into: the daemon. The connector has the worker side.

    Raises ValueError, naming the option, for one that is unknown or out of range.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        joined = config.cache.blocks_per_chunk
        if joined > MAX_BLOCKS_PER_BLOCK:
            raise ValueError(
                f"{WHERE}: blocks_per_chunk is {joined}, or block_size is as many engine blocks;"
                f" kvd allows {MAX_BLOCKS_PER_BLOCK}: lower it"
            )
        super().__init__(config)
        self.replicated_layout = config.replicated_layout
        self.options = KvdOptions.from_extra_config(config.extra_config)
        self._manager: KvdManager | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return build_metric_definitions(extra_config)

    def get_manager(self) -> OffloadingManager:
        """The scheduler side's manager, not yet connected; see `KvdManager.open`."""
        if self._manager is None:
            self._manager = KvdManager(self.config, self.options)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> NoReturn:
        """Always raises: vLLM's own worker side asserts that no transfer fails."""
        raise RuntimeError(
            "KvdOffloadingSpec needs the connector KvdConnector"
            ' (kv_connector_module_path="kvd_client.integrations.vllm"), not OffloadingConnector'
        )
