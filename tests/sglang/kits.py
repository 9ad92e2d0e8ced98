"""SGLang's own test kits for its radix cache, with kvd in the place of its file backend.

The kits come with SGLang's wheel (`sglang.test.kits.unified_radix_cache`): caches over real pools
of full attention, sliding windows and Mamba, in nineteen configurations; writing to a storage
backend and prefetching from it; steps with checks of their own. What the kits call a directory of
the file backend is an account of its own here: what is stored for one is not found for another.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from sglang.srt import runtime_context
from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import config, fixtures, mixins
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from kvd_client.integrations.sglang.backend import KvdHiCache
from tests.sglang import on_cpu
from tests.sglang.rig import PATIENCE_S, extra_config

CONFIGS = {each.label: each for each in config.CONFIGS}
MARKER = 11
SOCKET = "KVD_SGLANG_SOCKET"  # names the daemon for the kits

Tables = dict[ComponentType, list[torch.Tensor]]  # each with a row for a token or a state


def install() -> None:
    """From here on the kits' caches are on the CPU, and their file backend is kvd."""
    on_cpu.install()
    fixtures.get_device = lambda: "cpu"
    begin = mixins.UnifiedRadixCacheFixtures._init_hicache

    def begin_over_kvd(test: Any, cache: Any, **settings: Any) -> None:
        with mock.patch.object(mixins, "ServerArgs", _arguments):
            begin(test, cache, **settings)
        backend = cache.cache_controller.storage_backend
        if backend is not None:
            backend = getattr(backend, "_backend", backend)  # within SGLang's failure injector
            assert isinstance(backend, KvdHiCache)
            test.addCleanup(backend.close)
            for batches in backend._opened:
                assert batches.wait_usable(PATIENCE_S), batches.problem

    mixins.UnifiedRadixCacheFixtures._init_hicache = begin_over_kvd


def own_arguments() -> AbstractContextManager[None]:
    """A while in which what the kits say of the process's arguments is said to nobody else."""
    parallel = runtime_context.ParallelContext()
    own: AbstractContextManager[None] = runtime_context.use_context(
        runtime_context.RuntimeContext(parallel=parallel)
    )
    return own


def _arguments(**arguments: Any) -> Any:
    if arguments.get("hicache_storage_backend") == "file":
        given = json.loads(arguments["hicache_storage_backend_extra_config"] or "{}")
        account = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
        arguments["hicache_storage_backend"] = "dynamic"
        arguments["hicache_storage_backend_extra_config"] = json.dumps(
            extra_config(os.environ[SOCKET], account=account) | given
        )
    return ServerArgs(**arguments)


class StorageOverKvd(UnifiedRadixCacheStorageFixtures):
    """The kit's steps, and the bytes of every pool."""

    def _tables(self, cache: Any) -> Tables:
        """The device's tables of each component, rows first."""
        pool = cache.token_to_kv_pool_allocator.get_kvcache()
        full, window = getattr(pool, "full_kv_pool", pool), getattr(pool, "swa_kv_pool", None)
        tables = {ComponentType.FULL: [*full.k_buffer, *full.v_buffer]}
        if window is not None:
            tables[ComponentType.SWA] = [*window.k_buffer, *window.v_buffer]
        states = getattr(cache.req_to_token_pool, "mamba_pool", None)
        if states is not None:
            held = states.mamba_cache
            tables[ComponentType.MAMBA] = [*held.temporal, *(s for c in held.conv for s in c)]
        return tables

    def _fill(self, cache: Any) -> None:
        """Bytes that differ from row to row in all the device's tables."""
        draw = torch.Generator().manual_seed(MARKER)
        for tables in self._tables(cache).values():
            for table in tables:
                table.copy_(torch.rand(table.shape, generator=draw).to(table.dtype))

    def _bytes(self, cache: Any, leaf: Any) -> Tables:
        """What the device has of each component on the path to a node."""
        found: Tables = {}
        for kind, tables in self._tables(cache).items():
            values = [
                value
                for node in self._path_chain(cache, leaf)
                if (value := fixtures.node_device_value(cache, node, kind)) is not None
            ]
            if values:
                rows = torch.cat([value.reshape(-1) for value in values]).to(torch.int64)
                found[kind] = [table[rows].clone() for table in tables]
        return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
