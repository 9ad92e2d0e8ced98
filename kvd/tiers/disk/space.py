"""Which region of the slab is whose, and who leaves where there is no room."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvd.core.keys import Slots
from kvd.tiers.disk.size_class import NO_REGION, DiskSizeClass, PlaceState

MAX_SIZES = 256  # classes of one disk
Left = Callable[[DiskSizeClass, Slots], None]


class DiskSpace:
    """The classes of one disk, by the size of their blocks. Callers hold the disk's lock.

    `left` hears of every block that had to leave, before its place can be another's.
    """

    def __init__(self, regions: int, region_bytes: int, policy: str, left: Left) -> None:
        self.region_bytes = region_bytes
        self.regions = regions
        self.classes: dict[int, DiskSizeClass] = {}
        self.evicted = 0
        self._policy, self._left = policy, left
        self._unused = list(range(regions - 1, -1, -1))

    def class_of(self, stride: int) -> DiskSizeClass | None:
        """The class for blocks of that size, made where there is none; None: there can't be one."""
        found = self.classes.get(stride)
        if found is not None or not 0 < stride <= self.region_bytes:
            return found
        if len(self.classes) >= MAX_SIZES:
            self._give_up_least()
        if len(self.classes) < MAX_SIZES:
            found = DiskSizeClass(stride, self.region_bytes, self.regions, self._policy)
            self.classes[stride] = found
        return found

    def assign(self, size_class: DiskSizeClass, regions: Slots) -> None:
        """Give these regions to a class at the start, as the index says."""
        taken = set(regions.tolist())
        self._unused = [region for region in self._unused if region not in taken]
        size_class.begin_with(regions)

    def take(self, size_class: DiskSizeClass, count: int) -> Slots:
        """Places for `count` blocks, or for as many as there can be room for; ascending."""
        while size_class.free_places < count and size_class.may_grow:
            region = self._unused.pop() if self._unused else self._from_others(size_class)
            if region is None:
                break
            size_class.add_region(region)
        missing = count - size_class.free_places
        if missing > 0:
            victims = size_class.evict(missing)
            self._note(size_class, victims)
            size_class.free(victims)
        return size_class.take(count)

    def _from_others(self, wanting: DiskSizeClass) -> int | None:
        """A region of another class, all of which is idler than the wanting class's own blocks."""
        own = wanting.coldest()
        own_stamp = None if own is None else int(wanting.stamps[own])
        best: tuple[int, DiskSizeClass, int] | None = None
        for other in self.classes.values():
            found = None if other is wanting else _idle_region(other)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], other, found[1])
        if best is None or (own_stamp is not None and best[0] >= own_stamp):
            return None
        _, other, number = best
        # The class tells who left while it still knows where they lay.
        places = other.places_of(number)
        self._note(other, places[other.states[places] != 0])
        region = other.give_up(number)
        if not (other.regions != NO_REGION).any():
            del self.classes[other.stride]
        return region

    def _give_up_least(self) -> None:
        """Let go of the class with the fewest blocks of those in which nobody reads or writes."""
        for least in sorted(self.classes.values(), key=len):
            states = least.states[least.in_use()]
            ready = np.flatnonzero(states == PlaceState.READY)
            idle = len(ready) == np.count_nonzero(states) and not least.pins[ready].any()
            if idle:
                self._note(least, ready)
                self._unused += np.sort(least.give_up_all())[::-1].tolist()
                del self.classes[least.stride]
                return

    def _note(self, size_class: DiskSizeClass, places: Slots) -> None:
        if places.size:
            self.evicted += int(places.size)
            self._left(size_class, places)


def _idle_region(size_class: DiskSizeClass) -> tuple[int, int] | None:
    """When a region was last used that may be given up, and its number; an empty one if any."""
    empty = size_class.empty_region()
    if empty is not None:
        return -1, empty
    place = size_class.coldest()
    if place is None:
        return None
    number = place // size_class.per_region
    if not size_class.may_give_up(number):
        return None
    return int(size_class.stamps[size_class.places_of(number)].max()), number
