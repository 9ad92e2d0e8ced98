"""Where a rank of a probe engine keeps its KV, [layer, block, word]: in host memory or on a GPU."""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol

import numpy as np

from kvd_client import Fragment, GroupLayout, SharedMemory, Worker
from kvd_client.worker import DeviceSpan
from tests.client.content import Words
from tests.gpu.device_memory import DeviceMemory

LAYERS = 2


class KvMemory(Protocol):
    """A rank's blocks, which the engine writes and reads without the daemon."""

    def register(self, worker: Worker) -> None:
        """Offer it to the daemon."""

    def write(self, block: int, words: Words) -> None: ...

    def read(self, block: int) -> Words: ...

    def wipe(self, first: int, count: int) -> None:
        """Zeros into these blocks."""


class HostMemory:
    """In a memory file, which tests find by its name."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks, self._layer_bytes = num_blocks, block_bytes // LAYERS
        self._fd = os.memfd_create(name)
        os.ftruncate(self._fd, num_blocks * block_bytes)
        self._map = mmap.mmap(self._fd, num_blocks * block_bytes)
        kv = np.frombuffer(self._map, dtype=np.uint64)
        self._kv = kv.reshape(LAYERS, num_blocks, self._layer_bytes // 8)

    def register(self, worker: Worker) -> None:
        layer_bytes = self._layer_bytes
        fragments = [
            Fragment(0, layer * self._num_blocks * layer_bytes, layer_bytes, layer_bytes)
            for layer in range(LAYERS)
        ]
        memory = SharedMemory(self._fd, 0, LAYERS * self._num_blocks * layer_bytes)
        worker.register([memory], [GroupLayout(self._num_blocks, fragments)])

    def write(self, block: int, words: Words) -> None:
        self._kv[:, block] = words.reshape(LAYERS, -1)

    def read(self, block: int) -> Words:
        return self._kv[:, block].ravel()

    def wipe(self, first: int, count: int) -> None:
        self._kv[:, first : first + count] = 0


class GpuMemory:
    """An allocation for each layer on GPU 0, of one of device_memory.KINDS.

    Blocks lie apart: between any two are bytes that no copy may touch, and `read` checks them.
    """

    GAP_BYTES = 512
    CANARY = 0xA5

    def __init__(self, num_blocks: int, block_bytes: int, kind: str) -> None:
        self._memory = DeviceMemory()
        self._num_blocks, self._layer_bytes = num_blocks, block_bytes // LAYERS
        self._stride = self._layer_bytes + self.GAP_BYTES
        self._bytes = num_blocks * self._stride
        self._layers = [self._memory.allocate(self._bytes, kind) for _ in range(LAYERS)]
        for layer in self._layers:
            self._memory.write(layer, bytes([self.CANARY]) * self._bytes)

    def register(self, worker: Worker) -> None:
        spans = [DeviceSpan(layer, self._bytes) for layer in self._layers]
        fragments = [Fragment(layer, 0, self._stride, self._layer_bytes) for layer in range(LAYERS)]
        worker.register(spans, [GroupLayout(self._num_blocks, fragments)])

    def write(self, block: int, words: Words) -> None:
        for layer, part in zip(self._layers, words.reshape(LAYERS, -1), strict=True):
            self._memory.write(layer + block * self._stride, part.tobytes())

    def read(self, block: int) -> Words:
        parts = []
        for layer in self._layers:
            content = self._memory.read(layer + block * self._stride, self._stride)
            gap = content[self._layer_bytes :]
            assert set(gap) == {self.CANARY}, f"bytes behind block {block} were written"
            parts.append(np.frombuffer(content[: self._layer_bytes], dtype=np.uint64))
        return np.concatenate(parts)

    def wipe(self, first: int, count: int) -> None:
        for block in range(first, first + count):
            self.write(block, np.zeros(LAYERS * self._layer_bytes // 8, dtype=np.uint64))


def memory_of(order: dict[str, Any]) -> KvMemory:
    """The memory that the order of a probe's start asks for: "host", or a kind of GPU memory."""
    num_blocks, block_bytes = order["num_blocks"], order["block_bytes"]
    if order["memory"] == "host":
        return HostMemory(f"probe-{order['engine_id']}", num_blocks, block_bytes)
    return GpuMemory(num_blocks, block_bytes, order["memory"])
