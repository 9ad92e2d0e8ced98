"""A tier below a real daemon: what was evicted is loaded again, whatever becomes of the tier."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvd.cli.status import as_text
from tests.daemon_process import is_alive
from tests.faults.probe import Probe
from tests.faults.scene import Scene
from tests.ports import free_port
from tests.waiting import wait_until

MIB = 1 << 20
BLOCKS = 1024  # of 4 KiB in 4 MiB
TIER = """
[[tiers]]
name = "memory"
store = "tests.tiers.memory_store:MemoryStore"
deadline_seconds = 3.0
"""


@contextmanager
def tiered(
    tmp_path: Path, tiers: str = TIER, flags: Mapping[str, object] | None = None
) -> Iterator[Scene]:
    """A daemon of 1024 blocks with these tiers."""
    file = tmp_path / "kvd.toml"
    file.write_text(tiers)
    scene = Scene(config=file, **(flags or {}))
    scene.daemon.pool_bytes = 4 * MIB
    try:
        scene.daemon.start()
        yield scene
    finally:
        scene.close()


def tier_of(scene: Scene) -> int | None:
    """Pid of the tier's process, if there is one."""
    pids = scene.daemon.tiers()
    return pids[0] if pids else None


def send(scene: Scene, number: int) -> int:
    """Signal the tier's process; its pid."""
    wait_for_tier(scene)
    pid = tier_of(scene)
    assert pid is not None, "it ended a moment ago"
    os.kill(pid, number)
    return pid


def wait_for_tier(scene: Scene) -> None:
    wait_until(lambda: scene.status().tiers[0].serving, "the tier's process", 30.0)


def test_what_was_evicted_is_loaded_from_the_tier(tmp_path: Path) -> None:
    port = free_port()
    with tiered(tmp_path, TIER, {"http-port": port}) as scene:
        wait_for_tier(scene)
        one, two = scene.engines("one", "two")
        wait_found_below(one, two, "first")
        evict(one)
        page, _ = two.hits("first", 200)
        assert page == 0, "nothing of it is left in host memory"
        assert two.load("first", 200) == 200
        assert two.hits("first", 200) == (200, 200)
        assert one.load("never stored", 50) == 0
        wait_until(lambda: scene.status().tiers[0].blocks >= 200, "word of what the tier holds")
        (tier,) = scene.status().tiers
        assert (tier.name, tier.serving, tier.problem) == ("memory", True, "")
        assert tier.hits >= tier.blocks_promoted >= 200
        assert tier.blocks_written >= 200
        assert tier.bytes == tier.blocks * 4096
        assert tier.capacity_bytes == 1 << 30
        assert tier.misses > 0
        shown = "\n".join(as_text(scene.status()))
        assert "memory  serving" in shown
        page = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        promoted = re.search(r'kvd_tier_blocks_promoted_total\{tier="memory"\} ([0-9.]+)', page)
        assert promoted is not None
        assert float(promoted[1]) >= 200
        assert 'kvd_tier_serving{tier="memory"} 1.0' in page


def evict(engine: Probe) -> None:
    """Fill host memory with other prompts."""
    for number in range(6):
        engine.store(f"other {number}", 200)


def wait_found_below(one: Probe, other: Probe, prompt: str) -> None:
    """Until the other engine loads from the tier what this one stores: a tier that is behind, or
    just begins, is not given all."""

    def found() -> bool:
        one.store(prompt, 200)
        evict(one)
        return other.load(prompt, 200) == 200

    wait_until(found, f"{prompt} from the tier", 60.0)


def settled(scene: Scene) -> bool:
    """No copy of a tier is under way any more: every READY slot could be evicted."""
    pool = scene.status().pool
    return int(pool.slots_reserved + pool.slots_quarantined) == 0


def test_a_tier_that_dies_costs_its_blocks_alone_and_comes_back(tmp_path: Path) -> None:
    with tiered(tmp_path) as scene:
        wait_for_tier(scene)
        one, two = scene.engines("one", "two")
        prompts = [f"prompt {number}" for number in range(12)]
        for engine in (one, two):
            engine.order("churn", prefixes=prompts, rounds=60, most=200)
        for _ in range(3):
            time.sleep(0.3)
            send(scene, signal.SIGKILL)
        answers = [engine.answer() for engine in (one, two)]
        assert [answer["wrong"] for answer in answers] == [[], []]
        assert sum(answer["loaded"] for answer in answers) > 0
        wait_until(lambda: settled(scene), "the end of every copy")
        wait_for_tier(scene)
        wait_found_below(one, two, "first")


def test_a_frozen_tier_costs_nobody_more_than_its_deadline(tmp_path: Path) -> None:
    with tiered(tmp_path) as scene:
        wait_for_tier(scene)
        one, two = scene.engines("one", "two")
        wait_found_below(one, two, "first")
        evict(one)
        tier = send(scene, signal.SIGSTOP)
        assert two.load("first", 200) == 0
        assert tier_of(scene) == tier, "it waited until the process was ended"
        for number in range(20):  # what host memory has, it has
            assert one.store(f"beside {number}", 100) == 100
            assert two.load(f"beside {number}", 100) == 100
        wait_until(lambda: tier_of(scene) not in (None, tier), "another process", 30.0)
        wait_until(lambda: settled(scene), "the end of every copy")
        wait_found_below(one, two, "second")


def test_a_killed_daemon_takes_the_tier_along_and_starts_again_with_it(tmp_path: Path) -> None:
    with tiered(tmp_path) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        assert one.store("first", 200) == 200
        tier = tier_of(scene)
        assert tier is not None
        scene.kill_daemon()
        wait_until(lambda: not is_alive(tier), "the tier's end")
        scene.daemon.start()
        one.wait_usable(1)
        assert one.load("first", 200) == 200
        wait_for_tier(scene)
        wait_found_below(one, one, "second")


def test_a_clear_reaches_the_tier(tmp_path: Path) -> None:
    with tiered(tmp_path) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        evict(one)
        scene.clear()
        assert one.load("first", 200) == 0
        wait_found_below(one, one, "first")


def test_a_store_that_can_not_be_opened_is_tried_again_and_nobody_suffers(tmp_path: Path) -> None:
    with tiered(tmp_path, TIER.replace("MemoryStore", "NoStore")) as scene:
        one = scene.engine("one")
        assert one.store("first", 200) == 200
        assert one.load("first", 200) == 200
        wait_until(lambda: "NoStore" in scene.daemon.log.read_text(), "the tier's failure")
        (tier,) = scene.status().tiers
        assert not tier.serving
        assert "NoStore" in tier.problem
        evict(one)
        assert one.load("first", 200) == 0


DISK = """
[[tiers]]
name = "disk"
kind = "disk"
options = {{directories = "{place}", directory_bytes = "64MiB", region_bytes = "1MiB"}}
"""


def test_a_disk_answers_after_the_node_has_forgotten_everything(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    with tiered(tmp_path, DISK.format(place=place)) as scene:
        wait_for_tier(scene)
        one, two = scene.engines("one", "two")
        wait_found_below(one, two, "first")
        for number in range(6):  # more than host memory holds
            # What comes too soon after others is refused, and evicts nothing.
            wait_until(lambda n=number: one.store(f"more {n}", 200) == 200, "a store")  # type: ignore[misc]
        assert two.hits("first", 200)[0] == 0
        prompts = [f"prompt {number}" for number in range(12)]
        for engine in (one, two):
            engine.order("churn", prefixes=prompts, rounds=30, most=200)
        assert [engine.answer()["wrong"] for engine in (one, two)] == [[], []]
        wait_until(lambda: scene.status().tiers[0].bytes_down == 0, "the last writes")
        for engine in (one, two):
            engine.kill()
        scene.end_daemon()
        shutil.rmtree(scene.daemon.pool)  # as after a reboot: a tmpfs is empty
        scene.daemon.pool.mkdir()
        scene.daemon.start()
        wait_until(lambda: scene.status().tiers[0].blocks > 200, "what the disk holds", 30.0)
        third = scene.engine("third")
        assert third.load("first", 200) == 200


def test_a_killed_daemon_leaves_nothing_wrong_on_disk(tmp_path: Path) -> None:
    with tiered(tmp_path, DISK.format(place=tmp_path / "disk")) as scene:
        engine = scene.engine("one")
        prompts = [f"prompt {number}" for number in range(12)]
        for _ in range(4):
            wait_for_tier(scene)
            generation = engine.wait_usable()
            engine.order("churn", prefixes=prompts, rounds=15, most=200)
            time.sleep(0.5)
            scene.kill_daemon()
            assert engine.answer()["wrong"] == []
            shutil.rmtree(scene.daemon.pool)
            scene.daemon.pool.mkdir()
            scene.daemon.start()
            engine.wait_usable(generation)
        wait_for_tier(scene)
        answers = engine.ask("verify", prefixes=prompts, most=200)
        assert [answer["wrong"] for answer in answers.values()] == [[]] * len(prompts)


def lasting(tmp_path: Path) -> str:
    options = f'\noptions = {{ path = "{tmp_path / "blocks"}" }}\n'
    return TIER.replace("memory_store:MemoryStore", "lasting_store:LastingStore") + options


def test_what_a_store_kept_is_loaded_from_it_after_a_restart(tmp_path: Path) -> None:
    with tiered(tmp_path, lasting(tmp_path)) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        scene.kill_daemon()
        scene.daemon.start()
        one.wait_usable(1)
        wait_for_tier(scene)
        wait_until(lambda: one.load("first", 200) == 200, "what the store kept", 30.0)


def test_a_clear_lasts_longer_than_the_daemon(tmp_path: Path) -> None:
    with tiered(tmp_path, lasting(tmp_path)) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        scene.clear()
        wait_found_below(one, one, "second")
        scene.kill_daemon()
        scene.daemon.start()
        one.wait_usable(1)
        wait_for_tier(scene)
        wait_until(lambda: one.load("second", 200) == 200, "what was stored since", 30.0)
        assert one.load("first", 200) == 0


def remove(table: Path) -> None:
    table.unlink()


def empty(table: Path) -> None:
    os.truncate(table, 0)


@pytest.mark.parametrize("lose", [remove, empty])
def test_what_was_cleared_is_not_found_though_the_table_of_clears_is_lost(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    tiers = DISK.format(place=tmp_path / "disk")
    with tiered(tmp_path, tiers) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        one.kill()
        for written in ("", tiers):  # a clear while the disk is not in the file
            scene.end_daemon()
            (tmp_path / "kvd.toml").write_text(written)
            if written:
                lose(scene.daemon.pool / "generations.table")
            scene.daemon.start()
            if not written:
                scene.clear()
        wait_for_tier(scene)
        wait_until(lambda: scene.status().tiers[0].blocks >= 200, "what the disk holds", 30.0)
        two = scene.engine("two")
        assert two.load("first", 200) == 0
        wait_found_below(two, two, "second")


@pytest.mark.parametrize("cleared", [False, True])
def test_a_clear_reaches_namespaces_that_the_daemon_does_not_know(
    tmp_path: Path, cleared: bool
) -> None:
    with tiered(tmp_path, lasting(tmp_path)) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        one.kill()
        scene.end_daemon()
        shutil.rmtree(scene.daemon.pool)
        scene.daemon.pool.mkdir()
        scene.daemon.start()
        wait_for_tier(scene)
        if cleared:
            scene.clear()
        two = scene.engine("two")
        wait_until(lambda: scene.status().tiers[0].capacity_bytes > 0, "what the tier holds")
        if cleared:
            assert two.load("first", 200) == 0
        else:
            wait_until(lambda: two.load("first", 200) == 200, "what was stored before", 30.0)


def test_a_clear_takes_blocks_off_the_disk_for_good(tmp_path: Path) -> None:
    with tiered(tmp_path, DISK.format(place=tmp_path / "disk")) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        scene.clear()
        wait_until(lambda: scene.status().tiers[0].blocks == 0, "the disk to be empty", 30.0)
        wait_found_below(one, one, "second")
        wait_until(lambda: scene.status().tiers[0].bytes_down == 0, "the last writes")
        one.kill()
        scene.end_daemon()
        shutil.rmtree(scene.daemon.pool)  # where it stands what was cleared
        scene.daemon.pool.mkdir()
        scene.daemon.start()
        wait_until(lambda: scene.status().tiers[0].blocks > 200, "what the disk holds", 30.0)
        two = scene.engine("two")
        assert two.load("first", 200) == 0


def shared(tmp_path: Path) -> str:
    """A store that nodes share."""
    options = f'path = "{tmp_path / "blocks"}", stubborn = "{tmp_path / "stubborn"}"'
    store = TIER.replace("memory_store:MemoryStore", "lasting_store:LastingStore")
    return f'{store}medium = "REMOTE"\noptions = {{ {options} }}\n'


def become_another_node(scene: Scene) -> None:
    scene.kill_daemon()
    shutil.rmtree(scene.daemon.pool)
    scene.daemon.pool.mkdir()
    scene.daemon.start()
    wait_for_tier(scene)


def test_nodes_share_what_is_stored_after_one_of_them_cleared(tmp_path: Path) -> None:
    with tiered(tmp_path, shared(tmp_path)) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        scene.clear()
        wait_found_below(one, one, "second")
        wait_until(lambda: scene.status().tiers[0].bytes_down == 0, "the last writes")
        one.kill()
        become_another_node(scene)
        two = scene.engine("two")
        wait_until(lambda: two.load("second", 200) == 200, "what the other node stored", 30.0)
        assert two.load("first", 200) == 0


@pytest.mark.parametrize("everything", [False, True])
def test_a_clear_that_a_shared_store_did_not_do_yet_lasts_longer_than_the_daemon(
    tmp_path: Path, everything: bool
) -> None:
    stubborn = tmp_path / "stubborn"
    with tiered(tmp_path, shared(tmp_path)) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        stubborn.touch()
        scene.clear(0 if everything else scene.status().namespaces[0].namespace_id)
        generation = 1
        for _ in range(2):
            scene.kill_daemon()
            scene.daemon.start()
            generation = one.wait_usable(generation)
            wait_for_tier(scene)
            wait_until(lambda: scene.status().tiers[0].blocks >= 200, "what the store still holds")
            assert one.load("first", 200) == 0
            tier = scene.status().tiers[0]
            assert tier.all_undeleted is everything
            assert tier.namespaces_undeleted == (0 if everything else 1)
        stubborn.unlink()
        wait_found_below(one, one, "second")
        tier = scene.status().tiers[0]
        assert (tier.all_undeleted, tier.namespaces_undeleted) == (False, 0)
        assert one.load("first", 200) == 0
        scene.kill_daemon()
        scene.daemon.start()
        one.wait_usable(generation)
        wait_for_tier(scene)
        wait_until(lambda: one.load("second", 200) == 200, "what was stored since", 30.0)


def test_a_clear_that_a_shared_store_did_not_do_yet_is_not_done_by_another_one(
    tmp_path: Path,
) -> None:
    """The store is not in the file for a while, and another one is."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stubborn = tmp_path / "stubborn"
    one_store = shared(tmp_path)
    another = shared(elsewhere).replace('name = "memory"', 'name = "other"')
    with tiered(tmp_path, one_store) as scene:
        wait_for_tier(scene)
        one = scene.engine("one")
        wait_found_below(one, one, "first")
        stubborn.touch()
        scene.clear()
        generation = 1
        for store in (another, one_store):
            scene.kill_daemon()
            (tmp_path / "kvd.toml").write_text(store)
            scene.daemon.start()
            generation = one.wait_usable(generation)
            wait_for_tier(scene)
            if store is another:
                wait_found_below(one, one, "second")  # it serves, so it has deleted what it should
                stubborn.unlink()
        wait_found_below(one, one, "third")
        assert one.load("first", 200) == 0


def test_the_end_of_engines_is_not_held_up_by_a_tier(tmp_path: Path) -> None:
    with tiered(tmp_path) as scene:
        wait_for_tier(scene)
        scene.engine("one")
        (mover,) = scene.daemon.movers()
        assert mover != tier_of(scene)
        scene.end_engines()
        assert scene.daemon.movers() == []
