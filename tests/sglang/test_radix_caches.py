"""SGLang's radix cache over kvd, by SGLang's own test kits: real pools of every kind, on the CPU.

`make conformance-sglang` runs these in all of the kits' configurations; `make test-sglang` in some.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import config
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.test_utils import CustomTestCase

from kvd_client.integrations.sglang import weights
from tests.daemon_process import DaemonProcess
from tests.sglang import kits
from tests.sglang.kits import CONFIGS, StorageOverKvd, Tables, same

kits.install()

SOME = ("FULL_MAMBA_ps4", "FULL_SWA_ps1_sw4")
INJECTOR = "HiCacheStorageFailureInjector"
CHOSEN = tuple(CONFIGS) if os.environ.get("KVD_SGLANG_CONFIGS") == "all" else SOME
requires_buffers = config.requires(
    lambda cfg: not cfg.has_mamba, "the kit has no load-back of Mamba states in buffer_only"
)


class RadixCaches(StorageOverKvd):
    """For each configuration a class of its own is made of this."""

    @pytest.fixture(autouse=True)
    def _take_the_daemon(
        self, large_blocks_kvd: DaemonProcess, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.setenv(kits.SOCKET, large_blocks_kvd.socket)
        self.patch = monkeypatch
        with kits.own_arguments():
            yield

    def _pages(self) -> int:
        """Enough that a whole window is stored, and one page before it."""
        window = self.cfg.sliding_window_size or 0
        return max(3, -(-window // self.cfg.page_size) + 1)

    def _store(self, directory: str, tokens: list[int]) -> Tables:
        """Through host pools to kvd; the bytes of every pool."""
        cache, allocator, requests = build_fixture(self.cfg)
        self._init_hicache(
            cache, storage_backend="file", storage_dir=directory, prefetch_threshold=1
        )
        self._insert(cache, allocator, requests, tokens)
        self._fill(cache)
        leaf = match_prefix(cache, tokens).last_device_node
        stored = self._bytes(cache, leaf)
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache)
        return stored

    def _load(self, directory: str, tokens: list[int], name: str = "request") -> tuple[Any, Any]:
        """In another cache: prefetched from kvd, and loaded back to the device."""
        cache, _, requests = self._l3_consumer(directory)
        self._consume_prefetch(cache, tokens, CacheRequestHandle(name, 0))
        if match_prefix(cache, tokens).host_hit_length:
            self._load_back_through_admission(cache, requests, tokens)
            self._finish_pending_loads(cache)
        return cache, match_prefix(cache, tokens).last_device_node

    @config.requires_hicache
    def test_another_cache_gets_the_bytes_of_every_pool(self) -> None:
        directory, tokens = self._make_storage_dir(), self._make_seq(1, self._pages())
        stored = self._store(directory, tokens)
        cache, leaf = self._load(directory, tokens)
        assert match_prefix(cache, tokens).device_prefix_len == len(tokens)
        loaded = self._bytes(cache, leaf)
        assert set(loaded) == set(stored) == set(self.cfg.components)
        assert same(loaded[ComponentType.FULL], stored[ComponentType.FULL])
        for kind in set(loaded) - {ComponentType.FULL}:  # the window, or the last state
            rows = len(loaded[kind][0])
            assert rows
            assert same(loaded[kind], [table[-rows:] for table in stored[kind]])

    @config.requires_hicache
    def test_under_sglangs_own_delays_and_failures_every_byte_is_right(self) -> None:
        self.patch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.005")
        self.patch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
        directory, tokens = self._make_storage_dir(), self._make_seq(1, 2 * self._pages())
        stored = self._store(directory, tokens)
        for number in range(4):
            cache, leaf = self._load(directory, tokens, f"request-{number}")
            assert type(cache.cache_controller.storage_backend).__name__ == INJECTOR
            length = match_prefix(cache, tokens).device_prefix_len
            for kind, tables in self._bytes(cache, leaf).items():
                rows = len(tables[0])
                end = rows if kind == ComponentType.MAMBA else length
                assert same(tables, [table[end - rows : end] for table in stored[kind]])

    @config.requires_hicache
    def test_what_another_engine_may_not_share_is_not_found(self) -> None:
        tokens = self._make_seq(1, self._pages())
        self._store(self._make_storage_dir(), tokens)
        cache, _ = self._load(self._make_storage_dir(), tokens)
        found = match_prefix(cache, tokens)
        assert (found.device_prefix_len, found.host_hit_length) == (0, 0)

    @config.requires_hicache
    def test_what_was_computed_since_a_flush_is_seen_in_sglangs_allocator(self) -> None:
        cache, allocator, requests = build_fixture(self.cfg)
        self._init_hicache(cache)
        for page in range(2):
            cache.reset()
            allocator.clear()  # as SGLang's flush does
            assert not weights._may_hold_pages(cache.cache_controller)
            self._insert(cache, allocator, requests, self._make_seq(page, 1))
            assert weights._may_hold_pages(cache.cache_controller)

    @config.requires_hicache
    @requires_buffers
    def test_with_host_pools_for_staging_alone_kvd_is_the_cache(self) -> None:
        directory, tokens = self._make_storage_dir(), self._buffer_swa_seq()
        _, (keys, values) = self._produce_buffer_l3(directory, tokens, marker=9)
        cache, allocator, _ = self._build_buffer_hicache_fixture(directory)
        room = self._host_avail_sizes(cache)
        request = CacheRequestHandle("request", 0)
        self._consume_prefetch(cache, tokens, request)
        found = match_prefix(cache, tokens)
        assert found.device_prefix_len == len(tokens)
        rows = cache.path_device_indices(found.last_device_node)
        assert same([*self._snapshot_full_kv(allocator, rows)], [keys, values])
        assert self._host_avail_sizes(cache) == room  # no page stays in SGLang's own pools
        cache.sanity_check()

    @config.requires_hicache
    @requires_buffers
    def test_a_staged_prefetch_gives_way_to_pages_that_came_meanwhile(self) -> None:
        directory, tokens = self._make_storage_dir(), self._buffer_swa_seq()
        self._assert_sibling_head_is_trimmed(directory, tokens, window_sized=False)

    @config.requires_swa_only
    @config.requires(
        lambda cfg: cfg.sliding_window_size > cfg.page_size, "requires a window of several pages"
    )
    def test_a_window_alone_is_fetched_where_the_rest_is_on_the_device(self) -> None:
        directory, tokens = self._make_storage_dir(), self._buffer_swa_seq()
        self._produce_buffer_l3(directory, tokens, marker=9)
        for live in (0, self.cfg.page_size):
            self._assert_masked_full_is_reused(directory, tokens, live)

    @config.requires_swa_only
    def test_a_window_that_another_rank_lacks_is_not_used(self) -> None:
        made = self._setup_swa_tp_prefetch()
        assert made is not None
        directory, tokens = made
        for drop, expected in ((False, True), (True, False)):
            cache, _, _ = self._l3_consumer(directory)
            self._patch_tp_prefetch_sync(cache, drop_swa=drop)
            self._consume_prefetch(cache, tokens, CacheRequestHandle(f"drop-{drop}", 0))
            assert self._swa_host_on_path(cache, tokens) is expected


for label in CHOSEN:
    chosen = CONFIGS[label]
    made = type(label, (RadixCaches, CustomTestCase), config.config_attrs(RadixCaches, chosen))
    made.__module__ = __name__
    globals()[f"Test_{label}"] = made
del made
