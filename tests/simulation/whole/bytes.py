"""Bytes, modelled: a piece of content is a number, and equal numbers are equal bytes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

ZEROS = 0  # what a fresh extent holds
ROTTEN = -1  # nobody's content: what a failed read leaves, or damage
Content = Any  # of one engine block


class Meanings:
    """Gives each content a number, the same for the same, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, *names: Hashable) -> int:
        """Of the block that has this name."""
        return self._numbers.setdefault(names, len(self._numbers) + 1)

    def sum_of(self, content: list[Content]) -> int:
        """A checksum: never 0, and of 64 bits."""
        return self.of("sum", repr(content)) * 0x9E3779B97F4A7C15 % (1 << 64) | 1


class PoolBytes:
    """What lies in the pool's extents, by extent and offset. It outlives daemons."""

    def __init__(self) -> None:
        self.extents: dict[int, dict[int, list[Content]]] = {}

    def read(self, extent: int, offset: int, width: int) -> list[Content]:
        """The engine blocks' contents that lie there."""
        found = self.extents.get(extent, {}).get(offset)
        if found is None:
            return [ZEROS] * width
        return list(found) if len(found) == width else [ROTTEN] * width

    def write(self, extent: int, offset: int, content: list[Content]) -> None:
        self.extents.setdefault(extent, {})[offset] = content

    def zero(self, extent: int) -> None:
        self.extents.pop(extent, None)

    def is_clean(self, extent: int) -> bool:
        """Whether nobody's bytes lie there."""
        return not self.extents.get(extent)


class RankBytes:
    """One rank's KV memory, by group and engine block, and who may write to it now.

    `loading` has the jobs that the engine has given each block to; a store gives none.
    """

    def __init__(self, groups: int, blocks: int) -> None:
        self.groups: list[list[Content]] = [[ZEROS] * blocks for _ in range(groups)]
        self.loading: list[dict[int, int]] = [{} for _ in range(groups)]
        self.is_withdrawn = False  # its worker has ended, or unregistered

    def read(self, group: int, block: int) -> Content:
        return self.groups[group][block]

    def write(self, group: int, block: int, content: Content) -> None:
        """The engine computes."""
        self.groups[group][block] = content

    def land(self, job: int, group: int, block: int, content: Content) -> None:
        """A mover writes: only where the engine waits for just that (I4)."""
        assert not self.is_withdrawn, f"job {job} writes to memory that was taken back"
        wanted = self.loading[group].get(block)
        assert wanted == job, (
            f"job {job} writes to engine block {block} of group {group}, which waits for {wanted}"
        )
        self.write(group, block, content)
