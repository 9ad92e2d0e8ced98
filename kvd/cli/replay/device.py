"""The engine's own KV memory in front of kvd, for a replay: vLLM's prefix cache by its rules.

A request finds the leading blocks that the device still holds, takes those out of the queue of
free places, and gets the first of that queue for the others. What such a place held is gone
then. At its end all its places go to the queue's end, the tail first: so a prompt's tail is given
away before its head (vLLM 0.32, `v1/core/block_pool.py` and `SingleTypeKVCacheManager.free`).

Requests come one after the other, each computed whole: none runs beside it, and what it
generates takes no place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

EAGER, LAZY, SECOND = "eager", "lazy", "second"
STORES = (EAGER, LAZY, SECOND)

Places = dict[int, None]


@dataclass(frozen=True, slots=True)
class StoreRule:
    """What is stored: of what, and when."""

    threshold: int = 1  # the time it comes for
    device_blocks: int = 0  # that the engine keeps itself, before the pool
    store: str = EAGER

    @classmethod
    def of(cls, device_blocks: int, store: str, threshold: int = 1) -> StoreRule:
        """SECOND is what the daemon's filter does from a threshold of two on."""
        return cls(max(2, threshold) if store == SECOND else threshold, device_blocks, store)


EVERYTHING = StoreRule()


class DeviceMemory:
    """Which blocks so many places hold, and which of them a request would get next."""

    def __init__(self, places: int) -> None:
        self._fresh = places  # that were never used: they come first, and take no memory until then
        self._held: list[int] = []  # by place that was used: its block
        self._places: dict[int, Places] = {}  # of each block; several where two computed it
        self._free: OrderedDict[int, None] = OrderedDict()
        self._used: list[int] = []  # places of the request that runs, head first

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of the leading blocks are there."""
        return next((i for i, block in enumerate(blocks) if block not in self._places), len(blocks))

    def begin(self, blocks: Sequence[int]) -> list[int]:
        """Run a request over these; the blocks that leave for it, the first to leave first."""
        assert not self._used, "one request runs at a time"
        found = self.leading(blocks)
        for block in blocks[:found]:
            place = next(iter(self._places[block]))
            del self._free[place]
            self._used.append(place)
        left = []
        for block in blocks[found:]:
            if self._fresh:
                self._fresh -= 1
                place = len(self._held)
                self._held.append(block)
            else:
                place, _ = self._free.popitem(last=False)
                before, self._held[place] = self._held[place], block
                left.append(before)
                self._forget(before, place)
            self._places.setdefault(block, {})[place] = None
            self._used.append(place)
        return left

    def end(self) -> None:
        """The request has ended: its places are free, and keep their blocks until given away."""
        for place in reversed(self._used):
            self._free[place] = None
        self._used.clear()

    def _forget(self, block: int, place: int) -> None:
        places = self._places[block]
        del places[place]
        if not places:
            del self._places[block]
