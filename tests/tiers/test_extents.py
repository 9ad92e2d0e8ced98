"""Which extents a tier's process keeps mapped."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvd.core.keys import RowId
from kvd.linux.proc import mapped_inodes
from kvd.processes.mappings import ExtentFiles, Mapping
from kvd.tiers.extents import MAX_MAPPED_EXTENTS, SharedExtents, most_mapped
from kvd.tiers.store import TierError

EXTENT_BYTES = 1 << 16


class Rig:
    """Extents that are filled with their numbers."""

    def __init__(self, directory: Path, count: int, most: int) -> None:
        self.files = ExtentFiles(directory, 0, EXTENT_BYTES)
        for extent in range(count):
            self.files.path(extent).write_bytes(bytes([extent]) * EXTENT_BYTES)
        self.unmapped: list[int] = []
        self.extents = SharedExtents(self.files, self.unmapped.append, most)
        self._inodes = {self.files.path(e).stat().st_ino: e for e in range(count)}

    def mapped(self) -> set[int]:
        """What the kernel says."""
        found = mapped_inodes(os.getpid())
        return {extent for inode, extent in self._inodes.items() if inode in found}

    def use(self, *extents: int) -> None:
        assert self.extents.use(frozenset(extents))
        for extent, lent in self.extents.lend(extents).items():
            assert lent[0] == extent

    def close(self) -> None:
        self.extents.retire(RowId(99), range(100))
        assert not self.mapped()


@pytest.fixture
def rig(shared_directory: Path):  # type: ignore[no-untyped-def]
    made = Rig(shared_directory, 6, 3)
    yield made
    made.close()


def test_extents_that_nobody_uses_make_room_for_others_and_those_in_use_do_not(rig: Rig) -> None:
    rig.use(0)
    for extent in (1, 2):
        rig.use(extent)
        rig.extents.release([extent])
    assert rig.mapped() == {0, 1, 2}
    rig.use(1)
    rig.extents.release([1])
    rig.use(3)
    assert rig.mapped() == {0, 1, 3}, "2 was unused for longer than 1"
    rig.use(4, 5)
    assert rig.mapped() == {0, 3, 4, 5}, "what is in use stays, however many they are"
    rig.extents.release([3, 4, 5])
    rig.use(1, 2)
    assert rig.mapped() == {0, 1, 2}
    rig.extents.release([0, 1, 2])


def test_an_order_of_more_extents_than_may_stay_is_served(rig: Rig) -> None:
    rig.use(0, 1)
    rig.extents.release([0, 1])
    rig.use(0, 1, 2, 3, 4)
    assert rig.mapped() == {0, 1, 2, 3, 4}
    rig.extents.release(range(5))
    rig.use(5)
    assert len(rig.mapped()) == 3
    rig.extents.release([5])


def test_a_row_of_which_some_made_room_is_unmapped_as_any_other(rig: Rig) -> None:
    rig.use(0, 1)
    rig.extents.release([0])
    rig.use(2, 3)
    assert rig.mapped() == {1, 2, 3}
    rig.extents.retire(RowId(0), [0, 1])
    assert not rig.extents.use(frozenset([0]))
    assert rig.unmapped == []
    rig.extents.release([1])
    assert rig.unmapped == [0]
    rig.use(0)
    rig.extents.release([0, 2, 3])


def test_an_extent_that_can_not_be_had_changes_nothing_for_the_others(rig: Rig) -> None:
    with pytest.raises(OSError, match="No such file"):
        rig.extents.use(frozenset([0, 50]))
    rig.use(0)
    rig.extents.release([0])
    rig.extents.retire(RowId(0), [0, 50])
    assert rig.unmapped == [0]


@pytest.mark.parametrize(
    ("descriptors", "most"),
    [(1, 1), (1_000, 500), (2 * MAX_MAPPED_EXTENTS + 2, MAX_MAPPED_EXTENTS)],
)
def test_extents_take_half_of_the_descriptors_at_most(
    descriptors: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (descriptors, descriptors))
    assert most_mapped() == most


class _Told:
    """A store that must know what is mapped, and refuses some."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.refuses = False

    def map_memory(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise TierError("no more")
        self.known[address] = nbytes

    def unmap_memory(self, address: int) -> None:
        assert ctypes.string_at(address, 1)  # it is mapped yet
        del self.known[address]


def test_a_store_that_must_know_the_memory_is_told_of_all_that_is_mapped(
    shared_directory: Path,
) -> None:
    rig, told = Rig(shared_directory, 6, 3), _Told()
    rig.extents = SharedExtents(rig.files, rig.unmapped.append, 3, told)
    for some in ((0, 1), (2, 3), (4, 5)):
        rig.use(*some)
        assert list(told.known.values()) == [EXTENT_BYTES] * len(rig.mapped())
        rig.extents.release(some)
    told.refuses = True
    with pytest.raises(OSError, match="no more"):
        rig.extents.use(frozenset({0}))
    assert 0 not in rig.mapped()
    rig.close()
    assert told.known == {}


class SlowToPut(dict[int, Mapping]):
    """What is taken out is put back a little later."""

    def __init__(self, mapped: dict[int, Mapping]) -> None:
        super().__init__(mapped)
        self.taken = threading.Event()

    def pop(self, *sought: Any) -> Any:
        found = super().pop(*sought)
        self.taken.set()
        time.sleep(0.1)
        return found


def test_extents_are_lent_while_others_begin_to_use_them(rig: Rig) -> None:
    rig.use(0, 1)
    slow = rig.extents._mapped = SlowToPut(rig.extents._mapped)
    user = threading.Thread(target=rig.use, args=(0, 1))
    user.start()
    try:
        assert slow.taken.wait(30)
        assert sorted(rig.extents.lend([0, 1])) == [0, 1]
    finally:
        user.join()
    for _ in range(2):
        rig.extents.release([0, 1])
