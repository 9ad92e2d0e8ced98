"""A disk whose directory is taken away while it runs lets go of it, and the next begins anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.tiers.disk.store import DiskStore
from kvd.tiers.process import TierProcess
from kvd.tiers.store import HasAPlace, Outcome
from tests.tiers.contract import has, keep
from tests.tiers.test_disk_contract import options_of
from tests.tiers.tier_rig import TierRig, on_loop, placed, proc_text, soon, tier_rig


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def put_another_in_its_place(directory: Path) -> None:
    directory.rename(directory.parent / "elsewhere")
    directory.mkdir(mode=0o700)


def remove_the_slab(directory: Path) -> None:
    (directory / "slab").unlink()


@pytest.mark.parametrize("take_away", [remove, put_another_in_its_place])
@on_loop
async def test_a_process_ends_whose_directory_is_taken_away(
    tmp_path: Path, take_away: Callable[[Path], None]
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
            await _until_gone(r, f"{directory} was removed while it ran")
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
    keep(store, range(8))
    assert store.taken_away() == ""
    take_away(taken)
    assert store.taken_away().startswith(str(taken))
    store.close()
    store = DiskStore(options_of(kept, taken, regions=8))
    assert store.taken_away() == ""
    assert 0 < sum(has(store, n) for n in range(8)) < 8, "what the other disk has stays"
    store.close()
