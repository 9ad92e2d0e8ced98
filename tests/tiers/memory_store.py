"""A TierStore over a dictionary: the plainest one that fulfils the contract."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from kvd.tiers.store import (
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierOptions,
    TierReason,
    TierTimeout,
    TierUnusable,
    TierUsage,
    require_blocks,
    require_keys,
    require_scopes,
)

Medium = OrderedDict[TierKey, tuple[bytes, ...]]


class MemoryStore:
    """Keeps bytes of blocks, the least recently used leave first.

    Options: `capacity_bytes` (1 GiB), `concurrency` (4). `medium`: what an earlier store left.
    """

    def __init__(self, options: TierOptions, medium: Medium | None = None) -> None:
        self._capacity = _whole(options, "capacity_bytes", 1 << 30)
        self.concurrency = _whole(options, "concurrency", 4)
        self._blocks: Medium = OrderedDict() if medium is None else medium
        self._bytes = sum(len(part) for parts in self._blocks.values() for part in parts)
        self._evicted = 0
        self._left: list[TierKey] = []
        self._errors: dict[TierReason, int] = {}
        self._closed = False
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        require_keys(keys)
        self._begin(deadline)
        return [key in self._blocks for key in keys]

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=False)
        self._begin(deadline)
        kept = {block.key for block in blocks}
        outcomes: dict[TierKey, Outcome] = {}
        for block in blocks:
            if block.key not in outcomes:
                outcomes[block.key] = self._write(block, kept, deadline)
        return [outcomes[block.key] for block in blocks]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=True)
        self._begin(deadline)
        return [self._read(block, deadline) for block in blocks]

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        require_scopes(scopes)
        self._begin(deadline)
        with self._lock:
            prefixes = tuple(scopes)
            for key in [key for key in self._blocks if key.scope.startswith(prefixes)]:
                self._forget(key)

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(
                len(self._blocks), self._bytes, self._capacity, self._evicted, dict(self._errors)
            )

    def take_left(self) -> list[TierKey]:
        with self._lock:
            left, self._left = self._left, []
            return left

    def close(self) -> None:
        self._closed = True

    def _begin(self, deadline: float) -> None:
        if self._closed:
            raise TierError("the store is closed", TierReason.CLOSED)
        if time.monotonic() >= deadline:
            with self._lock:
                self._count(TierReason.TIMEOUT)
            raise TierTimeout("late before it began")

    def _count(self, reason: TierReason) -> None:
        self._errors[reason] = self._errors.get(reason, 0) + 1

    def _write(self, block: TierBlock, kept: set[TierKey], deadline: float) -> Outcome:
        if time.monotonic() >= deadline:
            with self._lock:
                self._count(TierReason.TIMEOUT)
            return Outcome.FAILED
        with self._lock:
            there = self._blocks.get(block.key)
            if there is not None:
                if [len(part) for part in there] == [part.nbytes for part in block.parts]:
                    return Outcome.DONE
                self._forget(block.key)
            leaving, room = [], self._capacity - self._bytes
            for key, parts in self._blocks.items():
                if room >= block.nbytes:
                    break
                if key not in kept:
                    leaving.append(key)
                    room += sum(map(len, parts))
            if room < block.nbytes:
                return Outcome.FULL
            for key in leaving:
                self._forget(key)
                self._left.append(key)
                self._evicted += 1
            self._blocks[block.key] = tuple(map(bytes, block.parts))
            self._bytes += block.nbytes
            return Outcome.DONE

    def _read(self, block: TierBlock, deadline: float) -> Outcome:
        if time.monotonic() >= deadline:
            with self._lock:
                self._count(TierReason.TIMEOUT)
            return Outcome.FAILED
        with self._lock:
            found = self._blocks.get(block.key)
            if found is None or [len(p) for p in found] != [p.nbytes for p in block.parts]:
                return Outcome.MISSING
            self._blocks.move_to_end(block.key)
        for part, content in zip(block.parts, found, strict=True):
            part[:] = content
        return Outcome.DONE

    def _forget(self, key: TierKey) -> None:
        found = self._blocks.pop(key, None)
        if found is not None:
            self._bytes -= sum(map(len, found))


def _whole(options: TierOptions, name: str, otherwise: int) -> int:
    given = options.get(name, otherwise)
    if not isinstance(given, int) or given < 1:
        raise TierUnusable(f"{name} is {given!r}; it must be a whole number from 1 on")
    return given
