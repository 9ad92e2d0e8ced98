"""Classes of a disk with very many places: what a write looks at under the disk's lock."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvd.core.keys import Slots
from kvd.tiers.disk.size_class import DiskSizeClass

STRIDE = 4096


def filled(size_class: DiskSizeClass, regions: int) -> Slots:
    """So many regions of a class, full of blocks; their places."""
    for region in range(regions):
        size_class.add_region(region)
    places = size_class.take(regions * size_class.per_region)
    size_class.digests[places, 0] = places + 1
    size_class.scopes[places] = 1
    size_class.keep(places)
    size_class.pins[places] = 0
    return places


def test_a_write_that_finds_all_blocks_in_use_looks_at_those_of_its_size_alone() -> None:
    size_class = DiskSizeClass(STRIDE, 1 << 20, regions=1 << 16, policy="lru")
    places = filled(size_class, 1)
    size_class.pins[places[1:]] = 1
    tracemalloc.start()
    victims = size_class.evict(10)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(victims, places[:1])
    assert most < 1 << 20, f"{most} bytes, for {len(places)} places that there are"
