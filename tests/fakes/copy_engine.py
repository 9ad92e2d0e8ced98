"""A CopyEngine over bytearrays: the plainest one that fulfils the contract."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.core.events import JobKind
from kvd.mover.copy_engine import CopyStopped, KeepGoing
from kvd.mover.facts import MoverFacts
from kvd.mover.layout import GroupMap, LocatedPart, MoverConfig, check_config
from kvd_proto.layout import NULL_ENGINE_BLOCK


class FakeCopyEngine:
    """Copies fragment by fragment. Tests look into `memories` and `extents`.

    A closed extent keeps its bytes, as a file would. `broken` extents fail every copy.
    """

    copies_at_once = 1

    def __init__(self, config: MoverConfig) -> None:
        check_config(config)
        self.facts = MoverFacts()
        self._config = config
        self.memories = [bytearray(region.bytes) for region in config.regions]
        self.extents: dict[int, bytearray] = {}
        self.opened: set[int] = set()
        self.broken: set[int] = set()

    def open_extent(self, extent: int) -> npt.NDArray[np.uint8]:
        found = self.extents.setdefault(extent, bytearray(self._config.extents.extent_bytes))
        self.opened.add(extent)
        return np.frombuffer(found, dtype=np.uint8)

    def close_extent(self, extent: int) -> None:
        self.opened.remove(extent)

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        """Nothing is cold here."""

    def warm_memory(self, keep_going: KeepGoing) -> None:
        """Nothing is cold here."""

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        group = self._config.groups[part.group]
        copied = 0
        places = zip(part.extents.tolist(), part.offsets.tolist(), strict=True)
        for (extent, offset), engine_blocks in zip(places, part.engine_blocks, strict=True):
            if not keep_going():
                raise CopyStopped
            if extent not in self.opened or extent in self.broken:
                raise OSError(f"extent {extent} can't be reached")
            for number, block in enumerate(engine_blocks.tolist()):
                at = offset + number * group.engine_block_bytes
                copied += self._copy_block(kind, group, block, (extent, at))
        return copied

    def close(self) -> None:
        self.opened.clear()

    def _copy_block(
        self, kind: JobKind, group: GroupMap, block: int, place: tuple[int, int]
    ) -> int:
        extent, at = place
        slots = self.extents[extent]
        if block == NULL_ENGINE_BLOCK:
            if kind is JobKind.STORE:
                slots[at : at + group.engine_block_bytes] = bytes(group.engine_block_bytes)
            return 0
        for fragment in group.fragments:
            memory = self.memories[fragment.region]
            start = fragment.base + block * fragment.stride
            if kind is JobKind.STORE:
                slots[at : at + fragment.bytes] = memory[start : start + fragment.bytes]
            else:
                memory[start : start + fragment.bytes] = slots[at : at + fragment.bytes]
            at += fragment.bytes
        return group.engine_block_bytes
