"""A second process with the mover's own CopyEngine, without daemon or protocol around it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.probing.probe_process import serve
from kvd.core.events import JobKind
from kvd.core.keys import MoverId
from kvd.mover.child import open_engine
from kvd.mover.copy_engine import CopyEngine
from kvd.mover.layout import (
    CudaRegion,
    FragmentSpec,
    GpuConfig,
    GroupMap,
    LocatedPart,
    MoverConfig,
)
from kvd.processes.mappings import ExtentFiles

KINDS = {"store": JobKind.STORE, "load": JobKind.LOAD}
ALL, FIRST_HALF, SECOND_HALF = (0.0, 1.0), (0.0, 0.5), (0.5, 1.0)


def halves(kinds: list[str]) -> dict[str, tuple[float, float]]:
    """Which share of the blocks each direction moves: all, or a half each when there are two."""
    return {kinds[0]: ALL} if len(kinds) == 1 else {"store": FIRST_HALF, "load": SECOND_HALF}


class MoverSide:
    """Orders of the benchmark; see benchmarks.gpu.probing.probe_process for how they come."""

    def __init__(self) -> None:
        self._engine: CopyEngine | None = None
        self._parts: dict[tuple[str, tuple[float, float]], LocatedPart] = {}

    def open(self, memory: dict[str, Any], pool: dict[str, Any]) -> dict[str, Any]:
        """Open the engine's memory and the pool's extents, and register these.

        memory: handle, offset, bytes, uuid, block_bytes, fragments. pool: directory,
        extent_bytes, extents. Answers the copier, and what could not be pinned.
        """
        block_bytes, fragments = memory["block_bytes"], memory["fragments"]
        blocks, size = memory["bytes"] // block_bytes, block_bytes // fragments
        specs = tuple(FragmentSpec(0, f * blocks * size, size, size) for f in range(fragments))
        handle = bytes.fromhex(memory["handle"])
        config = MoverConfig(
            MoverId(1),
            (CudaRegion(memory["offset"], memory["bytes"], handle),),
            (GroupMap(blocks, 1, block_bytes, specs),),
            ExtentFiles(Path(pool["directory"]) / "extents", 0, pool["extent_bytes"]),
            gpu=GpuConfig(memory["uuid"]),
        )
        self._engine = open_engine(config)
        began = time.perf_counter()
        for extent in range(pool["extents"]):
            self._engine.open_extent(extent)
            self._engine.warm_extent(extent, lambda: True)
        seconds = time.perf_counter() - began
        for kind in KINDS:
            for share in (ALL, FIRST_HALF, SECOND_HALF):
                cut = slice(int(blocks * share[0]), int(blocks * share[1]))
                self._parts[kind, share] = _part(blocks, block_bytes, pool["extent_bytes"], cut)
        facts = self._engine.facts
        assert facts.gpu is not None
        return {
            "transport": facts.transport,
            "copier": facts.copier,
            "unregistered_extents": facts.gpu.unregistered_extents,
            "context_bytes": facts.gpu.context_bytes,
            "register_seconds": seconds,
        }

    def copy(self, kinds: list[str]) -> float:
        """Seconds until every block has been moved: each direction in a thread of its own."""
        shares = halves(kinds)
        began = time.perf_counter()
        self._at_once([lambda told=told: self._move(*told) for told in shares.items()])
        return time.perf_counter() - began

    def copy_for(self, kinds: list[str], seconds: float) -> dict[str, float]:
        """Move blocks over and over for that long; bytes a second of each direction."""
        speeds: dict[str, float] = {}
        shares = halves(kinds)

        def run(kind: str) -> None:
            began, moved = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                moved += self._move(kind, shares[kind])
            speeds[kind] = moved / (time.perf_counter() - began)

        self._at_once([lambda kind=kind: run(kind) for kind in kinds])
        return speeds

    def copy_one_block(self, kind: str, count: int) -> list[float]:
        """Seconds of each of `count` copies of a single block."""
        assert self._engine is not None
        found = []
        for number in range(count):
            part = self._parts[kind, ALL]
            one = part.rows(slice(number % len(part.extents), number % len(part.extents) + 1))
            began = time.perf_counter()
            self._engine.copy(KINDS[kind], one, lambda: True)
            found.append(time.perf_counter() - began)
        return found

    def finish(self) -> int:
        """Close all; bytes that had to go through staging."""
        assert self._engine is not None
        gpu = self._engine.facts.gpu
        self._engine.close()
        return 0 if gpu is None else gpu.staged_bytes

    def _move(self, kind: str, share: tuple[float, float]) -> int:
        assert self._engine is not None
        return self._engine.copy(KINDS[kind], self._parts[kind, share], lambda: True)

    @staticmethod
    def _at_once(acts: list[Any]) -> None:
        """Run them in threads, one of them here; raise what the first that failed raised."""
        failures: list[BaseException] = []

        def guarded(act: Any) -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(act,)) for act in acts[1:]]
        for thread in threads:
            thread.start()
        guarded(acts[0])
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def _part(blocks: int, block_bytes: int, extent_bytes: int, cut: slice) -> LocatedPart:
    """Blocks `cut` of a shuffle of all: neither engine blocks nor slots lie side by side."""
    shuffle = np.random.default_rng(3)
    ids = shuffle.permutation(blocks).astype(np.uint32)[cut]
    slots = shuffle.permutation(blocks)[cut]
    per_extent = extent_bytes // block_bytes
    extents = (slots // per_extent).astype(np.uint32)
    offsets = (slots % per_extent * block_bytes).astype(np.uint64)
    return LocatedPart(0, extents, offsets, ids.reshape(-1, 1))


if __name__ == "__main__":
    serve(MoverSide())
