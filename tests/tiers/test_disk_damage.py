"""Whatever lies in its directories, the disk tier opens or says what to change, and never lies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvd.tiers.disk import disk as disk_module
from kvd.tiers.disk import kinds as kinds_module
from kvd.tiers.disk import size_class as size_class_module
from kvd.tiers.disk.options import MOST_REGION_BYTES, MOST_THREADS
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import OptionValue, Outcome, TierReason, TierUnusable
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    OTHER,
    content,
    has,
    keep,
    key,
    read,
    soon,
    source,
    target,
    write,
)
from tests.tiers.faulty_files import FaultyFiles
from tests.tiers.test_disk_contract import options_of

BLOCKS = 16
ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A disk that was closed with BLOCKS blocks."""
    directory = tmp_path / "disk"
    store = opened(directory)
    keep(store, range(BLOCKS))
    store.close()
    return directory


def opened(*directories: Path, regions: int = 4, **others: OptionValue) -> DiskStore:
    return DiskStore(options_of(*directories, regions=regions, **others))


def check_all(store: DiskStore) -> int:
    """How many of the blocks are there; none of them with a wrong byte."""
    blocks = [target(key(n), BLOCK_BYTES) for n in range(BLOCKS)]
    outcomes = store.read(blocks, soon())
    for n, (block, outcome) in enumerate(zip(blocks, outcomes, strict=True)):
        right = bytes(block.parts[0]) == content((n, ONE))
        assert right if outcome is Outcome.DONE else not right
    return outcomes.count(Outcome.DONE)


def scribble_in(name: str, seed: int, directory: Path) -> None:
    path = directory / name
    draw = np.random.default_rng(seed)
    raw = bytearray(path.read_bytes())
    for at in draw.integers(0, len(raw), 400):
        raw[at] ^= int(draw.integers(1, 256))
    path.write_bytes(raw)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no index": lambda d: (d / "index.sqlite").unlink(),
    "empty index": lambda d: (d / "index.sqlite").write_bytes(b""),
    "text for an index": lambda d: (d / "index.sqlite").write_bytes(b"no database\n" * 999),
    "half an index": lambda d: os.truncate(
        d / "index.sqlite", (d / "index.sqlite").stat().st_size // 2
    ),
    "an index of zeros": lambda d: (d / "index.sqlite").write_bytes(bytes(8192)),
    "no slab": lambda d: (d / "slab").unlink(),
    "empty slab": lambda d: os.truncate(d / "slab", 0),
    "half a slab": lambda d: os.truncate(d / "slab", (1 << 20) + BLOCK_BYTES + 99),
    "a slab of text": lambda d: (d / "slab").write_bytes(b"no slab\n" * 999_999),
    "a log beside the index": lambda d: (d / "index.sqlite-wal").write_bytes(b"?" * 9999),
    "a log and a journal": lambda d: (d / "index.sqlite-journal").write_bytes(b"?" * 9999),
    **{f"scribbles over the index {n}": partial(scribble_in, "index.sqlite", n) for n in range(6)},
    **{f"scribbles over the slab {n}": partial(scribble_in, "slab", n) for n in range(3)},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_costs_misses_and_no_start(
    directory: Path, damage: Callable[[Path], object]
) -> None:
    damage(directory)
    store = opened(directory)
    assert check_all(store) < BLOCKS or damage in (
        DAMAGES["a log beside the index"],
        DAMAGES["a log and a journal"],
        *(each for name, each in DAMAGES.items() if name.startswith("scribbles")),
    )
    keep(store, range(BLOCKS))
    store.close()
    store = opened(directory)  # and it was mended
    assert check_all(store) == BLOCKS
    assert store.usage().errors == {}
    store.close()


def test_index_that_lost_its_end_is_no_wrong_byte(directory: Path, tmp_path: Path) -> None:
    old = (directory / "index.sqlite").read_bytes()
    store = opened(directory)
    for first in range(100, 200, 8):  # every place is another's now
        keep(store, range(first, first + 8))
    store.close()
    (directory / "index.sqlite").write_bytes(old)
    store = opened(directory)
    assert store.usage().blocks == BLOCKS
    assert check_all(store) == 0
    assert store.usage().errors == {TierReason.CHECKSUM_MISMATCH: BLOCKS}
    assert store.usage().blocks == 0
    store.close()


def test_slab_that_lost_its_end_is_no_wrong_byte(directory: Path) -> None:
    old = (directory / "slab").read_bytes()
    store = opened(directory)
    store.delete_scopes([ONE], soon())
    keep(store, range(100, 116))
    store.close()
    (directory / "slab").write_bytes(old)
    store = opened(directory)
    assert not any(has_right(store, n) for n in range(100, 116))
    assert not any(has(store, n) for n in range(BLOCKS))
    store.close()


def has_right(store: DiskStore, number: int, scope: bytes = ONE) -> bool:
    outcome, found = read(store, key(number, scope))
    assert outcome is not Outcome.DONE or found == content((number, scope))
    return outcome is Outcome.DONE


def test_an_index_or_slab_of_another_directory_is_not_believed(
    directory: Path, tmp_path: Path
) -> None:
    other = opened(tmp_path / "other")
    keep(other, range(BLOCKS), OTHER)
    other.close()
    for name in ("index.sqlite", "slab"):
        copy = tmp_path / f"copy of {name}"
        shutil.copytree(directory, copy)
        copy.chmod(0o700)
        shutil.copy(tmp_path / "other" / name, copy / name)
        store = opened(copy)
        assert store.usage().blocks == 0
        assert store.usage().errors == {TierReason.INDEX_DAMAGED: 1}
        assert not any(has(store, n) or has(store, n, OTHER) for n in range(BLOCKS))
        assert (copy / "index.sqlite.set-aside").exists()
        store.close()


def test_rows_that_say_what_cannot_be_are_dropped(directory: Path) -> None:
    db = sqlite3.connect(directory / "index.sqlite")
    places = [place for (place,) in db.execute("SELECT place FROM blocks ORDER BY place")]
    db.execute("UPDATE blocks SET record=zeroblob(56) WHERE place=?", (places[0],))
    db.execute("UPDATE blocks SET record='text' WHERE place=?", (places[1],))
    db.execute("UPDATE blocks SET record=x'00' WHERE place=?", (places[2],))
    db.commit()
    db.close()
    store = opened(directory)
    assert check_all(store) == BLOCKS - 3
    assert store.usage().errors == {TierReason.INDEX_DAMAGED: 3}
    store.close()


def test_rows_of_a_scope_or_size_that_is_not_known_are_dropped(directory: Path) -> None:
    for table in ("scopes", "lengths"):
        with sqlite3.connect(directory / "index.sqlite") as db:
            db.execute(f"DELETE FROM {table}")
        db.close()
        store = opened(directory)
        assert check_all(store) == 0
        keep(store, range(BLOCKS))
        store.close()


@pytest.mark.parametrize("said", [1 << 62, 1 << 20, -1, "'text'", "NULL", 0.5], ids=str)
def test_a_scope_or_size_that_is_no_bytes_costs_its_blocks(directory: Path, said: object) -> None:
    for table, column in (("scopes", "scope"), ("lengths", "lengths")):
        with sqlite3.connect(directory / "index.sqlite") as db:
            db.execute(f"UPDATE {table} SET {column}={said}")
        db.close()
        store = opened(directory)
        assert check_all(store) == 0
        keep(store, range(BLOCKS))
        store.close()
        store = opened(directory)  # and it was mended
        assert check_all(store) == BLOCKS
        assert not any(len(scope) > BLOCK_BYTES for scope in store._disks[0]._scopes)
        store.close()


@pytest.mark.parametrize("number", [1 << 32, 1 << 62], ids=str)
def test_scopes_whose_numbers_are_used_up_by_damage_are_stored_all_the_same(
    directory: Path, number: int
) -> None:
    with sqlite3.connect(directory / "index.sqlite") as db:
        db.execute("UPDATE sqlite_sequence SET seq=? WHERE name='scopes'", (number,))
    db.close()
    store = opened(directory)
    keep(store, range(BLOCKS), OTHER)
    store.close()


# -- directories ---------------------------------------------------------------------------------


def test_second_process_is_refused_and_the_first_goes_on(directory: Path) -> None:
    store = opened(directory)
    with pytest.raises(TierUnusable, match=f"another tier, .* process {os.getpid()}:"):
        opened(directory)
    assert check_all(store) == BLOCKS
    store.close()
    opened(directory).close()


def test_directory_that_others_may_write_to_is_refused_with_the_fix(directory: Path) -> None:
    directory.chmod(0o777)
    with pytest.raises(TierUnusable, match="chmod"):
        opened(directory)


def test_strangers_directory_is_refused(directory: Path) -> None:
    os.chown(directory, 12345, 12345)
    with pytest.raises(TierUnusable, match="uid 12345"):
        opened(directory)


@pytest.mark.parametrize("name", ["slab", "index.sqlite", "lock"])
@pytest.mark.parametrize("what", ["link", "directory", "pipe"])
def test_other_things_in_the_place_of_files_are_refused_or_set_aside(
    directory: Path, name: str, what: str
) -> None:
    path = directory / name
    path.unlink(missing_ok=True)
    match what:
        case "link":
            path.symlink_to("/etc/passwd")
        case "directory":
            path.mkdir()
        case _:
            os.mkfifo(path)
    if (name, what) in (("lock", "pipe"), ("index.sqlite", "pipe"), ("index.sqlite", "directory")):
        with contextlib.suppress(TierUnusable):  # set aside, or good enough for a lock
            store = opened(directory)
            keep(store, range(BLOCKS))
            store.close()
        return
    with pytest.raises(TierUnusable):
        opened(directory)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "directories"),
        ({"directories": ["/d"]}, "directory_bytes"),
        ({"directories": ["relative"], "directory_bytes": "1GiB"}, "directories"),
        ({"directories": [], "directory_bytes": "1GiB"}, "directories"),
        ({"directories": ["/d", "/d"], "directory_bytes": "1GiB"}, "directories"),
        ({"directories": ["/d"], "directory_bytes": "much"}, "directory_bytes"),
        ({"directories": ["/d"], "directory_bytes": True}, "directory_bytes"),
        ({"directories": ["/d"], "directory_bytes": "1MiB"}, "directory_bytes"),
        ({"directories": ["/d"], "directory_bytes": "1GiB", "policy": "best"}, "policy"),
        ({"directories": ["/d"], "directory_bytes": "1GiB", "direct": "yes"}, "direct"),
        ({"directories": ["/d"], "directory_bytes": "1GiB", "colour": "red"}, "colour"),
        ({"directories": ["/d"], "directory_bytes": "1GiB", "region_bytes": 4097}, "region"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_by_name(options: dict[str, OptionValue], named: str) -> None:
    with pytest.raises(TierUnusable, match=named):
        DiskStore(options)


def test_threads_and_regions_are_taken_up_to_a_bound(tmp_path: Path) -> None:
    opened(tmp_path / "a", threads=MOST_THREADS).close()
    with pytest.raises(TierUnusable, match="threads"):
        opened(tmp_path / "a", threads=MOST_THREADS + 1)
    with pytest.raises(TierUnusable, match="region_bytes"):
        opened(tmp_path / "a", region_bytes=MOST_REGION_BYTES + 4096)


# -- other sizes of the same directories ---------------------------------------------------------


def test_slab_may_grow_and_shrink_between_starts(directory: Path) -> None:
    store = opened(directory, regions=8)
    assert check_all(store) == BLOCKS
    keep(store, range(100, 148))
    store.close()
    store = opened(directory, regions=1)
    assert (directory / "slab").stat().st_size == (1 << 20) + 8 * BLOCK_BYTES
    there = sum(has(store, n) for n in range(148))
    assert 0 < there <= 8
    store.close()


def test_slab_of_other_regions_is_remade(directory: Path) -> None:
    store = opened(directory, region_bytes=16 * BLOCK_BYTES)
    assert store.usage().blocks == 0
    keep(store, range(BLOCKS))
    assert check_all(store) == BLOCKS
    store.close()


def test_sizes_share_a_disk_and_the_idle_one_gives_way(tmp_path: Path) -> None:
    store = opened(tmp_path / "a", regions=4)
    keep(store, range(32))  # the whole disk, in blocks of 64 KiB
    time.sleep(1.1)  # recency is in seconds
    large = 4 * BLOCK_BYTES
    for n in range(100, 108):
        assert write(store, source(key(n), content(n, large))) == [Outcome.DONE]
        assert read(store, key(n), large) == (Outcome.DONE, content(n, large))
    assert store.usage().bytes <= store.usage().capacity_bytes
    assert read(store, key(107), large)[0] is Outcome.DONE
    store.close()
    store = opened(tmp_path / "a", regions=4)
    assert read(store, key(107), large) == (Outcome.DONE, content(107, large))
    store.close()


def test_block_larger_than_a_region_is_full(tmp_path: Path) -> None:
    store = opened(tmp_path / "a")
    size = 8 * BLOCK_BYTES
    assert write(store, source(key(1), content(1, size))) == [Outcome.DONE]
    assert write(store, source(key(2), content(2, size + 8))) == [Outcome.FULL]
    store.close()


def test_scopes_without_blocks_are_forgotten_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "MAX_SCOPES_KNOWN", 16)
    store = opened(tmp_path / "a", regions=1)
    for number in range(100):
        keep(store, [1], number.to_bytes(32, "big"))
    scopes = [number.to_bytes(32, "big") for number in range(100)]
    assert sum(has(store, 1, scope) for scope in scopes) == 8
    store.close()
    store = opened(tmp_path / "a", regions=3)
    for number in range(200, 220):
        write(store, source(key(1, number.to_bytes(32, "big")), content(number)))
    there = [has_scope(store, number) for number in range(200, 220)]
    assert there == [n < 8 for n in range(20)]
    store.close()


def test_a_disk_that_knows_too_many_scopes_does_not_look_through_them_for_each_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "MAX_SCOPES_KNOWN", 16)
    looks: list[int] = []
    forget = disk_module.Disk._forget_unused_scopes

    def noted(disk: disk_module.Disk) -> int:
        looks.append(forget(disk))
        return looks[-1]

    monkeypatch.setattr(disk_module.Disk, "_forget_unused_scopes", noted)
    store = opened(tmp_path / "a", regions=3)  # of 8 places each

    def new_scopes(numbers: range) -> list[bool]:
        for number in numbers:
            write(store, source(key(1, number.to_bytes(32, "big")), content(number)))
        return [has_scope(store, number) for number in numbers]

    assert new_scopes(range(16)) == [True] * 16
    assert new_scopes(range(100, 120)) == [False] * 20
    assert looks == [0]
    slab = tmp_path / "a" / "slab"
    slab.write_bytes(slab.read_bytes().replace(content(0), bytes(BLOCK_BYTES)))
    assert read(store, key(1, bytes(32)))[0] is Outcome.FAILED, "its scope has no block any more"
    monkeypatch.setattr(time, "monotonic", later(disk_module.FORGET_SCOPES_AGAIN_S))
    assert new_scopes(range(200, 202)) == [True, False]
    assert looks == [0, 1]
    store.close()


def later(seconds: float) -> Callable[[], float]:
    now = time.monotonic
    return lambda: now() + seconds


def has_scope(store: DiskStore, number: int) -> bool:
    return store.exists([key(1, number.to_bytes(32, "big"))], soon())[0]


def test_a_new_kind_of_blocks_takes_the_place_of_kinds_with_the_fewest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds_module, "MAX_LENGTHS_KNOWN", 4)
    monkeypatch.setattr(kinds_module, "KINDS_AT_ONCE", 1)
    store = opened(tmp_path / "a")
    keep_sized(store, range(8), 8)
    keep_sized(store, range(10, 12), 16)
    keep_sized(store, [20], 24)
    keep_sized(store, range(30, 33), 32)
    assert keep_sized(store, [40], 40) == [Outcome.DONE]
    assert store.take_left() == [key(20)]
    assert store.usage().evicted_blocks == 1
    monkeypatch.setattr(kinds_module, "KINDS_AT_ONCE", 2)
    # Of a look a moment ago: it is not gone through all blocks for each new kind.
    assert keep_sized(store, [50], 48) == [Outcome.FULL]
    store.close()
    store = opened(tmp_path / "a")
    assert has_sized(store, [0, 7, 10, 11, 30, 40], 8, 8, 16, 16, 32, 40)
    assert keep_sized(store, [50], 48) == [Outcome.DONE]
    assert sorted(store.take_left() or ()) == [key(10), key(11), key(40)]
    assert has_sized(store, [0, 7, 30, 50], 8, 8, 32, 48)
    store.close()


def test_kinds_whose_blocks_were_deleted_are_forgotten_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds_module, "MAX_LENGTHS_KNOWN", 4)
    monkeypatch.setattr(kinds_module, "KINDS_AT_ONCE", 1)
    store = opened(tmp_path / "a")
    for n in range(1, 5):
        keep_sized(store, [n], 8 * n)
    store.delete_scopes([ONE], soon())
    for n in range(5, 9):
        assert keep_sized(store, [n], 8 * n) == [Outcome.DONE]
    store.close()
    store = opened(tmp_path / "a")
    assert has_sized(store, range(5, 9), *(8 * n for n in range(5, 9)))
    store.close()


def test_a_kind_in_use_does_not_go_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds_module, "MAX_LENGTHS_KNOWN", 2)
    files = FaultyFiles()
    store = DiskStore(options_of(tmp_path / "a", regions=4), files)
    keep_sized(store, range(2), 16)
    begun, go_on = threading.Event(), threading.Event()

    def hang(call: str, offset: int) -> None:
        if call == "write" and not begun.is_set():
            begun.set()
            assert go_on.wait(20)

    files.fault = hang
    writing = threading.Thread(target=keep_sized, args=(store, [9], 8))
    writing.start()
    assert begun.wait(10)
    assert keep_sized(store, [3], 24) == [Outcome.DONE]
    go_on.set()
    writing.join()
    assert has_sized(store, [9, 3], 8, 24)
    store.close()


def test_a_new_size_takes_the_place_of_the_one_with_the_fewest_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.tiers.disk.space.MAX_SIZES", 2)
    store = opened(tmp_path / "a", regions=8)
    keep_sized(store, range(3), 4096)
    keep_sized(store, [10], 8192)
    assert keep_sized(store, [20], 12288) == [Outcome.DONE]
    assert store.take_left() == [key(10)]
    assert (store.usage().blocks, store.usage().evicted_blocks) == (4, 1)
    store.delete_scopes([ONE], soon())
    assert keep_sized(store, [30, 31], 16384) == [Outcome.DONE] * 2
    assert store.take_left() == []
    store.close()
    store = opened(tmp_path / "a", regions=8)
    assert has_sized(store, [30, 31], 16384, 16384)
    assert store.usage().blocks == 2
    store.close()


def keep_sized(store: DiskStore, numbers: Iterable[int], size: int) -> list[Outcome]:
    return write(store, *(source(key(n), content(n, size)) for n in numbers))


def has_sized(store: DiskStore, numbers: Iterable[int], *sizes: int) -> bool:
    """Whether all these blocks are there, with their bytes."""
    blocks = [target(key(n), size) for n, size in zip(numbers, sizes, strict=True)]
    found = store.read(blocks, soon())
    return found == [Outcome.DONE] * len(blocks) and all(
        bytes(block.parts[0]) == content(n, size)
        for n, size, block in zip(numbers, sizes, blocks, strict=True)
    )


def test_places_of_a_class_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_class_module, "MAX_PLACES", 16)
    store = opened(tmp_path / "a", regions=4)
    for first in range(0, 40, 8):
        keep(store, range(first, first + 8))
    assert store.usage().blocks == 16
    store.close()


def test_blocks_stay_at_home_from_release_to_release(tmp_path: Path) -> None:
    """A disk is asked only for what belongs there by the slabs' seeds, read as they always were."""
    disks = [tmp_path / name for name in ("a", "b", "c")]
    opened(*disks).close()
    for number, disk in enumerate(disks):
        with (disk / "slab").open("r+b") as slab:
            slab.seek(24)  # behind the kind, the release and the regions' size
            slab.write(bytes(range(16 * number, 16 * number + 16)))
        (disk / "index.sqlite").unlink()
    store = opened(*disks)
    keep(store, range(BLOCKS))
    store.close()
    held = []
    for disk in disks:
        with contextlib.closing(sqlite3.connect(disk / "index.sqlite")) as index:
            held.append(index.execute("SELECT count(*) FROM blocks").fetchone()[0])
    assert held == [6, 4, 6]


# -- killed at any moment ------------------------------------------------------------------------


def test_store_that_is_killed_again_and_again_gives_no_wrong_byte(tmp_path: Path) -> None:
    options = options_of(tmp_path / "a", tmp_path / "b", regions=8)
    draw = np.random.default_rng(3)
    writer = [sys.executable, "-m", "tests.tiers.disk_writer", json.dumps(options)]
    found = cycle = 0
    while cycle < 12 or (found <= 200 and cycle < 120):  # a busy machine lets it write little
        cycle += 1
        child = subprocess.Popen([*writer, str(cycle)], stdout=subprocess.PIPE, cwd=ROOT)
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        time.sleep(float(draw.random()) * 0.5)
        child.kill()
        child.wait()
        child.stdout.close()
        store = DiskStore(options)
        assert store.usage().errors == {}
        for n in range(200):
            found += has_right(store, n) + has_right(store, n, OTHER)
        store.close()
    assert found > 200


@pytest.mark.parametrize("name", ["lock", "slab", "index.sqlite.set-aside", "index.sqlite-wal"])
def test_a_directory_in_place_of_a_file_is_named_with_what_to_do(
    directory: Path, name: str
) -> None:
    (directory / name).unlink(missing_ok=True)
    (directory / name / "full").mkdir(parents=True)
    if name == "index.sqlite.set-aside":
        (directory / "index.sqlite").unlink()
        (directory / "index.sqlite").mkdir()
    with pytest.raises(TierUnusable, match=f"^directories: .*{name}.*: remove it"):
        opened(directory)
    shutil.rmtree(directory / name)
    opened(directory).close()


def test_an_index_that_is_a_directory_is_set_aside(directory: Path) -> None:
    (directory / "index.sqlite").unlink()
    (directory / "index.sqlite" / "full").mkdir(parents=True)
    opened(directory).close()
    assert (directory / "index.sqlite.set-aside" / "full").is_dir()
    assert (directory / "index.sqlite").is_file()


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_index_that_can_not_be_set_aside_is_not_said_to_be(
    directory: Path, caplog: pytest.LogCaptureFixture, *, is_plain: bool
) -> None:
    index = directory / "index.sqlite"
    (directory / "index.sqlite.set-aside" / "full").mkdir(parents=True)
    if is_plain:
        index.write_bytes(b"no index" * 1000)
    else:
        index.unlink()
        (index / "full").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(TierUnusable, match=r"^directories: .*set-aside.*: remove it"):
            opened(directory)
    assert "is set aside" not in caplog.text
