"""kill -9 of the daemon in each phase: engines go on, and what was READY is served again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import grpc
import pytest

from kvd_proto.v1 import operator_pb2
from tests.client.content import block_hashes
from tests.control.daemon_rig import Caller
from tests.faults.probe import Probe
from tests.faults.scene import MakeScene, Scene, freeze, pin_mid_load
from tests.waiting import wait_until

BLOCK = 64 << 10
COUNT = 384
PROMPTS = [f"prompt {number}" for number in range(6)]
MOST = 40  # blocks of a prompt in the busy tests; all of them together fit the pool


@pytest.fixture
def engine(scene: Scene) -> Probe:
    """An engine that has stored something."""
    made = scene.engine("one", block_bytes=BLOCK, num_blocks=400)
    assert made.store("old", 8) == 8
    return made


def kill(scene: Scene) -> None:
    scene.kill_daemon()


def restart(scene: Scene, *engines: Probe) -> None:
    """Start it again; the engines find it by themselves."""
    scene.daemon.start()
    for engine in engines:
        engine.wait_usable()


def test_daemon_killed_while_idle_serves_everything_again(scene: Scene, engine: Probe) -> None:
    kill(scene)
    assert engine.load("old", 8) == 0  # a miss, not an error
    restart(scene, engine)
    assert engine.load("old", 8) == 8
    assert engine.store("new", 8) == 8


def test_daemon_killed_with_a_store_not_ready_has_none_of_it(scene: Scene, engine: Probe) -> None:
    engine.ask("store", prefix="held", count=16, hold=True, wait=False)
    wait_until(lambda: scene.status().pool.slots_reserved == 16, "the reservation")
    kill(scene)
    engine.ask("ready")
    assert engine.ask("pump")["idle"]
    restart(scene, engine)
    assert engine.hits("held", 16) == (0, 0)
    assert scene.status().pool.slots_ready == 8
    assert engine.load("old", 8) == 8


def test_daemon_killed_half_way_through_a_store_has_no_torn_block(
    scene: Scene, engine: Probe
) -> None:
    [mover] = scene.movers_of(engine)
    prefix = scene.pin_mid_store(engine, mover, COUNT, BLOCK)
    ready = scene.status().pool.slots_ready
    kill(scene)
    wait_until(lambda: not Path(f"/proc/{mover}").exists(), "its mover's end")
    assert engine.ask("pump")["idle"]
    restart(scene, engine)
    assert scene.status().pool.slots_ready == ready
    found, call = engine.hits(prefix, COUNT)
    assert found == call < COUNT
    assert engine.load(prefix, COUNT) == call
    assert engine.load("old", 8) == 8


def test_daemon_killed_half_way_through_a_load_fails_that_request_and_keeps_the_blocks(
    scene: Scene, engine: Probe
) -> None:
    assert engine.store("long", COUNT) == COUNT
    [mover] = scene.movers_of(engine)
    request = pin_mid_load(engine, mover, "long", COUNT)
    kill(scene)
    assert request in engine.ask("pump")["failed"]
    assert engine.ask("match_again", request=request)["found"] == 0
    restart(scene, engine)
    assert engine.load("long", COUNT) == COUNT


def test_daemon_killed_in_the_middle_of_a_clear_serves_nothing_of_it(own_scene: MakeScene) -> None:
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("old", 64) == 64
    kill(scene)
    scene.daemon.module = "tests.faults.slow_clear"
    restart(scene, engine)
    assert engine.hits("old", 64)[1] == 64
    clearing = threading.Thread(target=_clear_in_vain, args=(scene.daemon.socket,))
    clearing.start()
    wait_until(lambda: scene.status().pool.slots_ready == 61, "the first pieces")
    assert engine.hits("old", 64)[1] == 0, "a block of a cleared namespace was found"
    assert engine.store("new", 8) == 8
    assert scene.status().pool.slots_ready == 61 + 8
    kill(scene)
    clearing.join()
    scene.daemon.module = "kvd"
    restart(scene, engine)
    assert engine.hits("old", 64) == (0, 0)
    assert engine.load("new", 8) == 8
    assert scene.status().pool.slots_ready == 8


def _clear_in_vain(socket: str) -> None:
    caller = Caller(socket)
    with pytest.raises(grpc.RpcError):
        caller.call(caller.operator.Clear, operator_pb2.ClearRequest())
    caller.close()


def test_daemon_killed_after_a_clear_was_answered_has_nothing_of_it(own_scene: MakeScene) -> None:
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("old", 64) == 64
    scene.clear()
    assert scene.status().pool.slots_ready == 0
    assert engine.store("old", 8) == 8
    kill(scene)
    restart(scene, engine)
    assert engine.hits("old", 64)[1] == 8
    assert engine.load("old", 8) == 8
    assert scene.status().pool.slots_ready == 8


def test_daemon_killed_while_leases_are_held_serves_what_they_held(
    scene: Scene, engine: Probe
) -> None:
    assert engine.ask("match", request="r", prefix="old", count=8)["found"] == 8
    kill(scene)
    engine.ask("finish", request="r")
    restart(scene, engine)
    assert engine.load("old", 8) == 8
    assert all(session.leases == 0 for session in scene.status().sessions)


def test_daemon_killed_while_its_last_words_are_unread_serves_only_whole_blocks(
    scene: Scene, engine: Probe
) -> None:
    # The mover has copied everything, but control, frozen, has not written it down.
    engine.ask("store", prefix="unheard", count=16, hold=True, wait=False)
    wait_until(lambda: scene.status().pool.slots_reserved == 16, "the reservation")
    freeze(scene.daemon.pid)
    engine.ask("ready")
    wait_until(lambda: scene.copied_blocks("unheard", 16, BLOCK) == 16, "the copies")
    kill(scene)
    assert engine.ask("pump")["idle"]
    restart(scene, engine)
    assert engine.hits("unheard", 16) == (0, 0)


@pytest.mark.slow
def test_daemon_killed_at_random_under_load_serves_every_block_reported_as_stored(
    scene: Scene,
) -> None:
    engines = scene.engines("one", "two", block_bytes=BLOCK, num_blocks=400)
    stored: set[str] = set()  # the record of what must be there, kept outside the daemon
    dice = random.Random(11)
    for _ in range(4):
        for engine in engines:
            engine.order("churn", prefixes=PROMPTS, rounds=40, most=MOST)
        time.sleep(dice.uniform(0.02, 0.25))
        kill(scene)
        for engine in engines:
            assert engine.answer()["wrong"] == []
            stored.update(engine.ask("take_stored"))
        if dice.random() < 0.5:
            kill_while_starting(scene, dice.uniform(0.1, 0.6))
        restart(scene, *engines)
        for engine in engines:
            check_against(stored, engine)
    assert stored


@pytest.mark.slow
def test_daemon_killed_while_rows_change_hands_never_serves_a_wrong_byte(
    own_scene: MakeScene,
) -> None:
    # Two namespaces with blocks of two sizes want more than there is, so rows move between
    # them: blocks are evicted, rows unmapped, zeroed and granted anew when the kill comes.
    scene = own_scene(pool_bytes=8 << 20)
    engines = [scene.engine("one"), scene.engine("two", model="other", block_bytes=16 << 10)]
    dice = random.Random(5)
    for turn in range(3):
        for engine in engines:
            engine.order("churn", prefixes=PROMPTS, rounds=12, most=200)
        time.sleep(dice.uniform(0.1, 0.6))
        kill(scene)
        for engine in engines:
            assert engine.answer()["wrong"] == []
        restart(scene, *engines)
        for engine in engines:
            found = engine.ask("verify", prefixes=PROMPTS, most=200)
            assert [answer["wrong"] for answer in found.values()] == [[]] * len(PROMPTS)
            # A row may be on its way from the other namespace: then there is room soon.
            prompt = f"turn {turn}"
            wait_until(partial(stores_and_loads, engine, prompt), "room")
        assert scene.busy_slots() == 0


def stores_and_loads(engine: Probe, prompt: str) -> bool:
    engine.store(prompt, 40)
    return engine.load(prompt, 40) == 40


def kill_while_starting(scene: Scene, after_s: float) -> None:
    """Begin a start and kill it before or just after it is through."""

    def strike() -> None:
        time.sleep(after_s)
        wait_until(lambda: scene.daemon.is_started, "its start")
        os.kill(scene.daemon.pid, signal.SIGKILL)

    striking = threading.Thread(target=strike)
    striking.start()
    with contextlib.suppress(AssertionError):  # it ended while it was waited for
        scene.daemon.start()
    striking.join()
    scene.daemon.kill()


def check_against(stored: Iterable[str], engine: Probe) -> None:
    """All that was reported as stored is found, and every byte that is found is right."""
    found = engine.ask("verify", prefixes=PROMPTS, most=MOST)
    for prompt, answer in found.items():
        keys = [key.hex() for key in block_hashes(prompt, MOST)]
        due = next((n for n, key in enumerate(keys) if key not in stored), MOST)
        assert answer["wrong"] == []
        assert answer["loaded"] == answer["found"] >= due, prompt
