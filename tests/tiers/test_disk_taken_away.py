"""A disk whose directory is taken away while it runs lets go of it, and the next begins anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.tiers import keeper as module
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.kinds import OPEN_DISK
from kvd.tiers.process import TierProcess
from kvd.tiers.store import HasAPlace, Outcome
from tests.small_tmpfs import detach, mount_tmpfs, small_tmpfs
from tests.tiers.contract import has, keep
from tests.tiers.test_disk_contract import options_of
from tests.tiers.test_keeper import SHORT_S, Heard, kept
from tests.tiers.tier_rig import TierRig, on_loop, placed, proc_text, soon, tier_rig, until
from tests.waiting import wait_until


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def put_another_in_its_place(directory: Path) -> None:
    directory.rename(directory.parent / "elsewhere")
    directory.mkdir(mode=0o700)


def remove_the_slab(directory: Path) -> None:
    (directory / "slab").unlink()


@pytest.mark.parametrize(
    ("take_away", "how"), [(remove, "removed"), (put_another_in_its_place, "replaced")]
)
@on_loop
async def test_a_process_ends_whose_directory_is_taken_away(
    tmp_path: Path, take_away: Callable[[Path], None], how: str
) -> None:
    directory = tmp_path / "disk"
    for _ in range(2):  # the next one begins anew in the same place
        async with tier_rig() as r:
            config = r.config("kvd.tiers.disk.store:DiskStore")
            config = replace(config, options=options_of(directory, regions=8))
            tier = await TierProcess.start(config, r.sink)
            r.processes.append(tier)
            tier.write(r.next_order(), placed([1], [0]), soon())
            assert await r.sink.outcomes(1) == [Outcome.DONE]
            take_away(directory)
            await _until_gone(r, f"{directory} was {how} while it ran")
            assert not proc_text(tier.pid, "stat"), "it holds on to the space"
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)


async def _until_gone(r: TierRig, reason: str) -> None:
    await r.sink.until(lambda: r.sink.gone)
    assert reason in r.sink.gone[0]


@pytest.mark.parametrize("take_away", [remove, put_another_in_its_place, remove_the_slab])
def test_what_is_taken_away_is_named(tmp_path: Path, take_away: Callable[[Path], None]) -> None:
    kept, taken = tmp_path / "kept", tmp_path / "taken"
    store = DiskStore(options_of(kept, taken, regions=8))
    assert isinstance(store, HasAPlace)
    keep(store, range(64))
    assert store.taken_away() == ""
    take_away(taken)
    assert store.taken_away().startswith(str(taken))
    store.close()
    store = DiskStore(options_of(kept, taken, regions=8))
    assert store.taken_away() == ""
    assert 0 < sum(has(store, n) for n in range(64)) < 64, "what the other disk has stays"
    store.close()


@on_loop
async def test_a_disk_that_was_unmounted_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies below it, mostly the system's own disk, is left alone."""
    monkeypatch.setattr(module, "LONGEST_WAIT_S", SHORT_S)
    monkeypatch.setattr(module, "FIRST_WAIT_S", SHORT_S)
    mount = tmp_path / "mount"
    options: dict[str, str] = {
        "directories": str(mount / "a disk"),
        "directory_bytes": "1MiB",
        "region_bytes": "64KiB",
    }
    heard = Heard()
    with small_tmpfs(mount, 16 << 20):
        async with tier_rig() as r, kept(r, heard, OPEN_DISK, **options) as keeper:
            await until(lambda: len(heard.started) == 1)
            detach(mount)
            await until(lambda: heard.gone)
            assert heard.gone == [f"{mount} was unmounted while {mount / 'a disk'} was used"]
            await until(lambda: f"not mounted any more: {mount};" in keeper.problem)
            launched = heard.launches
            await until(lambda: heard.launches > launched + 1)
            assert not list(mount.iterdir()), "the file system below was begun on"
            assert mount_tmpfs(mount, 16 << 20)
            await until(lambda: len(heard.started) == 2)
            assert (mount / "a disk" / "slab").exists()


def remove_the_index(directory: Path) -> None:
    (directory / "index.sqlite").unlink()


def put_an_older_index_in_its_place(directory: Path) -> None:
    (directory / "older").rename(directory / "index.sqlite")
    (directory / "index.sqlite-wal").unlink()  # it would make the older one the newest again


def put_a_link_in_its_place(directory: Path) -> None:
    (directory / "index.sqlite").unlink()
    (directory / "index.sqlite").symlink_to(directory.parent / "elsewhere")


def put_a_pipe_in_its_place(directory: Path) -> None:
    (directory / "index.sqlite").unlink()
    os.mkfifo(directory / "index.sqlite")


@pytest.mark.parametrize(
    "take_away",
    [
        remove_the_index,
        put_an_older_index_in_its_place,
        put_a_link_in_its_place,
        put_a_pipe_in_its_place,
    ],
)
def test_an_index_that_was_taken_away_is_written_anew(
    tmp_path: Path, take_away: Callable[[Path], None]
) -> None:
    directory = tmp_path / "disk"
    store = DiskStore(options_of(directory, regions=8))
    keep(store, range(8))
    store.close()
    shutil.copy(directory / "index.sqlite", directory / "older")
    store = DiskStore(options_of(directory, regions=8))
    keep(store, range(8, 16))
    assert store.taken_away() == ""
    take_away(directory)
    assert store.taken_away() == "", "its blocks are not lost"
    wait_until(lambda: not store.usage().notes, "another index")
    keep(store, range(16, 20))
    store.close()
    store = DiskStore(options_of(directory, regions=8))
    assert all(has(store, n) for n in range(20))
    store.close()
