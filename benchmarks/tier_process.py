"""What a process of its own costs a tier: questions and copies beside calls in the same process.

Both sides call the same store in memory, which copies blocks to and from an arena of its own. The
process is given one order at a time, as from the daemon's event loop, and many at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks import report
from kvd.core.keys import KeyBatch, RowId
from kvd.processes.mappings import ExtentFiles
from kvd.tiers.process import (
    OrderEnd,
    OrderId,
    PlacedBlocks,
    ScopedKeys,
    TierAnswer,
    TierConfig,
    TierId,
    TierLeft,
    TierProcess,
)
from kvd.tiers.store import Outcome, TierBlock, TierKey, TierOptions, TierUsage

MIB = 1 << 20
EXTENT_BYTES = 64 * MIB
ARENA_BYTES = 64 * MIB
HASH_BYTES = 32
SCOPE = bytes(32)
KEYS = (1, 64, 1024)
COPIES = ((1, 64 << 10), (16, 64 << 10), (64, 64 << 10), (1, 2 * MIB), (16, 2 * MIB))
AT_ONCE = 64
SECONDS = 60.0  # a deadline that never passes


class ArenaStore:
    """Keeps as many blocks as were last written, in memory that is there from the start."""

    concurrency = 4

    def __init__(self, _options: TierOptions) -> None:
        self._arena = np.ones(ARENA_BYTES, dtype=np.uint8)
        self._places: dict[bytes, int] = {}
        self._next = 0

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:  # noqa: ARG002
        places = self._places
        return [key.block in places for key in keys]

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:  # noqa: ARG002
        for key, (part,), _ in blocks:
            at = self._next if self._next + part.nbytes <= ARENA_BYTES else 0
            np.copyto(self._arena[at : at + part.nbytes], np.frombuffer(part, dtype=np.uint8))
            self._places[key.block] = at
            self._next = at + part.nbytes
        return [Outcome.DONE] * len(blocks)

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:  # noqa: ARG002
        for key, (part,), _ in blocks:
            at = self._places[key.block]
            np.copyto(np.frombuffer(part, dtype=np.uint8), self._arena[at : at + part.nbytes])
        return [Outcome.DONE] * len(blocks)

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        """Nothing here asks for it."""

    def usage(self) -> TierUsage:
        return TierUsage(len(self._places), ARENA_BYTES, ARENA_BYTES)

    def close(self) -> None:
        """There is nothing to let go of."""


class Waiting:
    """The tier's sink: wakes whoever waits for an order."""

    def __init__(self) -> None:
        self._orders: dict[OrderId, asyncio.Future[TierAnswer]] = {}
        self._last = 0

    def expect(self) -> tuple[OrderId, asyncio.Future[TierAnswer]]:
        """The next order's number, and its answer to come."""
        self._last += 1
        answer: asyncio.Future[TierAnswer] = asyncio.get_running_loop().create_future()
        self._orders[OrderId(self._last)] = answer
        return OrderId(self._last), answer

    def process_started(self, tier: TierId, pid: int, start_time: int) -> None:
        """Nobody else owns this pool."""

    def process_ended(self, tier: TierId, pid: int) -> None:
        """Nor after it."""

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:  # noqa: ARG002
        assert answer.end is OrderEnd.ANSWERED, answer.reason
        self._orders.pop(answer.order).set_result(answer)

    def row_unmapped(self, tier: TierId, row: RowId) -> None:
        """No row is unmapped here."""

    def usage_told(self, tier: TierId, usage: TierUsage) -> None:
        """Nothing here depends on it."""

    def left_told(self, tier: TierId, left: TierLeft) -> None:
        """Nothing here evicts."""

    def tier_gone(self, tier: TierId, reason: str) -> None:
        """Who waits is told by each order."""


def hashes(count: int, first: int = 0) -> KeyBatch:
    raw = np.zeros((count, HASH_BYTES // 8), dtype=np.uint64)
    raw[:, 0] = np.arange(first, first + count)
    return KeyBatch(raw, HASH_BYTES)


def placed(count: int, size: int) -> list[PlacedBlocks]:
    extents = np.zeros((1, count), dtype=np.uint32)
    offsets = (np.arange(count, dtype=np.uint64) * np.uint64(size))[None]
    return [PlacedBlocks(SCOPE, hashes(count), extents, offsets, (size,))]


class Stand:
    """One store in a process of its own, and one here."""

    def __init__(self, directory: Path) -> None:
        self._loop = uvloop.new_event_loop()
        self._sink = Waiting()
        self.files = ExtentFiles(directory, 0, EXTENT_BYTES)
        self.files.path(0).write_bytes(os.urandom(MIB) * (EXTENT_BYTES // MIB))
        self.extent: npt.NDArray[np.uint8] = np.memmap(self.files.path(0), np.uint8, "r+")
        self.store = ArenaStore({})
        config = TierConfig(TierId(0), "benchmarks.tier_process:ArenaStore", {}, self.files)
        self.tier = self.run(TierProcess.start(config, self._sink))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.tier.stop())
        self._loop.close()

    async def exists(self, count: int) -> None:
        order, answer = self._sink.expect()
        keys = [ScopedKeys(SCOPE, hashes(count))]
        assert self.tier.exists(order, keys, time.monotonic() + SECONDS)
        await answer

    async def copy(self, kind: str, count: int, size: int) -> None:
        order, answer = self._sink.expect()
        give = self.tier.read if kind == "read" else self.tier.write
        assert give(order, placed(count, size), time.monotonic() + SECONDS)
        await answer

    def seconds(self, work: Callable[[], Coroutine[Any, Any, None]], times: int) -> float:
        """Of one order, given one after the other."""

        async def repeat() -> float:
            began = time.perf_counter()
            for _ in range(times):
                await work()
            return time.perf_counter() - began

        return float(self.run(repeat())) / times

    def seconds_beside(self, work: Callable[[], Coroutine[Any, Any, None]], times: int) -> float:
        """Of one order, where AT_ONCE wait at a time."""

        async def repeat() -> float:
            began = time.perf_counter()
            for _ in range(times // AT_ONCE):
                await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            return time.perf_counter() - began

        return float(self.run(repeat())) / (times // AT_ONCE * AT_ONCE)

    def seconds_here(self, work: Callable[[], object], times: int) -> float:
        """Of one call in this process."""
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times

    def keys_here(self, count: int) -> list[TierKey]:
        raw = hashes(count).to_bytes()
        return [TierKey(SCOPE, raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES)]

    def blocks_here(self, count: int, size: int) -> list[TierBlock]:
        view = memoryview(self.extent)  # type: ignore[arg-type]
        parts = [view[at : at + size] for at in range(0, count * size, size)]
        return [TierBlock(k, (p,)) for k, p in zip(self.keys_here(count), parts, strict=True)]


@contextlib.contextmanager
def stand() -> Iterator[Stand]:
    """Both stores over one extent in memory."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir="/dev/shm"))
    made = Stand(directory)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory)


def questions(of: Stand, pairs: int) -> list[dict[str, Any]]:
    rows = []
    for count in KEYS:
        times = max(64, 4096 // count)

        def here(count: int = count, times: int = times) -> float:
            return of.seconds_here(
                lambda: of.store.exists(of.keys_here(count), time.monotonic() + SECONDS), times
            )

        def process(count: int = count, times: int = times) -> float:
            return of.seconds(lambda: of.exists(count), times)

        ours, theirs = report.interleaved(process, here, pairs)
        ask = functools.partial(of.exists, count)
        beside = [of.seconds_beside(ask, times) for _ in range(5)]
        rows.append(
            {
                "keys": count,
                "process_us": report.Spread.of([s * 1e6 for s in ours]),
                "here_us": report.Spread.of([s * 1e6 for s in theirs]),
                "process_many_at_once_us": report.Spread.of([s * 1e6 for s in beside]),
            }
        )
    return rows


def copies(of: Stand, pairs: int) -> list[dict[str, Any]]:
    rows = []
    for count, size in COPIES:
        for kind in ("write", "read"):
            times = max(4, (256 * MIB) // (count * size) // 8)
            call = of.store.write if kind == "write" else of.store.read

            def here(
                call: Callable[..., object] = call, count: int = count, size: int = size
            ) -> float:
                return of.seconds_here(
                    lambda: call(of.blocks_here(count, size), time.monotonic() + SECONDS),
                    times,  # noqa: B023 - called at once
                )

            def process(kind: str = kind, count: int = count, size: int = size) -> float:
                return of.seconds(lambda: of.copy(kind, count, size), times)  # noqa: B023 - likewise

            ours, theirs = report.interleaved(process, here, pairs)
            rows.append(
                {
                    "copy": kind,
                    "blocks": count,
                    "block_bytes": size,
                    "process_us": report.Spread.of([s * 1e6 for s in ours]),
                    "here_us": report.Spread.of([s * 1e6 for s in theirs]),
                    "process_gb_per_s": report.Spread.of([count * size / s / 1e9 for s in ours]),
                    "x_speed": report.ratios(theirs, ours),
                }
            )
    return rows


def main() -> None:
    """Print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with stand() as of:
        asked = questions(of, options.pairs)
        copied = copies(of, options.pairs)
    for rows in (asked, copied):
        print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
        print()
    report.write("tier_process", {"questions": asked, "copies": copied}, options.output)


if __name__ == "__main__":
    main()
