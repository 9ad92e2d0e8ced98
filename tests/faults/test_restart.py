"""Restarts: warm after an orderly stop and after a crash, cold where that can't be."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import numpy.typing as npt
import pytest

from kvd.linux.proc import start_time_of
from kvd.pool import sealed_json
from kvd.pool.ownership import MoverList, MoverRecord
from tests.client.content import block_hashes
from tests.faults.conftest import Patched
from tests.faults.probe import Probe
from tests.faults.scene import MakeScene, Scene
from tests.waiting import wait_until


@pytest.fixture
def stocked(own_scene: MakeScene) -> tuple[Scene, Probe]:
    """A daemon of its own, and an engine that has stored 100 blocks."""
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("a", 60) == 60
    assert engine.store("b", 40) == 40
    return scene, engine


def test_pool_is_warm_after_an_orderly_stop_and_after_a_crash(
    stocked: tuple[Scene, Probe],
) -> None:
    scene, engine = stocked
    for stop in (scene.end_daemon, scene.kill_daemon):
        stop()
        scene.daemon.start()
        engine.wait_usable()
        assert scene.status().recovered_blocks == 100
        assert (engine.load("a", 60), engine.load("b", 40)) == (60, 40)


def test_pool_that_can_not_be_used_starts_cold_and_says_why(stocked: tuple[Scene, Probe]) -> None:
    scene, engine = stocked
    header = scene.daemon.pool / "pool.header"
    stop(scene)
    written = sealed_json.unseal(header.read_bytes())
    assert written is not None
    header.write_bytes(sealed_json.seal({**written, "layout_version": 99}))
    starts_cold(scene, engine, "layout version 99")
    stop(scene)
    header.write_bytes(header.read_bytes()[:-9] + b"nonsense\n")
    starts_cold(scene, engine, "header is damaged")
    stop(scene)
    scene.daemon.pool_bytes *= 2
    starts_cold(scene, engine, "pool_bytes and extent_bytes give 64 extents")


def stop(scene: Scene) -> None:
    scene.end_daemon()


def starts_cold(scene: Scene, engine: Probe, because: str) -> None:
    """Nothing of the old pool is served; the log says why; it works from then on."""
    scene.daemon.log.write_text("")
    scene.daemon.start()
    engine.wait_usable()
    assert because in scene.daemon.log.read_text()
    assert scene.status().recovered_blocks == 0
    assert engine.hits("a", 60) == (0, 0)
    assert engine.store("a", 60) == 60
    assert engine.load("a", 60) == 60


NEVER_KILLS = """
import signal
signal.pidfd_send_signal = lambda *_: None
"""
MAPS_ALL = """
import mmap, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0) for file in files]
print(flush=True)
sys.stdin.read()
"""


def test_mover_that_can_not_be_ended_is_named_with_what_it_keeps(
    own_scene: MakeScene, patched: Patched
) -> None:
    """As if it hung in the kernel: the signal is sent and nothing comes of it."""
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("a", 8) == 8
    engine.close()
    scene.end_daemon()
    extents = sorted((scene.daemon.pool / "extents").glob("*.kv"))
    scene.daemon.environment = patched(NEVER_KILLS)
    with subprocess.Popen(
        [sys.executable, "-c", MAPS_ALL, *map(str, extents)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as orphaned:
        assert orphaned.stdout is not None
        orphaned.stdout.readline()
        began = start_time_of(orphaned.pid)
        assert began is not None
        noted = MoverList(scene.daemon.pool / "movers")
        noted.replace([MoverRecord(orphaned.pid, began)])
        noted.close()
        scene.daemon.start()
        pool = scene.status().pool
        assert pool.slots_quarantined > 0
        log = scene.daemon.log.read_text()
        orphaned.kill()
    size = pool.slots_quarantined * 4096 / (1 << 20)
    assert f"mover {orphaned.pid} of an earlier daemon can't be ended (its state is S)" in log
    assert f"it maps {len(extents)} extents" in log
    assert f"{pool.slots_quarantined} free slots, {size:.1f} MiB" in log


def stamps(scene: Scene, prompt: str, count: int) -> npt.NDArray[np.uint64]:
    """When a prompt's blocks were last used, by the daemon's clock, as their records say."""
    records = np.fromfile(scene.daemon.pool / "slots.table", dtype=np.uint64).reshape(-1, 16)
    keys = set(block_hashes(prompt, count))
    return records[[bytes(record[8:12]) in keys for record in records], 5]


def test_blocks_in_use_outlive_others_after_a_crash(own_scene: MakeScene) -> None:
    scene = own_scene(pool_bytes=4 << 20)
    engine = scene.engine("one")
    assert engine.store("hot", 50) == 50
    for number in range(3):
        assert engine.store(f"cold {number}", 256) == 256
    assert engine.store("rest", 1024 - 50 - 3 * 256) == 1024 - 50 - 3 * 256
    time.sleep(0.1)  # so that the stamps, of 17 ms, tell apart what follows
    before = stamps(scene, "hot", 50)
    assert before.size == 50
    assert engine.load("hot", 50) == 50
    # Only its own will do: others' late uses are noted in the same turn through the rows, or not.
    wait_until(lambda: bool((stamps(scene, "hot", 50) > before.max()).all()), "the stamps")
    scene.kill_daemon()
    scene.daemon.start()
    engine.wait_usable(after=1)
    for number in range(4):
        assert engine.store(f"new {number}", 100) == 100
    assert engine.load("hot", 50) == 50


def test_blocks_whose_records_were_damaged_are_left_out_and_the_log_says_how_many(
    stocked: tuple[Scene, Probe],
) -> None:
    scene, engine = stocked
    scene.kill_daemon()
    path = scene.daemon.pool / "slots.table"
    records = np.fromfile(path, dtype=np.uint64).reshape(-1, 16)
    keys = set(block_hashes("b", 3))
    for record in records:
        if bytes(record[8:12]) in keys:
            record[8] ^= np.uint64(1)
    path.write_bytes(records.tobytes())
    scene.daemon.start()
    engine.wait_usable()
    assert scene.status().recovered_blocks == 97
    log = scene.daemon.log.read_text()
    assert "3 blocks were left out: their records in slots.table are damaged" in log
    assert engine.load("a", 60) == 60
    assert engine.hits("b", 40) == (0, 0)
