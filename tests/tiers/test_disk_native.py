"""Disks whose blocks the native library moves: what goes wrong there costs what it costs by Python.

Every other test of a disk whose files are the kernel's runs by it, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd import native
from kvd.linux.proc import may_have_huge_pages
from kvd.native.file_moves import FileMover, FileRuns
from kvd.tiers.disk.slab import HEADER_BYTES
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import Outcome, TierReason
from tests.tiers.contract import BLOCK_BYTES, content, has, keep, key, soon, source, summed, target
from tests.tiers.faulty_files import FaultyFiles
from tests.tiers.test_disk_contract import options_of

BLOCKS = 32
pytestmark = pytest.mark.skipif(
    native.library() is None, reason=f"no native library: {native.why_not()}"
)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs the library moved in each call."""
    calls: list[int] = []
    real = FileMover.move

    def counted(
        self: FileMover,
        moves: FileRuns,
        movers: int,
        deadline: float,
        *,
        writes: bool,
    ) -> list[int]:
        calls.append(len(moves.runs))
        return real(self, moves, movers, deadline, writes=writes)

    monkeypatch.setattr(FileMover, "move", counted)
    return calls


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore(options_of(tmp_path / "disk", regions=4, region_bytes=4 << 20))
    if any("without O_DIRECT" in note for note in store.usage().notes):
        pytest.skip("no O_DIRECT here")
    return store


def read_all(store: DiskStore, deadline: float | None = None) -> list[Outcome]:
    """Of all blocks of `keep`; each is right, or what was in its memory is gone."""
    blocks = [target(key(number), BLOCK_BYTES) for number in range(BLOCKS)]
    outcomes = store.read(blocks, soon() if deadline is None else deadline)
    for number, (block, outcome) in enumerate(zip(blocks, outcomes, strict=True)):
        found = bytes(block.parts[0])
        right = content((number, key(number).scope)) if outcome is Outcome.DONE else None
        assert found == right or (right is None and not any(found))
    return outcomes


def test_it_moves_them_where_nobody_stands_between_it_and_the_kernel(
    store: DiskStore, tmp_path: Path, moved: list[int]
) -> None:
    keep(store, range(BLOCKS))
    assert read_all(store) == [Outcome.DONE] * BLOCKS
    assert len(moved) == 2
    store.close()
    for files, direct in ((FaultyFiles(), True), (None, False)):
        other = options_of(tmp_path / f"other-{direct}", regions=4, direct=direct)
        with_others = DiskStore(other, files)
        keep(with_others, [1])
        assert has(with_others, 1)
        with_others.close()
    assert len(moved) == 2


def test_a_damaged_block_costs_none_of_its_neighbours(
    store: DiskStore, tmp_path: Path, moved: list[int]
) -> None:
    keep(store, range(BLOCKS))
    with (tmp_path / "disk" / "slab").open("r+b") as slab:
        slab.seek(HEADER_BYTES + 5 * BLOCK_BYTES + 777)
        slab.write(b"?")
    outcomes = read_all(store)
    assert (outcomes.count(Outcome.DONE), outcomes.count(Outcome.FAILED)) == (BLOCKS - 1, 1)
    assert store.usage().errors == {TierReason.CHECKSUM_MISMATCH: 1}
    assert max(moved) < BLOCKS  # neighbours went together
    store.close()


def test_a_slab_that_ends_too_early_costs_what_lay_there(store: DiskStore, tmp_path: Path) -> None:
    keep(store, range(BLOCKS))
    os.truncate(tmp_path / "disk" / "slab", HEADER_BYTES + 7 * BLOCK_BYTES)
    outcomes = read_all(store)
    assert (outcomes.count(Outcome.DONE), outcomes.count(Outcome.FAILED)) == (7, BLOCKS - 7)
    assert store.usage().errors == {TierReason.IO_ERROR: BLOCKS - 7}
    assert any("reads fail: the file ends too early" in note for note in store.usage().notes)
    store.close()


def test_a_block_that_is_not_what_was_stored_is_not_written_and_its_neighbours_are(
    store: DiskStore, moved: list[int]
) -> None:
    blocks = [summed(source(key(n), content((n, key(n).scope)))) for n in range(BLOCKS)]
    blocks[9].parts[0][100] ^= 1
    wanted = [Outcome.DAMAGED if number == 9 else Outcome.DONE for number in range(BLOCKS)]
    assert store.write(blocks, soon()) == wanted
    assert [has(store, n) for n in range(BLOCKS)] == [n != 9 for n in range(BLOCKS)]
    assert moved
    store.close()


def test_sums_of_what_was_read_are_told(store: DiskStore) -> None:
    keep(store, range(2))
    blocks = [summed(target(key(number), BLOCK_BYTES)) for number in range(2)]
    assert store.read(blocks, soon()) == [Outcome.DONE] * 2
    for block in blocks:
        assert block.sums is not None
        again = summed(block).sums
        assert again is not None
        assert block.sums.tolist() == again.tolist()
    store.close()


MAPS = """\
7f0000000000-7f0000200000 rw-s 00000000 00:1d 12 /pool/extent-0
7f0000200000-7f0000400000 rw-p 00000000 00:00 0
7f0000400000-7f0000600000 rw-s 00000000 00:ff 12 /elsewhere (deleted)
"""


@pytest.mark.parametrize(
    ("kind", "options", "huge"),
    [
        ("tmpfs", "rw,size=1g", False),
        ("tmpfs", "rw,huge=within_size,size=1g", True),
        ("tmpfs", "rw,huge=always", True),
        ("tmpfs", "rw,huge=advise", False),
        ("hugetlbfs", "rw,pagesize=2M", True),
        ("ext4", "rw", False),
    ],
)
def test_memory_has_huge_pages_where_its_mount_gives_them(
    tmp_path: Path, kind: str, options: str, *, huge: bool
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text(MAPS)
    (tmp_path / "self" / "mountinfo").write_text(
        "20 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"31 20 0:29 / /pool rw,nosuid shared:7 - {kind} none {options}\n"
    )
    found = [
        may_have_huge_pages(address, tmp_path)
        for address in (0x7F0000000000, 0x7F00001FFFFF, 0x7F0000200000, 0x7F0000400000, 0x1000)
    ]
    assert found == [huge, huge, False, False, False]
