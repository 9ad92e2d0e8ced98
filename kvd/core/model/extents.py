"""Extents that no row owns, by the memory node that they lie on."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator

from kvd.core.keys import NODE_UNKNOWN


class FreeExtents:
    """The lowest number goes first: of the node asked for, else of all."""

    def __init__(self, extents: int, nodes: tuple[int, ...] = ()) -> None:
        """`nodes`: of each extent; empty: there is one, and nobody need ask for it."""
        assert len(nodes) in {0, extents}, "not every extent has a node"
        self._nodes = nodes
        # Heaps; whole and ascending at first, and so still while rows are read back.
        self._by_node: dict[int, list[int]] = {node: [] for node in nodes or (NODE_UNKNOWN,)}
        for extent in range(extents):
            self._heap_of(extent).append(extent)

    def __len__(self) -> int:
        return sum(map(len, self._by_node.values()))

    def __iter__(self) -> Iterator[int]:
        for heap in self._by_node.values():
            yield from heap

    @property
    def is_numa(self) -> bool:
        """Whether it makes a difference which extent somebody gets."""
        return len(self._by_node) > 1

    def take(self, node: int = NODE_UNKNOWN) -> int:
        """The lowest free extent of that node, or of any where it has none or none is asked for.

        There must be one.
        """
        heap = self._by_node.get(node)
        if not heap:
            heap = min(filter(None, self._by_node.values()), key=lambda each: each[0])
        return heapq.heappop(heap)

    def take_recovered(self, extent: int) -> None:
        """That very extent, while a pool is read back: before any other was taken or put back."""
        heap = self._heap_of(extent)
        place = bisect_left(heap, extent)
        assert heap[place : place + 1] == [extent], f"extent {extent} isn't free"
        del heap[place]

    def put(self, extent: int) -> None:
        heapq.heappush(self._heap_of(extent), extent)

    def check(self) -> None:
        """Raise AssertionError unless every extent lies in the heap of its own node."""
        for node, heap in self._by_node.items():
            assert all(self._heap_of(e) is heap for e in heap), f"another node's extent at {node}"

    def _heap_of(self, extent: int) -> list[int]:
        return self._by_node[self._nodes[extent] if self._nodes else NODE_UNKNOWN]
