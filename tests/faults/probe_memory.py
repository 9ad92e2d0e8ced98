"""Where a rank of a probe engine keeps its KV, [layer, block, word]."""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol

import numpy as np

from kvd_client import Fragment, GroupLayout, SharedMemory, Worker
from tests.faults.content import Words

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


def memory_of(order: dict[str, Any]) -> KvMemory:
    """The memory that the order of a probe's start asks for."""
    return HostMemory(f"probe-{order['engine_id']}", order["num_blocks"], order["block_bytes"])
