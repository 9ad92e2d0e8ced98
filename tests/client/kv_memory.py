"""Where a rank of a small engine keeps its KV, [layer, block, word]: in host memory or on a GPU."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd_client import Fragment, GroupLayout, SharedMemory, Worker
from kvd_client.worker import DeviceSpan
from tests.client.content import Words
from tests.gpu.device_memory import DeviceMemory

HOST = "host"  # the kind of memory that is no GPU's


class KvMemory(Protocol):
    """A rank's blocks, which the engine writes and reads without the daemon."""

    def register(self, worker: Worker) -> None:
        """Offer it to the daemon."""

    def write(self, block: int, words: Words) -> None: ...

    def read(self, block: int) -> Words: ...

    def wipe(self, first: int, count: int) -> None:
        """Zeros into these blocks."""

    def close(self) -> None:
        """Give it back, once no mover has it."""


class HostMemory:
    """In a memory file, which tests find by its name."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int, layers: int) -> None:
        self._num_blocks, self._layer_bytes = num_blocks, block_bytes // layers
        self._bytes = num_blocks * block_bytes
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self._bytes)
        self._map = mmap.mmap(self._fd, self._bytes)
        words = np.frombuffer(self._map, dtype=np.uint64)
        self.kv: npt.NDArray[np.uint64] = words.reshape(layers, num_blocks, self._layer_bytes // 8)

    def register(self, worker: Worker) -> None:
        size = self._layer_bytes
        fragments = [
            Fragment(0, layer * self._num_blocks * size, size, size)
            for layer in range(len(self.kv))
        ]
        memory = SharedMemory(self._fd, 0, self._bytes)
        worker.register([memory], [GroupLayout(self._num_blocks, fragments)])

    def write(self, block: int, words: Words) -> None:
        self.kv[:, block] = words.reshape(len(self.kv), -1)

    def read(self, block: int) -> Words:
        return self.kv[:, block].flatten()

    def wipe(self, first: int, count: int) -> None:
        self.kv[:, first : first + count] = 0

    def close(self) -> None:
        del self.kv
        self._map.close()
        os.close(self._fd)


class GpuMemory:
    """An allocation for each layer on GPU 0, of one of device_memory.KINDS.

    Blocks lie apart: between any two are bytes that no copy may touch, and `read` checks them.
    """

    GAP_BYTES = 512
    CANARY = 0xA5

    def __init__(self, num_blocks: int, block_bytes: int, layers: int, kind: str) -> None:
        self._memory = DeviceMemory()
        self._num_blocks, self._layer_bytes = num_blocks, block_bytes // layers
        self._stride = self._layer_bytes + self.GAP_BYTES
        self._bytes = num_blocks * self._stride
        self._layers = [self._memory.allocate(self._bytes, kind) for _ in range(layers)]
        for layer in self._layers:
            self._memory.write(layer, bytes([self.CANARY]) * self._bytes)

    def register(self, worker: Worker) -> None:
        spans = [DeviceSpan(layer, self._bytes) for layer in self._layers]
        fragments = [
            Fragment(layer, 0, self._stride, self._layer_bytes)
            for layer in range(len(self._layers))
        ]
        worker.register(spans, [GroupLayout(self._num_blocks, fragments)])

    def write(self, block: int, words: Words) -> None:
        for layer, part in zip(self._layers, words.reshape(len(self._layers), -1), strict=True):
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
            self.write(block, np.zeros(len(self._layers) * self._layer_bytes // 8, dtype=np.uint64))

    def close(self) -> None:
        """Its process owns it."""
