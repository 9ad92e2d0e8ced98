"""A short run of the chaos, and that it notices what it is there to notice."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.chaos import held
from tests.chaos.failing_daemon import VARIABLE
from tests.chaos.held import SPARE_DESCRIPTORS, SPARE_FILES, SPARE_MIB, Held
from tests.chaos.loop import Chaos, Setting, Worst, engines_of, episode
from tests.chaos.restless import RestlessDaemon
from tests.faults.scene import MIB, Scene
from tests.waiting import wait_until

SETTING = Setting(roomy=True, tier=False, extent_bytes=MIB, pages="", own_tmpfs=False)
AT_REST = Held(5, 100, 40, 20, 40.0, 30)


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    scene, dice = Scene(), random.Random(1)
    daemon = RestlessDaemon(scene.directory, scene.directory_of_pool, dice)
    daemon.options = {"policy": ("lru",)}
    daemon.flags, daemon.pool_bytes = scene.daemon.flags, 32 * MIB
    scene.daemon = daemon
    engines = engines_of(SETTING)[:1]
    made = Chaos(scene, dice, engines, daemon=daemon, expected=tmp_path / "expected")
    try:
        yield made
    finally:
        scene.close()


def test_all_is_whole_after_a_turn_of_chaos() -> None:
    worst = Worst()
    done = episode(random.Random(3), SETTING, time.monotonic() + 300.0, 1, worst)
    assert done["turns"] == 1
    assert done["verified"] >= done["expected"] > 0
    assert not worst.leaks


@pytest.mark.parametrize("manner", ["torn", "after"])
def test_daemon_dies_at_the_step_that_it_is_told_to(chaos: Chaos, manner: str) -> None:
    chaos.daemon.environment[VARIABLE] = f"slots.table:4:{manner}"
    chaos.daemon._armed = chaos.daemon.environment[VARIABLE]
    chaos.daemon.start()
    chaos.start()
    (engine,) = chaos.engines
    probe = chaos._probe(engine)
    assert probe.store("first", 8) == 8  # one write for the bodies, one for the states
    probe.order("store", prefix="second", count=8)
    wait_until(chaos._revive, "the daemon's death")
    assert chaos.daemon.done == {f"died {manner} slots.table": 1}
    probe.answer()
    probe.wait_usable(after=1)
    assert probe.load("first", 8) == 8
    assert probe.load("second", 8) in {"torn": (4,), "after": (8,)}[manner]


def test_lost_block_ends_the_loop(chaos: Chaos, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.probe.ANSWER_SECONDS", 10.0)
    chaos.daemon.start()
    chaos.start()
    (engine,) = chaos.engines
    assert chaos._probe(engine).store("kept", 8) == 8
    chaos.stored[engine.model].update(chaos._probe(engine).ask("take_stored"))
    chaos._remember()
    chaos._check(["kept"])
    chaos.scene.kill_daemon()
    table = np.memmap(chaos.daemon.pool / "slots.table", dtype=np.uint64).reshape(-1, 16)
    table[np.flatnonzero(table[:, 0] & np.uint64(0xFF) == 1)[3], 9] ^= np.uint64(1)
    del table
    chaos.daemon.start()
    chaos._probe(engine).wait_usable(after=1)
    with pytest.raises(AssertionError, match="kept"):
        chaos._check(["kept"])


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Held(6, 100, 40, 20, 40.0, 30), "6 processes"),
        (Held(5, 101 + SPARE_DESCRIPTORS, 40, 20, 40.0, 30), "daemon_descriptors"),
        (Held(5, 100, 41 + SPARE_DESCRIPTORS, 20, 40.0, 30), "mover_descriptors"),
        (Held(5, 100, 40, 21 + SPARE_DESCRIPTORS, 40.0, 30), "tier_descriptors"),
        (Held(5, 100, 40, 20, 41.0 + SPARE_MIB, 30), "MiB"),
        (Held(5, 100, 40, 20, 40.0, 31 + SPARE_FILES), "files"),
    ],
    ids=["process", "daemon", "mover", "tier", "memory", "files"],
)
def test_what_grows_is_named(now: Held, said: str) -> None:
    assert AT_REST.beyond(AT_REST, 5) == []
    (wrong,) = now.beyond(AT_REST, 5)
    assert said in wrong


def test_descriptors_of_this_process_are_seen(tmp_path: Path) -> None:
    before = held.descriptors(os.getpid())
    with (tmp_path / "one").open("w"), (tmp_path / "extent.kv").open("w"):
        assert held.descriptors(os.getpid()) == before + 1
