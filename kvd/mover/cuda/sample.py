"""A small copy that is like a rank's own: what a calibration measures. No CUDA here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart

MOST_BYTES = 8 << 20  # on either side
_MOST_STRETCHES = 1024  # a call for each takes the processor milliseconds
_WANTED_BLOCKS = 16
_LEAST_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """Scattered engine blocks of one group, small enough for a scratch buffer on either side.

    The fragments' regions all begin where the device's buffer does.
    """

    group: GroupMap
    part: LocatedPart  # in one extent, from its beginning on
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class _Plane:
    """Fragments that lie within one stride of each other, so in memory of their own: those of
    one layer, or of all layers where these lie side by side. By their numbers in the group."""

    region: int
    base: int
    stride: int
    fragments: tuple[int, ...]


def sample_of(groups: Sequence[GroupMap]) -> Sample:
    """Some blocks of the group that has the largest, with as many layers as there is room for.

    Widths, strides, and the even steps from layer to layer are the group's own; a block that is
    too large by itself is narrowed.
    """
    group = max(groups, key=lambda each: each.engine_block_bytes)
    fragments, planes = _narrowed(group.fragments, _planes(group.fragments))
    kept = _those_with_room(planes)
    together = sum(plane.stride for plane in kept)
    numbers = sorted(number for plane in kept for number in plane.fragments)
    blocks = min(MOST_BYTES // together, max(_LEAST_BLOCKS, _MOST_STRETCHES // len(numbers)))
    laid = _laid(fragments, kept, blocks)
    block_bytes = sum(fragment.bytes for fragment in laid)
    if block_bytes * blocks > MOST_BYTES:  # fragments that overlap: one stands for all
        laid, block_bytes = laid[:1], laid[0].bytes
    sample = GroupMap(blocks, 1, block_bytes, tuple(laid))
    return Sample(sample, _scattered(sample), together * blocks, block_bytes * blocks)


def _planes(fragments: Sequence[FragmentSpec]) -> list[_Plane]:
    """In the order of their first fragments."""
    by_place = sorted(
        range(len(fragments)),
        key=lambda n: (fragments[n].region, fragments[n].stride, fragments[n].base),
    )
    planes: list[_Plane] = []
    for number in by_place:
        fragment = fragments[number]
        last = planes[-1] if planes else None
        if (
            last is not None
            and (last.region, last.stride) == (fragment.region, fragment.stride)
            and fragment.base + fragment.bytes <= last.base + last.stride
        ):
            planes[-1] = replace(last, fragments=(*last.fragments, number))
        else:
            planes.append(_Plane(fragment.region, fragment.base, fragment.stride, (number,)))
    return sorted(planes, key=lambda plane: min(plane.fragments))


def _narrowed(
    fragments: Sequence[FragmentSpec], planes: list[_Plane]
) -> tuple[Sequence[FragmentSpec], list[_Plane]]:
    """As given, unless the first plane alone is too large: then what is near its beginning."""
    first, most = planes[0], MOST_BYTES // _LEAST_BLOCKS
    if first.stride <= most:
        return fragments, planes
    near = [
        replace(fragment, stride=most)
        for fragment in (fragments[number] for number in first.fragments)
        if fragment.base + fragment.bytes <= first.base + most
    ]
    near = near or [FragmentSpec(first.region, first.base, most, most)]
    return near, [replace(first, stride=most, fragments=tuple(range(len(near))))]


def _those_with_room(planes: list[_Plane]) -> list[_Plane]:
    """The first, and those after it that leave room for the wanted blocks."""
    kept = planes[:1]
    together = kept[0].stride
    for plane in planes[1:]:
        together += plane.stride
        if together * _WANTED_BLOCKS > MOST_BYTES:
            break
        kept.append(plane)
    return kept


def _laid(
    fragments: Sequence[FragmentSpec], planes: list[_Plane], blocks: int
) -> list[FragmentSpec]:
    """The planes' fragments in their order, with the planes close together."""
    moves: dict[int, int] = {}
    start = 0
    for plane in sorted(planes, key=lambda each: (each.region, each.base)):
        moves.update(dict.fromkeys(plane.fragments, start - plane.base))
        start += plane.stride * blocks
    return [
        replace(fragments[number], base=fragments[number].base + moves[number])
        for number in sorted(moves)
    ]


def _scattered(group: GroupMap) -> LocatedPart:
    """All blocks, in an order in which no two that follow each other are adjacent."""
    blocks = group.num_blocks
    return LocatedPart(
        0,
        np.zeros(blocks, dtype=np.uint32),
        np.arange(blocks, dtype=np.uint64) * np.uint64(group.part_bytes),
        np.arange(blocks, dtype=np.uint32)[::-1].reshape(blocks, 1).copy(),
    )
