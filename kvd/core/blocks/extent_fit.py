"""How well blocks fill extents: the room that is lost, and the sizes that lose little.

A slot's part lies in one extent, so what the parts leave at an extent's end is nobody's. And a row
takes a whole extent for each shard, so a pool of too few extents has no row for every group.
"""

from __future__ import annotations

from kvd.core.blocks.row_grants import slots_per_row
from kvd.core.errors import ExtentWaste, TooFewExtents
from kvd.core.model.size_class import MIN_SLOT_BYTES
from kvd.core.model.state import State
from kvd.core.spec import GroupSpec, NamespaceSpec

WASTE_DIVISOR = 10  # at most 1/10 of an extent may be lost


def wasted_share(group: GroupSpec, extent_bytes: int) -> float:
    """Of the extents of the group's rows, the share that no block uses, for whatever cause."""
    used = slots_per_row(group, extent_bytes) * group.block_bytes
    return 1 - used / (extent_bytes * len(group.part_bytes))


def require_fit(state: State, spec: NamespaceSpec) -> None:
    """Raise, with figures and the setting, where extents of another size would do better.

    ExtentWaste where more than a tenth is lost behind a group's largest parts. What is lost to
    parts under MIN_SLOT_BYTES and to shards that differ is not: no extent's size helps there.
    TooFewExtents where there is no row for each group at once. Only for namespaces that are new:
    what a pool holds already goes on being served.
    """
    extent_bytes, extents = state.config.extent_bytes, state.config.extents
    needed = sum(len(group.shard_bytes) for group in spec.groups)
    for number, group in enumerate(spec.groups):
        if not _fits(group, extent_bytes):
            part = max(group.part_bytes)
            lost = extent_bytes - extent_bytes // part * part
            raise ExtentWaste(
                f"a block's part of {part} bytes leaves {lost} bytes of each extent of"
                f" {size(extent_bytes)} unused, {lost / extent_bytes:.1%}, more than a tenth:"
                f" start the daemon with {_better_size(state, spec, needed)}",
                f"groups[{number}]",
            )
    if needed > extents:
        raise TooFewExtents(
            f"{len(spec.groups[0].shard_bytes)} shards of {len(spec.groups)} groups need {needed}"
            f" extents, the pool has {extents} of {size(extent_bytes)}: start the daemon with"
            f" {_more_extents(state, spec, needed)}",
            "groups",
        )


def fitting_size(groups: tuple[GroupSpec, ...], least: int = MIN_SLOT_BYTES) -> int:
    """The smallest power of two, from `least`, in which no group loses more than a tenth."""
    found = 1 << (max(least, MIN_SLOT_BYTES) - 1).bit_length()
    while not all(_fits(group, found) for group in groups):
        found *= 2
    return found


def size(count: int) -> str:
    """As the settings take it: 64MiB."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count and not count % (1 << shift):
            return f"{count >> shift}{unit}"
    return str(count)


def _fits(group: GroupSpec, extent_bytes: int) -> bool:
    """Whether the largest parts leave at most a tenth of an extent, or are too small to matter."""
    part = max(group.part_bytes)
    if part < MIN_SLOT_BYTES:
        return extent_bytes >= MIN_SLOT_BYTES
    return part_fits(part, extent_bytes)


def part_fits(part_bytes: int, extent_bytes: int) -> bool:
    """Whether such parts leave at most a tenth of an extent."""
    return extent_bytes >= part_bytes and extent_bytes % part_bytes * WASTE_DIVISOR <= extent_bytes


def _better_size(state: State, spec: NamespaceSpec, needed: int) -> str:
    wanted = fitting_size(spec.groups, (state.config.extent_bytes + 1) // 2)
    said = f"extent_bytes = {size(wanted)} (--extent-bytes {size(wanted)})"
    if state.pool_bytes < wanted * needed:
        said += f" and pool_bytes of at least {size(wanted * needed)}"
    return said


def _more_extents(state: State, spec: NamespaceSpec, needed: int) -> str:
    """The largest size of which there are enough in the pool, else a larger pool."""
    smallest = fitting_size(spec.groups)
    wanted = 1 << max(0, (state.pool_bytes // needed).bit_length() - 1)
    while wanted >= smallest:
        if all(_fits(group, wanted) for group in spec.groups):
            return f"extent_bytes = {size(wanted)} (--extent-bytes {size(wanted)})"
        wanted //= 2
    said = f"pool_bytes of at least {size(smallest * needed)}"
    if smallest != state.config.extent_bytes:
        said += f" and extent_bytes = {size(smallest)}"
    return said
