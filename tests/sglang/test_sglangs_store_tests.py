"""SGLang's own tests of a storage backend with zero copies, with kvd in that backend's place.

They come with its wheel, for Mooncake's store. The pool that they make is in a memory file here.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator

from kvd_client.integrations.sglang.backend import KvdHiCache
from tests.daemon_process import DaemonProcess
from tests.sglang.rig import PATIENCE_S, extra_config

STORE = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store"
TESTS = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"
PLACES = [(False, 0, 1), (True, 0, 1), (False, 1, 4), (True, 3, 8)]  # as at the end of its file


class TorchInMemoryFiles(types.SimpleNamespace):
    """torch, with `randn` in a memory file."""

    def __init__(self) -> None:
        super().__init__(allocator=ShmHostTensorAllocator())

    def randn(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        made: torch.Tensor = self.allocator.allocate((count,), dtype, "cpu")
        return made.normal_()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def their_tests(kvd: DaemonProcess) -> Iterator[Any]:
    """The module of SGLang's tests, whose store is kvd's backend."""
    made: list[Any] = []
    torch_here = TorchInMemoryFiles()

    class Store(KvdHiCache):
        def __init__(self, storage_config: Any) -> None:
            storage_config.extra_config = extra_config(kvd.socket)
            super().__init__(storage_config)
            made.append(self)

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            pool = mem_pool_host
            pool.size = pool.kv_buffer.numel() // (pool.entries_per_page * pool.page_elements)
            pool.allocator = torch_here.allocator
            super().register_mem_pool_host(pool)
            self.on_host_pools_registered()
            for batches in self._opened:
                assert batches.wait_usable(PATIENCE_S), batches.problem

    module: Any = types.ModuleType(STORE)
    module.MooncakeStore = Store
    with mock.patch.dict(sys.modules, {STORE: module}):
        sys.modules.pop(TESTS, None)
        tests: Any = __import__(TESTS, fromlist=["test_batch_operation"])
        with mock.patch.object(tests, "torch", torch_here):
            yield tests
    sys.modules.pop(TESTS, None)
    vars(tests).clear()  # its package keeps it, and it the allocator
    while made:
        made[-1].close()
        vars(made.pop()).clear()  # the pool, and with it the memory file


@pytest.mark.parametrize("place", PLACES, ids=["mha", "mla", "mha-1-of-4", "mla-3-of-8"])
def test_their_batches_come_back_as_they_were_set(
    their_tests: Any, place: tuple[bool, int, int]
) -> None:
    is_mla, rank, size = place
    their_tests.test_batch_operation(
        their_tests.make_hicache_storage_config(is_mla_model=is_mla, tp_rank=rank, tp_size=size)
    )
