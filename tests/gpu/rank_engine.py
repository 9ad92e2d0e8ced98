"""The small engine with its KV on a GPU, in a worker process of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd_client import EngineIdentity, Fragment, GroupLayout, ScheduledRequest
from tests.client.small_engine import (
    FRAGMENT_BYTES,
    LAYERS,
    NUM_BLOCKS,
    TOKENS,
    Rank,
    SmallEngine,
    block_bytes,
)
from tests.daemon_process import DaemonProcess
from tests.gpu.driver import Driver
from tests.gpu.rank_process import RankProcess, words

LAYER_BYTES = NUM_BLOCKS * FRAGMENT_BYTES
GAP_BYTES = 512
CANARY = bytes([0xA5])
COUNT = 32
FRAGMENTS = [Fragment(layer, 0, FRAGMENT_BYTES, FRAGMENT_BYTES) for layer in range(LAYERS)]
GROUPS = [GroupLayout(NUM_BLOCKS, FRAGMENTS)]


class GpuRank(Rank):
    """A rank of the small engine whose KV is a worker process's, a stretch for each layer."""

    def __init__(self, process: RankProcess, layers: Sequence[int], rank: int) -> None:
        self.rank = rank
        self.worker = process  # type: ignore[assignment] # it has the calls that a step needs
        self.process = process
        self._layers = layers

    def compute(self, block: int, content: bytes) -> None:
        for layer, address in enumerate(self._layers):
            words_of_layer = block_bytes(content, layer, self.rank).tobytes()
            self.process.write(address + block * FRAGMENT_BYTES, words_of_layer)

    def holds(self, block: int, content: bytes) -> bool:
        return all(
            self.process.read(address + block * FRAGMENT_BYTES, FRAGMENT_BYTES)
            == block_bytes(content, layer, self.rank).tobytes()
            for layer, address in enumerate(self._layers)
        )

    def close(self) -> None:
        self.process.close_worker()


class GpuEngine(SmallEngine):
    """The small engine over one worker process, which has a Worker from the start."""

    def __init__(self, socket: str, process: RankProcess, layers: Sequence[int]) -> None:
        self._process, self._layers = process, layers
        super().__init__(socket)

    def make_rank(
        self, socket: str, identity: EngineIdentity, rank: int, world_size: int, flush_s: float
    ) -> Rank:
        self._process.make(socket, identity, rank, world_size)
        return GpuRank(self._process, self._layers, rank)

    def begin_store(self, prompt: str) -> list[bytes]:
        """Let COUNT blocks of a prompt be stored, and wait for nothing."""
        hashes = self.arrive(prompt, prompt, COUNT)
        table = list(range(COUNT))
        self.scheduler.update_state_after_alloc(prompt, [table], 0)
        self.compute(table, contents_of(hashes))
        self.step(ScheduledRequest(prompt, [table], COUNT * TOKENS))
        return hashes

    def begin_load(self, prompt: str) -> None:
        """Let COUNT blocks of a prompt be loaded into the first blocks, and wait for nothing."""
        self.arrive(f"load {prompt}", prompt, COUNT)
        found = self.match(f"load {prompt}")
        assert found == COUNT * TOKENS
        self.scheduler.update_state_after_alloc(f"load {prompt}", [list(range(COUNT))], found)
        self.step()


def contents_of(hashes: Sequence[bytes]) -> list[bytes]:
    """The contents of these blocks, one engine block each."""
    return [each + bytes([0]) for each in hashes]


@contextmanager
def running_daemon(driver: Driver) -> Iterator[DaemonProcess]:
    """A daemon over a pool of its own, which finds the driver."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-test."))
    pool = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm"))
    daemon = DaemonProcess(directory, pool)
    try:
        with driver.in_environment():
            daemon.start()
        yield daemon
        daemon.end()
    finally:
        daemon.kill()
        shutil.rmtree(directory)
        shutil.rmtree(pool)


@contextmanager
def engine_of(
    daemon: DaemonProcess, process: RankProcess, layers: Sequence[int], memories: Sequence[Any]
) -> Iterator[GpuEngine]:
    """An engine with this memory, usable."""
    engine = GpuEngine(daemon.socket, process, layers)
    try:
        assert process.register(memories, GROUPS) is None
        engine.wait_usable()
        yield engine
    finally:
        engine.close()


def layers_in_one_allocation(process: RankProcess) -> list[int]:
    """A stretch for each layer, with gaps around each that hold canaries."""
    stride = LAYER_BYTES + GAP_BYTES
    base = process.allocate(GAP_BYTES + LAYERS * stride)
    process.write(base, CANARY * (GAP_BYTES + LAYERS * stride))
    return [base + GAP_BYTES + layer * stride for layer in range(LAYERS)]


def check_gaps(process: RankProcess, layers: Sequence[int]) -> None:
    gaps = [layers[0] - GAP_BYTES, *(layer + LAYER_BYTES for layer in layers)]
    assert all(process.read(gap, GAP_BYTES) == CANARY * GAP_BYTES for gap in gaps)


def as_tensors(layers: Sequence[int]) -> list[dict[str, Any]]:
    """The layers as [blocks, elements] of two bytes each."""
    return [words(layer, (NUM_BLOCKS, FRAGMENT_BYTES // 2)) for layer in layers]


def as_spans(layers: Sequence[int]) -> list[tuple[int, int]]:
    return [(layer, LAYER_BYTES) for layer in layers]
