"""Many engines at one pool: what one stores all load, byte by byte, and at once."""

from __future__ import annotations

import time

from tests.control.daemon_rig import identity, open_and_close, refusal
from tests.faults.scene import RELEASE_SECONDS, MakeScene, Scene

SHARED = [f"shared {number}" for number in range(4)]


def test_many_engines_store_and_load_the_same_and_different_prompts(own_scene: MakeScene) -> None:
    # 4096 blocks of room for up to 5120 different ones, so that some are evicted meanwhile.
    scene = own_scene(pool_bytes=16 << 20)
    names = ["one", "two", "three", "four"]
    # They compute in no time, so they would rather do that than wait for a daemon without a core.
    engines = scene.engines(*names, silent_after_s=10.0)
    for engine in engines:
        own = [f"{engine.engine_id} {number}" for number in range(4)]
        engine.order("churn", prefixes=SHARED + own, rounds=24, most=256)
    answers = [engine.answer() for engine in engines]
    assert [answer["wrong"] for answer in answers] == [[]] * len(engines)
    assert all(answer["stored"] and answer["loaded"] for answer in answers)
    found = engines[0].ask("verify", prefixes=SHARED, most=256)
    assert [answer["wrong"] for answer in found.values()] == [[]] * len(SHARED)
    assert scene.busy_slots() == 0


def test_store_is_visible_to_another_engine_as_soon_as_it_is_reported(scene: Scene) -> None:
    one, two = scene.engines("one", "two")
    for number in range(60):
        storing, looking = (one, two) if number % 2 else (two, one)
        assert storing.store(f"prompt {number}", 4) == 4
        assert looking.hits(f"prompt {number}", 4) == (4, 4)


def test_reset_moves_one_engine_to_a_new_epoch_and_leaves_the_others_hits(scene: Scene) -> None:
    one, two = scene.engines("one", "two")
    assert one.store("before", 8) == 8
    one.ask("reset")
    assert one.hits("before", 8) == (0, 0)
    assert two.load("before", 8) == 8
    assert one.store("after", 8) == 8
    assert two.hits("after", 8) == (0, 0)
    assert one.load("after", 8) == 8


def test_engine_that_was_reset_keeps_its_epoch_over_a_restart_of_the_daemon(scene: Scene) -> None:
    [engine] = scene.engines("one")
    assert engine.store("before", 8) == 8
    engine.ask("reset")
    assert engine.store("after", 8) == 8
    scene.kill_daemon()
    scene.daemon.start()
    engine.wait_usable()
    assert engine.hits("before", 8) == (0, 0)
    assert engine.load("after", 8) == 8


def test_second_live_engine_of_a_name_is_refused_and_a_dead_ones_name_is_free(
    scene: Scene,
) -> None:
    first = scene.engine("same")

    def open_second() -> None:
        open_and_close(scene.daemon.socket, identity=identity("same", b"2" * 16))

    assert refusal(open_second) == ("ALREADY_EXISTS", "ENGINE_ALREADY_LIVES", "identity.engine_id")
    assert first.store("goes on", 4) == 4
    ended = first.kill()
    open_second()
    assert time.monotonic() - ended < RELEASE_SECONDS
    again = scene.engine("same")
    assert again.load("goes on", 4) == 4
