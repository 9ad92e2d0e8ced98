"""A tier's real process over a pool's extents, with a model of every byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.core.keys import KeyBatch, RowId
from kvd.processes.mappings import ExtentFiles
from kvd.tiers.process import (
    OrderEnd,
    OrderId,
    PlacedBlocks,
    QueueBounds,
    ScopedKeys,
    TierAnswer,
    TierConfig,
    TierId,
    TierLeft,
    TierProcess,
)
from kvd.tiers.store import Outcome, TierOptions, TierUsage
from tests.control.mover_rig import on_loop, proc_text

__all__ = ["on_loop", "proc_text"]

EXTENT_BYTES = 1 << 20
EXTENTS = 4
PART_BYTES = 8192
SHARDS = 2
PER_EXTENT = EXTENT_BYTES // PART_BYTES
SCOPE = bytes(range(32))
OTHER_SCOPE = bytes(range(32, 64))
HASH_BYTES = 20  # no multiple of 8
PATIENCE_S = 20.0
MEMORY = "tests.tiers.memory_store:MemoryStore"
BAD = "tests.tiers.bad_stores:"


class HeardByTierSink:
    """A TierSink that remembers, holds it to its promises, and wakes whoever waits."""

    def __init__(self) -> None:
        self.answers: dict[int, TierAnswer] = {}
        self.order: list[int] = []
        self.when: dict[int, float] = {}
        self.unmapped: list[int] = []
        self.usages: list[TierUsage] = []
        self.left: list[TierLeft] = []
        self.gone: list[str] = []
        self.living: set[int] = set()
        self._changed = asyncio.Event()

    def process_started(self, tier: TierId, pid: int, start_time: int) -> None:
        self.living.add(pid)

    def process_ended(self, tier: TierId, pid: int) -> None:
        self.living.remove(pid)

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:
        assert answer.order not in self.answers, "an order ended twice"
        assert not self.gone, "a word after the tier was gone"
        self.answers[answer.order] = answer
        self.order.append(answer.order)
        self.when[answer.order] = time.monotonic()
        self._changed.set()

    def row_unmapped(self, tier: TierId, row: RowId) -> None:
        assert not self.gone, "a word after the tier was gone"
        self.unmapped.append(row)
        self._changed.set()

    def usage_told(self, tier: TierId, usage: TierUsage) -> None:
        assert not self.gone, "a word after the tier was gone"
        self.usages.append(usage)
        self._changed.set()

    def left_told(self, tier: TierId, left: TierLeft) -> None:
        assert not self.gone, "a word after the tier was gone"
        self.left.append(left)
        self._changed.set()

    def tier_gone(self, tier: TierId, reason: str) -> None:
        assert not self.living, "the process was said to be gone before it ended"
        self.gone.append(reason)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what was heard fulfils the condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def answer(self, order: int) -> TierAnswer:
        await self.until(lambda: order in self.answers)
        return self.answers[order]

    async def outcomes(self, order: int) -> list[Outcome]:
        answer = await self.answer(order)
        assert answer.end is OrderEnd.ANSWERED, answer.reason
        return [Outcome(value) for value in answer.values.tolist()]


class TierRig:
    """One pool directory, and the tiers' processes over it."""

    def __init__(self, directory: Path) -> None:
        self.sink = HeardByTierSink()
        self.directory = directory
        self.signs = directory / "signs"
        self.files = ExtentFiles(directory / "extents", 0, EXTENT_BYTES)
        self.extents: list[npt.NDArray[np.uint8]] = []
        for number in range(EXTENTS):
            path = self.files.path(number)
            path.touch()
            os.truncate(path, EXTENT_BYTES)
            view = np.memmap(path, dtype=np.uint8, mode="r+")
            noise = np.random.default_rng(number).integers(0, 256, len(view), dtype=np.uint8)
            view[:] = noise
            self.extents.append(view)
        self.processes: list[TierProcess] = []
        self._last_order = 0

    def config(self, store: str = MEMORY, **options: str | float | bool) -> TierConfig:
        wanted: TierOptions = {"signs": str(self.signs), **options}
        return TierConfig(TierId(3), store, wanted, self.files, name="below")

    async def start(
        self,
        store: str = MEMORY,
        bounds: QueueBounds | None = None,
        **options: str | float | bool,
    ) -> TierProcess:
        process = await TierProcess.start(self.config(store, **options), self.sink, bounds)
        self.processes.append(process)
        return process

    def next_order(self) -> OrderId:
        self._last_order += 1
        return OrderId(self._last_order)

    async def signed(self, name: str) -> None:
        await until((self.signs / name).exists)

    def sign(self, name: str) -> None:
        (self.signs / name).touch()

    def part(self, slot: int, shard: int) -> npt.NDArray[np.uint8]:
        """The bytes of one part of a slot; shards lie in extents of their own."""
        extent, at = divmod(slot, PER_EXTENT)
        at *= PART_BYTES
        return self.extents[extent * SHARDS + shard][at : at + PART_BYTES]

    def content(self, slot: int) -> bytes:
        return b"".join(self.part(slot, shard).tobytes() for shard in range(SHARDS))


def hashes(numbers: Iterable[int]) -> KeyBatch:
    raw = b"".join(number.to_bytes(HASH_BYTES, "big") for number in numbers)
    return KeyBatch.from_bytes(raw, HASH_BYTES)


def keys(*numbers: int, scope: bytes = SCOPE) -> list[ScopedKeys]:
    return [ScopedKeys(scope, hashes(numbers))]


def placed(
    numbers: Iterable[int], slots: Iterable[int], scope: bytes = SCOPE
) -> list[PlacedBlocks]:
    """Blocks of these keys in these slots."""
    extent, ordinal = np.divmod(np.array(list(slots), dtype=np.int64), PER_EXTENT)
    extents = np.stack([extent * SHARDS + shard for shard in range(SHARDS)]).astype(np.uint32)
    offsets = np.stack([ordinal * PART_BYTES] * SHARDS).astype(np.uint64)
    return [PlacedBlocks(scope, hashes(numbers), extents, offsets, (PART_BYTES,) * SHARDS)]


def owed(tier: TierProcess) -> dict[str, int]:
    """Keys and blocks that were given and not answered, by the bound that they count for."""
    return {kind.name: share.whole for kind, share in tier._queued.items()}


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is so that nobody tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@contextlib.asynccontextmanager
async def tier_rig() -> AsyncIterator[TierRig]:
    """A rig whose processes and files are gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm"))
    for name in ("extents", "signs"):
        (directory / name).mkdir()
    made = TierRig(directory)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            await process.stop()
        shutil.rmtree(directory)
    for process in made.processes:
        assert not proc_text(process.pid, "stat"), "a tier's process is left"
    assert not made.sink.living, "the end of a process was not told"
    assert len(made.sink.gone) == len(made.processes)
    opened = [each for process in made.processes for each in process._given]
    assert not opened, "orders without an end"
