"""A connector that loads for some requests, beside kvd's: whoever it is asked for by name.

It writes its requests' blocks as a step begins, and tells at the step's end that they are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

PREFIX = "fetched"  # of the requests' names that it loads for
FETCHED_TOKENS = 96


@dataclass
class Fetches(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's are Any
    blocks: dict[str, list[int]] = field(default_factory=dict)  # by request


class OtherLoads(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # likewise
    """Both of its sides; an engine's memory is given to it by the test."""

    memory: ClassVar[Any] = None  # engine blocks, which it spoils

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._due, self._arrived = Fetches(), set[str]()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        wants = request.request_id.startswith(PREFIX) and not computed
        return (FETCHED_TOKENS, True) if wants else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._due.blocks[request.request_id] = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> Fetches:
        due, self._due = self._due, Fetches()
        return due

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for name, blocks in self._get_connector_metadata().blocks.items():
            self.memory[blocks] = 0
            self._arrived.add(name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        arrived, self._arrived = self._arrived, set()
        return None, arrived

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """It has `memory`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """It loads between steps."""

    def save_kv_layer(self, *arguments: Any, **named: Any) -> None:
        """It stores nothing."""

    def wait_for_save(self) -> None:
        """Likewise."""


class FailingLoads(OtherLoads):
    """The same within the step that asks for it; the first load that it begins fails."""

    has_failed: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed = set[int]()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return super().get_num_new_matched_tokens(request, computed)[0], False

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for blocks in self._get_connector_metadata().blocks.values():
            if not FailingLoads.has_failed:
                FailingLoads.has_failed = True
                self._failed |= set(blocks[: FETCHED_TOKENS // 16])

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
