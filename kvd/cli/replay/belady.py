"""Belady's MIN for prefix caches: the most that any policy could find, knowing the future.

MIN evicts what is used again last of all, and never keeps what is not used again. A request
uses all its blocks at once, before any of them is evicted, and a block may be let go at once,
without ever being kept. Then each pair of successive uses of a block is an interval that takes
one place, and dropping the interval that ends last whenever there are too many keeps the most
intervals: MIN finds the most blocks (Belady, IBM Systems Journal 5(2), 1966; as interval
packing, Faigle and Nawijn, 1995).

The ratio that matters counts only leading blocks: a block behind a hole is useless. A trace's
block stands for its whole prefix, so whoever uses it uses all blocks before it: no block is
used again before its head is. Of blocks used again at the same time the deepest goes first.
So MIN never keeps a block without its prefix, every block that it finds is a leading one, and
since no policy finds more blocks, none finds more leading ones. On a trace whose numbers do
not stand for prefixes the figure is only that of this policy, not a bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from kvd.cli.replay.trace import BlockIds, Progress, TraceRequest


def leading_hits(
    requests: Sequence[TraceRequest],
    capacity_blocks: int,
    progress: Progress = lambda _: None,
) -> Iterator[int]:
    """Leading blocks found by each request in a cache of so many blocks, in order of arrival."""
    next_uses = _next_uses(requests)
    kept: dict[int, int] = {}  # block -> request that uses it next
    leaving: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block); old ones stale
    for number, request in enumerate(requests):
        blocks = request.blocks.tolist()
        found = next((i for i, block in enumerate(blocks) if block not in kept), len(blocks))
        for depth, (block, use) in enumerate(zip(blocks, next_uses[number].tolist(), strict=True)):
            if use == len(requests):
                kept.pop(block, None)
                continue
            kept[block] = use
            heapq.heappush(leaving, (-use, -depth, block))
        while len(kept) > capacity_blocks:
            use, _, block = heapq.heappop(leaving)
            if kept.get(block) == -use:
                del kept[block]
        if len(leaving) > 2 * len(kept) + 65536:
            leaving = [mention for mention in leaving if kept.get(mention[2]) == -mention[0]]
            heapq.heapify(leaving)
        progress(number + 1)
        yield found


def _next_uses(requests: Sequence[TraceRequest]) -> list[BlockIds]:
    """For each block of each request the next request that uses it; their number for never."""
    sizes = [request.blocks.size for request in requests]
    blocks = np.concatenate([request.blocks for request in requests])
    users = np.repeat(np.arange(len(requests)), sizes)
    order = np.lexsort((users, blocks))
    following = np.full(blocks.size, len(requests), np.int64)
    same = blocks[order][1:] == blocks[order][:-1]
    following[order[:-1][same]] = users[order[1:][same]]
    return np.split(following, np.cumsum(sizes)[:-1])
