"""SGLang's HiCache storage backend over the daemon.

SGLang loads it by `--hicache-storage-backend dynamic`. Its host pools are memory files, which the
daemon's mover maps: one call moves a batch of pages, and no page passes through Python. Each rank
is an engine of its own to the daemon. Nothing here raises for an absent, killed, hung or slow
daemon: then nothing is found, and a get or set fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvd_client.batches import BlockBatches, SoughtKeys
from kvd_client.draft import BlockRun
from kvd_client.integrations.sglang.hits import PoolHits, fold, leading
from kvd_client.integrations.sglang.namespace import (
    build_namespace,
    keys_of,
    launch_id,
    rank_identity,
)
from kvd_client.integrations.sglang.options import HiCacheOptions
from kvd_client.integrations.sglang.pools import HostPool, holds_bytes
from kvd_client.integrations.sglang.sequences import Sequences
from kvd_client.integrations.sglang.weights import watch, watch_weights
from kvd_client.scheduler.hits import Flags
from kvd_client.worker import GroupLayout, SharedMemory

log = logging.getLogger(__name__)

KV = str(PoolName.KV.value)
DRAFT = str(PoolName.DRAFT.value)  # which the names of all pools of a drafter begin with


class EngineHistory:
    """What the engine that has this pool has done: the pool stays while backends come and go."""

    def __init__(self) -> None:
        self.clears = 0
        # By `weights_id`: how many changes of the weights came before it was first given.
        self.changes_before: dict[str, int] = {}


_histories: weakref.WeakKeyDictionary[Any, EngineHistory] = weakref.WeakKeyDictionary()


class ServedPool:
    """Where a pool's pages go: its group in one namespace of the daemon's."""

    def __init__(self, batches: BlockBatches, group: int, pool: HostPool) -> None:
        self.batches = batches
        self.group = group
        self.pool = pool


class KvdHiCache(HiCacheStorage):
    """Pages of SGLang's host pools, kept in the node's daemon."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        self.storage_config = storage_config
        self.options = HiCacheOptions.from_extra_config(storage_config.extra_config)
        if storage_config.should_split_heads:
            log.warning("kvd: pages are kept for this tensor-parallel size alone (tp_lcm_size)")
        self.registered_pools: dict[str, Any] = {}
        self.mem_pool_host: Any = None
        self._places: dict[str, ServedPool] = {}
        self._opened: list[BlockBatches] = []
        self._closing: list[BlockBatches] = []
        self._sequences = Sequences()
        self._is_anchor_logical = False
        self._is_complete = False
        self._lock = threading.Lock()
        self._changes = watch.flushed_changes  # of the weights, before what is found and kept here
        self._waits_for_flush = False
        if problem := watch_weights():
            log.warning("kvd: changes of the weights are not seen, clear after each: %s", problem)

    # -- pools ------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises for a pool that the daemon can't have: an attach that fails here SGLang undoes.

        One that fails once all pools are known leaves it half attached, and no other is taken.
        """
        super().register_mem_pool_host(mem_pool_host)
        history = _histories.setdefault(mem_pool_host, EngineHistory())
        history.changes_before.setdefault(self.options.weights_id, watch.changes)
        self._is_anchor_logical = not holds_bytes(mem_pool_host)
        if not self._is_anchor_logical:
            HostPool(KV, mem_pool_host)
            self.registered_pools[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = _name(host_pool_name)
        if not holds_bytes(host_pool):
            return
        self.registered_pools[name] = host_pool
        if self._is_complete and name not in self._places:  # a sidecar that came later
            self._open([HostPool(name, host_pool)])

    def on_host_pools_registered(self) -> None:
        """Hand all pools to the daemon. Raises for those that it can't have."""
        pools = [HostPool(name, pool) for name, pool in self.registered_pools.items()]
        for part in self._parts(pools):
            self._open(part)
        self._is_complete = True
        for batches in self._opened:
            if not batches.wait_usable(self.options.register_wait_s):
                log.warning("kvd: not usable yet (%s); it is tried again", batches.problem)
                break

    def _parts(self, pools: Sequence[HostPool]) -> list[list[HostPool]]:
        """The pools that share a namespace.

        A drafter's have one each: at a start they come after all others, one by one, and with them
        where a backend is attached later, which shall find what was stored before.
        """
        parts: dict[str | bool, list[HostPool]] = {}
        for each in pools:
            is_drafters = each.name.startswith(DRAFT)
            key = each.name if is_drafters else self._is_replicated(each)
            parts.setdefault(key, []).append(each)
        return list(parts.values())

    def _is_replicated(self, host_pool: HostPool) -> bool:
        """Whether all ranks of a tensor-parallel group hold the same bytes, which one writes.

        Of a model with replicated (MLA) KV SGLang has the state of linear attention on each rank,
        and a drafter's heads are cut as any others.
        """
        if not self.storage_config.is_mla_model or host_pool.name == PoolName.MAMBA.value:
            return False
        kinds = {kind.__name__ for kind in type(host_pool.pool).__mro__}
        return not kinds & {
            "MHATokenToKVPoolHost",
            "MHATokenToKOnlyPoolHost",
            "MambaPoolHost",
        }

    def _open(self, pools: Sequence[HostPool]) -> None:
        """One namespace and one mover for these pools, where what was cleared is not found."""
        is_replicated = self._is_replicated(pools[0])
        part = ("shared-" if is_replicated else "") + "-".join(each.name for each in pools)
        batches = BlockBatches(
            self.options.socket_path,
            rank_identity(self.storage_config, self.options, part),
            build_namespace(self.storage_config, pools, self.options, is_replicated=is_replicated),
            self.options.batch_options(),
        )
        self._opened.append(batches)  # at once: `close` ends it whatever raises from here on
        if epoch := self._epoch():
            batches.reset(epoch)
        memories: list[SharedMemory] = []
        groups: list[GroupLayout] = []
        for group, pool in enumerate(pools):
            groups.append(pool.layout(len(memories)))
            memories += pool.memories()
            self._places[pool.name] = ServedPool(batches, group, pool)
        batches.register(memories, groups)

    def close(self) -> None:
        """Returns when no copy can touch a pool any more.

        Where a signal's handler raises amid it, the next call goes on from there. Two threads that
        call at once both wait for the end.
        """
        with self._lock:
            self._closing, self._opened = [*self._closing, *self._opened], []
            self._places.clear()
        while left := self._closing[-1:]:
            left[0].close()
            with contextlib.suppress(ValueError):  # another thread has closed it, too
                self._closing.remove(left[0])

    # -- is it there ------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many pages are there, from the first on; they stay for a while."""
        place = self._places.get(KV)
        if not self._is_open():
            return 0
        if place is None:
            return len(keys) if self._is_anchor_logical and self._places else 0
        wanted = SoughtKeys(place.group, keys_of(keys), _before(extra_info))
        return leading(place.batches.find([wanted])[0])

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The pages that every pool can restore, by the pools' own rules."""
        transfers = pool_transfers or []
        if not self._is_open():
            return PoolTransferResult(0, {}, [])
        hashes, first = keys_of(keys), _before(extra_info)
        questions: list[tuple[str, SoughtKeys]] = []
        if not self._is_anchor_logical:
            questions.append((KV, SoughtKeys(self._group(KV), hashes, first)))
        for transfer in transfers:
            is_grouped = transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS
            own = keys_of(transfer.keys or []) if is_grouped else hashes
            is_leading = transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES
            name = _name(transfer.name)
            questions.append((name, SoughtKeys(self._group(name), own, first, is_leading)))
        found = self._find(questions)
        kv_pages = len(keys) if self._is_anchor_logical else leading(found[0])
        flags = found if self._is_anchor_logical else found[1:]
        pools = [
            PoolHits(
                name=_name(transfer.name),
                policy=str(transfer.hit_policy.value),
                flags=each,
                trailing=len(transfer.keys or ()),
                block_pages=transfer.block_pages,
                group_pages=transfer.group_pages,
            )
            for transfer, each in zip(transfers, flags, strict=True)
        ]
        restorable, boundaries = fold(kv_pages, pools)
        by_pool: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        for transfer in transfers:
            if boundary := boundaries.get(_name(transfer.name)):
                by_pool[transfer.name] = boundary
        return PoolTransferResult(restorable[-1] if restorable else 0, by_pool, restorable)

    def _group(self, name: str) -> int:
        place = self._places.get(name)
        return -1 if place is None else place.group

    def _find(self, questions: Sequence[tuple[str, SoughtKeys]]) -> list[Flags]:
        """The answers in order; each namespace is asked once, those without a place miss."""
        found: list[Flags] = [_no_flags(len(wanted.keys)) for _, wanted in questions]
        by_batches: dict[BlockBatches, list[int]] = {}
        for number, (name, _) in enumerate(questions):
            place = self._places.get(name)
            if place is not None:
                by_batches.setdefault(place.batches, []).append(number)
        for batches, numbers in by_batches.items():
            answers = batches.find([questions[number][1] for number in numbers])
            for number, flags in zip(numbers, answers, strict=True):
                found[number] = flags
        return found

    # -- pages ------------------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Bring pages; which have come."""
        transfer = PoolTransfer(name=PoolName.KV, keys=keys, host_indices=host_indices)
        return self._move([transfer], extra_info, is_get=True)[0]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Keep pages; whether they can be found now."""
        transfer = PoolTransfer(name=PoolName.KV, keys=keys, host_indices=host_indices)
        return self._move([transfer], extra_info, is_get=False)[0]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        moved = self._move(transfers, extra_info, is_get=True)
        return {each.name: done for each, done in zip(transfers, moved, strict=True)}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        moved = self._move(transfers, extra_info, is_get=False)
        return {each.name: done for each, done in zip(transfers, moved, strict=True)}

    def _move(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
        *,
        is_get: bool,
    ) -> list[list[bool]]:
        """Of each transfer, which pages were moved. Pools of one namespace go together."""
        first = _before(extra_info)
        moved = [[False] * len(each.keys or ()) for each in transfers]
        if not self._is_open():
            return moved
        runs: dict[BlockBatches, list[tuple[int, BlockRun]]] = {}
        for number, transfer in enumerate(transfers):
            place = self._places.get(_name(transfer.name))
            if place is None:
                is_anchor = self._is_anchor_logical and _name(transfer.name) == KV
                moved[number] = [is_anchor and bool(self._places)] * len(moved[number])
                continue
            pages = place.pool.pages(transfer.host_indices, len(moved[number]))
            if pages is None:
                log.error("kvd: indices of the pool %s are no pages of it", place.pool.name)
            elif len(pages):
                hashes = keys_of(transfer.keys or ())
                run = BlockRun(place.group, first, hashes, pages)
                runs.setdefault(place.batches, []).append((number, run))
        sequence = "" if is_get else self._sequence(transfers, extra_info)
        for batches, entries in runs.items():
            several = [run for _, run in entries]
            done = (
                self._load(batches, several) if is_get else self._store(batches, several, sequence)
            )
            for (number, _), each in zip(entries, done, strict=True):
                moved[number] = each
        return moved

    def _load(self, batches: BlockBatches, runs: Sequence[BlockRun]) -> list[list[bool]]:
        began = time.monotonic()
        loaded = batches.load(runs)
        self._look_at_others(batches, time.monotonic() - began > self.options.load_deadline_s)
        return loaded

    def _sequence(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None
    ) -> str:
        """The name of the prompt that the pages are of; none where SGLang does not tell of it."""
        before = None if extra_info is None else extra_info.prefix_keys
        longest = max((each.keys or [] for each in transfers), key=len, default=[])
        pools = " ".join(_name(each.name) for each in transfers)
        name, over = self._sequences.grow(pools, before, longest)
        for batches in self._opened:
            for each in over:
                batches.end_request(each)
        return name

    def _store(
        self, batches: BlockBatches, runs: Sequence[BlockRun], sequence: str
    ) -> list[list[bool]]:
        began = time.monotonic()
        stored = batches.store(runs, sequence)
        self._look_at_others(batches, time.monotonic() - began > self.options.store_deadline_s)
        return [[ok] * len(run.block_hashes) for ok, run in zip(stored, runs, strict=True)]

    def _look_at_others(self, late: BlockBatches, is_late: bool) -> None:
        """A daemon that has cost one namespace's deadline is not waited for in each of the others:
        SGLang ends its threads within 10 s, or fails."""
        for batches in self._opened if is_late else ():
            if batches is not late:
                batches.notice_silence()

    # -- the rest ---------------------------------------------------------------------------

    def clear(self) -> bool:
        """Find nothing of what was stored by now; other engines' pages stay theirs."""
        if self.mem_pool_host is None:
            return True  # nothing was stored yet
        with self._lock:  # a change of the weights that goes on meanwhile does not undo it
            _histories[self.mem_pool_host].clears += 1
            self._enter_epoch()
        return True

    def _enter_epoch(self) -> None:
        """Called under the lock: of two that come at once, the second names the last epoch."""
        for batches in list(self._opened):
            batches.reset(self._epoch())

    def _epoch(self) -> str:
        """Where all ranks of this engine are after so many clears and changes of the weights."""
        history = _histories[self.mem_pool_host]
        changes = watch.changes - history.changes_before[self.options.weights_id]
        if not history.clears and not changes:
            return ""
        own = f"-weights{changes}" if changes else ""
        return f"sglang-{launch_id()}-{history.clears}{own}"

    def _is_open(self) -> bool:
        """Whether pages may be found and kept: not those of the weights before a change.

        SGLang has them until it flushes. The first call after that takes the engine to an epoch
        of its own.
        """
        if self._changes == watch.changes:
            return True
        if watch.flushed_changes != watch.changes:
            if not self._waits_for_flush:
                self._waits_for_flush = True
                log.warning("kvd: weights were changed: not used until SGLang's cache is flushed")
            return False
        with self._lock:
            self._waits_for_flush = False
            changes = watch.flushed_changes
            if self._changes != changes:
                log.warning("kvd: the weights were changed: pages of before are not found any more")
                self._enter_epoch()
                self._changes = changes
        return changes == watch.changes

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Never called with `interface_v1`; a tensor outside the pools can't be filled."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Never called with `interface_v1`."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return False


def _name(name: Any) -> str:
    return str(getattr(name, "value", name))


def _before(extra_info: HiCacheStorageExtraInfo | None) -> int:
    """How many pages of the sequence come before the call's."""
    return len(extra_info.prefix_keys or ()) if extra_info is not None else 0


def _no_flags(count: int) -> Flags:
    return np.zeros(count, dtype=np.bool_)
