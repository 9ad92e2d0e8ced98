"""Classes of a disk with very many places: what a write looks at under the disk's lock."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np

from kvd.core.keys import Slots
from kvd.tiers.disk.size_class import NO_REGION, DiskSizeClass, PlaceState
from kvd.tiers.disk.space import DiskSpace

STRIDE = 4096
PLACES = 16  # of a region


class CountedLooks:
    """An array that counts how often somebody looks into it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.looks = 0

    def __getitem__(self, which: Any) -> Any:
        self.looks += 1
        return self.array[which]

    def __setitem__(self, which: Any, value: Any) -> None:
        self.array[which] = value


def keep(size_class: DiskSizeClass, places: Slots) -> None:
    """Blocks are written to these, which were taken."""
    size_class.digests[places, 0] = places + 1
    size_class.scopes[places] = 1
    size_class.keep(places)
    size_class.pins[places] = 0


def test_a_write_that_finds_all_blocks_in_use_looks_at_those_of_its_size_alone() -> None:
    size_class = DiskSizeClass(STRIDE, 1 << 20, regions=1 << 16, policy="lru")
    size_class.add_region(0)
    places = size_class.take(size_class.per_region)
    keep(size_class, places)
    size_class.pins[places[1:]] = 1
    tracemalloc.start()
    victims = size_class.evict(10)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(victims, places[:1])
    assert most < 1 << 20, f"{most} bytes, for {len(places)} places that there are"


def test_who_wants_a_region_looks_at_no_place_of_those_that_others_hold() -> None:
    regions = 1000
    space = DiskSpace(regions, PLACES * STRIDE, "lru", lambda *_: None)
    holds, wants = space.class_of(STRIDE), space.class_of(2 * STRIDE)
    assert holds is not None
    assert wants is not None
    places = space.take(holds, regions * PLACES)
    keep(holds, places)
    holds.take_out(places[::2])
    holds.free(places[::2])  # as after a clear: no region is empty, and many places are free
    counted: Any = CountedLooks(holds.states)
    holds.states = counted
    assert len(space.take(wants, 1)) == 1
    assert counted.looks < 10


def test_an_empty_region_is_found_whatever_came_and_went() -> None:
    draw = random.Random(157)
    size_class = DiskSizeClass(STRIDE, PLACES * STRIDE, regions=6, policy="lru")
    kept: set[int] = set()
    for _ in range(2000):
        held = np.flatnonzero(size_class.regions != NO_REGION).tolist()
        match draw.randrange(4):
            case 0 if size_class.may_grow:
                size_class.add_region(7 + draw.randrange(100))
            case 1:
                places = size_class.take(draw.randrange(2 * PLACES))
                keep(size_class, places)
                kept |= set(places.tolist())
            case 2 if kept:
                gone = np.array(draw.sample(sorted(kept), draw.randint(1, len(kept))))
                size_class.take_out(gone)
                size_class.free(gone)
                kept -= set(gone.tolist())
            case 3 if held:
                number = draw.choice(held)
                size_class.give_up(number)
                kept -= set(size_class.places_of(number).tolist())
        held = np.flatnonzero(size_class.regions != NO_REGION).tolist()
        ready = [size_class.states[size_class.places_of(n)] == PlaceState.READY for n in held]
        empty = [number for number, each in zip(held, ready, strict=True) if not each.any()]
        assert size_class.empty_region() == (empty[0] if empty else None)
        assert size_class.free_places == len(held) * PLACES - len(kept)
    free = size_class.take(6 * PLACES).tolist()
    assert len(set(free)) == len(free)
    assert kept.isdisjoint(free)
