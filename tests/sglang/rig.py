"""A rank of SGLang without a model: its own pools, controller and storage threads over kvd."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE_TOKENS = 16
DEVICE_TOKENS = 2048
LAYERS = 3
PATIENCE_S = 20.0
KV = PoolName.KV
# What a stall of the machine's may not break; a test that wants the engine's own haste says so.
PATIENT = {
    "lookup_deadline_s": 10.0,
    "silent_after_s": 5.0,
    "retry_deadline_s": 2.0,
    "pending_deadline_s": 10.0,
    "load_deadline_s": 30.0,
    "store_deadline_s": 30.0,
}
HURRIED = {
    "lookup_deadline_s": 0.5,
    "silent_after_s": 0.1,
    "load_deadline_s": 1.0,
    "store_deadline_s": 1.0,
}


def mha_device_pool(layers: int = LAYERS) -> Any:
    return MHATokenToKVPool(
        DEVICE_TOKENS, PAGE_TOKENS, torch.float32, 2, 16, layers, "cpu", enable_memory_saver=False
    )


def mla_device_pool() -> Any:
    return MLATokenToKVPool(
        DEVICE_TOKENS, PAGE_TOKENS, torch.float32, 24, 8, LAYERS, "cpu", enable_memory_saver=False
    )


def host_pool(
    device_pool: Any,
    layout: str = "page_first",
    allocator: str = "shm",
    page_tokens: int = PAGE_TOKENS,
) -> Any:
    """SGLang's own host pool over a device pool, in memory files."""
    info = device_pool.get_device_pool_infos()[0].buffer_info
    common = {
        "device_capacity_tokens": device_pool.size,
        "start_layer": device_pool.start_layer,
        "end_layer": device_pool.end_layer,
        "pin_memory": False,
        "allocator_type": allocator,
    }
    if isinstance(device_pool, MLATokenToKVPool):
        layers = device_pool.layer_num
        return MLATokenToKVPoolHost(
            info, 2.0, 0, page_tokens, layout, target_layer_num=layers, **common
        )
    return MHATokenToKVPoolHost(info, 2.0, 0, page_tokens, layout, **common)


def state_pool(
    dtype: torch.dtype = torch.float32, temporal: torch.dtype = torch.float32
) -> MambaPoolHost:
    """SGLang's own host pool of Mamba states: of three layers, and of one table without layers."""
    states = MambaStateBufferInfo(
        temporal=torch.zeros(3, 24, 5, 8, dtype=temporal),
        conv=(torch.zeros(3, 24, 6, dtype=dtype), torch.zeros(3, 24, 2, dtype=dtype)),
        extra_checkpoint_buffers=(torch.zeros(24, 10),),
    )
    return MambaPoolHost(
        states, 1.0, 0, device_capacity=24, pin_memory=False,
        allocator_type="shm", layout="page_first",
    )  # fmt: skip


def extra_config(socket: str, **options: Any) -> dict[str, Any]:
    """What stands in --hicache-storage-backend-extra-config."""
    return {
        "backend_name": "kvd",
        "module_path": "kvd_client.integrations.sglang.backend",
        "class_name": "KvdHiCache",
        "interface_v1": 1,
        "allocator": "shm",
        "socket_path": socket,
        "weights_id": "made for tests",
        **PATIENT,
        **options,
    }


@contextlib.contextmanager
def parallel(tp_rank: int = 0, tp_size: int = 1) -> Iterator[None]:
    """SGLang's idea of which rank this is."""
    with get_parallel().override(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        attn_tp_rank=tp_rank,
        attn_tp_size=tp_size,
        attn_dp_rank=0,
        attn_dcp_size=1,
        attn_dcp_rank=0,
    ):
        yield


class Rank:
    """SGLang's controller with its storage threads, over host pools and kvd's backend."""

    def __init__(
        self,
        socket: str,
        device_pool: Any = None,
        *,
        layout: str = "page_first",
        place: tuple[int, int] = (0, 1),
        model: str = "a-model",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.device_pool = device_pool if device_pool is not None else mha_device_pool()
        self.pool = host_pool(self.device_pool, layout)
        self.allocator = PagedTokenToKVPoolAllocator(
            DEVICE_TOKENS, PAGE_TOKENS, torch.float32, "cpu", self.device_pool, need_sort=False
        )
        with parallel(*place):
            self.controller = HiCacheController(
                self.allocator,
                self.pool,
                PAGE_TOKENS,
                None,
                None,
                io_backend="direct",
                storage_backend="dynamic",
                prefetch_threshold=PAGE_TOKENS,
                model_name=model,
                storage_backend_extra_config=extra_config(socket, **(options or {})),
            )
        self.backend = self.controller.storage_backend

    def wait_usable(self) -> None:
        """Until the daemon has the pools."""
        backend = getattr(self.backend, "_backend", self.backend)
        for batches in backend._opened:
            assert batches.wait_usable(PATIENCE_S), batches.problem

    def attach_anew(self, **options: Any) -> None:
        """A backend with these options in the place of the one that there is."""
        socket = self.backend.options.socket_path
        self.controller.detach_storage_backend()
        with parallel():
            self.controller.attach_storage_backend(
                "dynamic",
                prefetch_threshold=PAGE_TOKENS,
                model_name="a-model",
                storage_backend_extra_config=extra_config(socket, **options),
            )
        self.backend = self.controller.storage_backend
        self.wait_usable()

    def fill(self, tokens: Sequence[int], seed: int) -> torch.Tensor:
        """Host pages for these tokens, with bytes that only this seed has."""
        indices = self.pool.alloc(len(tokens))
        assert indices is not None
        for number in range(len(tokens) // PAGE_TOKENS):
            first = int(indices[number * PAGE_TOKENS])
            self.pool.set_from_flat_data_page(first, self.content(seed, number))
        return indices

    def content(self, seed: int, page: int) -> torch.Tensor:
        """The bytes of one page, as a flat tensor of the pool's own form."""
        generator = torch.Generator().manual_seed(seed * 100003 + page)
        like = self.pool.get_dummy_flat_data_page()
        return torch.rand(like.shape, generator=generator).to(like.dtype)

    def backup(self, tokens: Sequence[int], indices: torch.Tensor) -> int:
        """Have SGLang's thread store these pages; how many tokens it says are stored."""
        hashes = get_storage_hash_str(list(tokens), None, page_size=PAGE_TOKENS)
        self.controller.write_storage(indices, list(tokens), hash_value=hashes)
        return int(self.controller.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens)

    def prefetch(self, tokens: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Have SGLang's threads look for these tokens and bring them; how many came, and where."""
        controller = self.controller
        operation = controller.prefetch("request", list(tokens))
        hit = controller.prefetch_hit_queue.get(timeout=PATIENCE_S)
        assert hit is operation
        if not operation.storage_hit_count:
            return 0, torch.empty(0, dtype=torch.int64)
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        done = 0
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=PATIENCE_S)
            done = ack.completed_tokens if ack.completed_tokens is not None else done
            if ack.completed_req:
                return done, operation.host_indices

    def wrong_pages(self, indices: torch.Tensor, done: int, seed: int) -> list[int]:
        """Of the pages that have come, those whose bytes are not this seed's."""
        return [
            number
            for number in range(done // PAGE_TOKENS)
            if not torch.equal(
                self.pool.get_data_page(indices[number * PAGE_TOKENS]).flatten(),
                self.content(seed, number),
            )
        ]

    def free(self, *several: torch.Tensor) -> None:
        for indices in several:
            self.pool.free(indices)

    def close(self) -> None:
        """End the threads and give the memory files back."""
        self.controller.detach_storage_backend()
        vars(self.pool).clear()  # every view of the mappings, and the allocator with its files


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def storage_config(extra: dict[str, Any], **changes: Any) -> Any:
    """What SGLang hands to a backend, for one that is made without a controller."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    figures: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "a-model",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**figures | changes)
