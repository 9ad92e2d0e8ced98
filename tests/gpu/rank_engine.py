"""The small engine with its KV on a GPU, in a worker process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from kvd_client import EngineIdentity, Fragment, GroupLayout, Worker
from tests.client.content import TOKENS, Words
from tests.client.small_engine import Rank, SmallEngine
from tests.daemon_process import DaemonProcess
from tests.faults.scene import scenes
from tests.gpu.driver import Driver
from tests.gpu.rank_process import RankProcess, words

LAYERS = 2
NUM_BLOCKS = 256
FRAGMENT_BYTES = 2048  # of a block in a layer
LAYER_BYTES = NUM_BLOCKS * FRAGMENT_BYTES
GAP_BYTES = 512
CANARY = bytes([0xA5])
COUNT = 32
FRAGMENTS = [Fragment(layer, 0, FRAGMENT_BYTES, FRAGMENT_BYTES) for layer in range(LAYERS)]
GROUPS = [GroupLayout(NUM_BLOCKS, FRAGMENTS)]


class ProcessMemory:
    """KV that lies in a worker process, a stretch for each layer; whoever has it registers it."""

    def __init__(self, process: RankProcess, layers: Sequence[int]) -> None:
        self._process, self._layers = process, layers

    def register(self, worker: object) -> None:
        """Left to the test."""

    def write(self, block: int, words: Words) -> None:
        for address, part in zip(self._layers, words.reshape(LAYERS, -1), strict=True):
            self._process.write(address + block * FRAGMENT_BYTES, part.tobytes())

    def read(self, block: int) -> Words:
        places = [address + block * FRAGMENT_BYTES for address in self._layers]
        content = b"".join(self._process.read(place, FRAGMENT_BYTES) for place in places)
        return np.frombuffer(content, dtype=np.uint64)

    def wipe(self, first: int, count: int) -> None:
        for address in self._layers:
            self._process.write(address + first * FRAGMENT_BYTES, bytes(count * FRAGMENT_BYTES))

    def close(self) -> None:
        """Its process owns it."""


class GpuRank(Rank):
    """A rank whose worker is another process's."""

    def __init__(self, rank: int, process: RankProcess, layers: Sequence[int]) -> None:
        self._process = process
        worker = cast("Worker", process)  # it has the calls that a step needs
        super().__init__(rank, worker, ProcessMemory(process, layers))

    def close(self) -> None:
        self._process.close_worker()


class GpuEngine(SmallEngine):
    """The small engine over one worker process, which has a Worker from the start."""

    def __init__(self, socket: str, process: RankProcess, layers: Sequence[int]) -> None:
        self._process, self._layers = process, layers
        super().__init__(socket, layers=LAYERS, num_blocks=NUM_BLOCKS)

    def make_rank(self, socket: str, identity: EngineIdentity, rank: int) -> Rank:
        self._process.make(socket, identity, rank, self.settings.world_size)
        return GpuRank(rank, self._process, self._layers)

    def begin_load(self, prompt: str) -> None:
        """Let COUNT blocks of a prompt be loaded into the first blocks, and wait for nothing."""
        self.arrive(f"load {prompt}", prompt, COUNT)
        found = self.match(f"load {prompt}")
        assert found == COUNT * TOKENS
        self.start_load(f"load {prompt}", found, self.table(COUNT, 0))


@contextmanager
def running_daemon(driver: Driver) -> Iterator[DaemonProcess]:
    """A daemon over a pool of its own, which finds the driver."""
    with scenes() as make:
        daemon = make(starts=False).daemon
        with driver.in_environment():
            daemon.start()
        yield daemon
        daemon.end()


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
