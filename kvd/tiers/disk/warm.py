"""What an index file said, laid into the classes: the blocks that a disk begins with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.core.keys import U64
from kvd.tiers.disk.identity import home_of
from kvd.tiers.disk.index_file import DIGEST, NUMBERS, PLACE, SEAL, STAMP, Known
from kvd.tiers.disk.options import ALIGN
from kvd.tiers.disk.slab import HEADER_BYTES
from kvd.tiers.disk.space import DiskSpace

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


def fill(
    space: DiskSpace, known: Known, strides: dict[int, int], seeds: Sequence[int], own: int
) -> U64:
    """Have the classes hold what the rows say; the rows that say what can't be are given back.

    `strides` gives a block's size on the disk by the number of its lengths; `own` is this disk's
    place among the `seeds`.
    """
    rows = known.rows
    rows = rows[np.argsort(rows[:, STAMP], kind="stable")[::-1]]  # the last used first
    lengths = (rows[:, NUMBERS] >> _HIGH).astype(np.int64)
    scopes = (rows[:, NUMBERS] & _LOW).astype(np.int64)
    stride = np.zeros(len(rows), dtype=np.int64)
    for number in np.unique(lengths).tolist():
        stride[lengths == number] = strides.get(number, 0)
    starts = rows[:, PLACE].astype(np.int64) * ALIGN - HEADER_BYTES
    region, within = np.divmod(starts, space.region_bytes)
    cut = np.maximum(stride, 1)
    fits = (stride > 0) & (within % cut == 0) & (within + stride <= space.region_bytes)
    # The last place of a region that is no whole one belongs to nobody.
    fits &= within // cut < space.region_bytes // cut
    fits &= (region >= 0) & (region < space.regions)
    fits &= np.isin(scopes, np.fromiter(known.scopes, dtype=np.int64, count=len(known.scopes)))
    fits &= home_of(rows[:, DIGEST], seeds) == own
    fits &= _first_of_each(rows[:, 0]) & _first_of_each(rows[:, PLACE])
    fits &= _alone_in_its_region(region, stride, fits, space.regions)
    for size in np.unique(stride[fits]).tolist():
        chosen = fits & (stride == size)
        _lay(space, size, rows[chosen], region[chosen], within[chosen])
    wrong: U64 = rows[~fits]
    return wrong


def _lay(space: DiskSpace, stride: int, rows: U64, region: np.ndarray, within: np.ndarray) -> None:
    size_class = space.class_of(stride)
    assert size_class is not None
    held, order = np.unique(region, return_inverse=True)
    most = len(size_class.regions)
    if len(held) > most:  # the bound of places was lowered: the others are misses
        inside = order < most
        rows, within, order, held = rows[inside], within[inside], order[inside], held[:most]
    space.assign(size_class, held)
    places = order * size_class.per_region + within // stride
    size_class.digests[places] = rows[:, DIGEST]
    size_class.seals[places] = rows[:, SEAL]
    size_class.scopes[places] = (rows[:, NUMBERS] & _LOW).astype(np.uint32)
    size_class.lengths[places] = (rows[:, NUMBERS] >> _HIGH).astype(np.uint32)
    size_class.stamps[places] = rows[:, STAMP].astype(np.uint32)
    size_class.keep(places)
    size_class.free_the_rest()


def _first_of_each(values: U64) -> np.ndarray:
    first = np.zeros(len(values), dtype=np.bool_)
    first[np.unique(values, return_index=True)[1]] = True
    return first


def _alone_in_its_region(
    region: np.ndarray, stride: np.ndarray, fits: np.ndarray, regions: int
) -> np.ndarray:
    """Not in a region that rows claim for two sizes."""
    least = np.full(regions, np.iinfo(np.int64).max)
    most = np.zeros(regions, dtype=np.int64)
    np.minimum.at(least, region[fits], stride[fits])
    np.maximum.at(most, region[fits], stride[fits])
    alone = np.zeros(len(region), dtype=np.bool_)
    alone[fits] = (least == most)[region[fits]]
    return alone
