"""What only one engine can use: kept while it may come back, gone with it, and never for ever."""

from __future__ import annotations

from functools import partial

from kvd_proto.v1 import engine_pb2
from tests.control.daemon_rig import RawEngine, block, identity, namespace
from tests.faults.probe import Probe
from tests.faults.scene import MakeScene, Scene, links, target
from tests.faults.test_events import Validator, Watcher
from tests.waiting import wait_until

BLOCKS = 30


def pages(scene: Scene) -> int:
    """Index pages that the daemon holds."""
    return len({t for t in map(target, links(scene.daemon.pid)) if "kvd-page" in t})


def rest(scene: Scene) -> tuple[int, int, int, int]:
    """Namespaces, pages, blocks and extents in use."""
    status = scene.status()
    taken = status.pool.extents - status.pool.extents_free
    return len(status.namespaces), pages(scene), status.pool.slots_ready, taken


def own_rest(scene: Scene, before: tuple[int, int, int, int]) -> bool:
    """Whether nothing is left of what came since."""
    return rest(scene) == before


def test_nothing_is_left_of_a_private_engine_that_was_killed(scene: Scene) -> None:
    before = rest(scene)
    validator = Validator()
    watcher = Watcher(scene.daemon.socket, validator)
    engine = scene.engine("alone", unshared=True)
    assert engine.store("prompt", BLOCKS) == BLOCKS
    wait_until(lambda: len(validator.blocks) == BLOCKS, "the news")
    assert pages(scene) == before[1] + 1
    engine.kill()
    wait_until(partial(own_rest, scene, before), "the end of all that was its own")
    wait_until(lambda: not validator.blocks, "the news of the end")
    assert validator.faults == []
    assert "KIND_REMOVED" in validator.kinds
    watcher.stop()


def test_private_engine_that_ends_in_order_leaves_nothing_either(scene: Scene) -> None:
    before = rest(scene)
    engine = scene.engine("alone", unshared=True)
    assert engine.store("prompt", BLOCKS) == BLOCKS
    engine.close()
    wait_until(partial(own_rest, scene, before), "the end of all that was its own")


def test_private_engine_whose_stream_broke_finds_its_blocks_again(scene: Scene) -> None:
    opening = {"namespace": namespace(unshared=True), "identity": identity("alone")}
    first = RawEngine(scene.daemon.socket, **opening)
    assert first.store({1: block(1)}).status == 1
    number = first.scheduler.opened.namespace_id
    first.close()  # of its process nothing has ended
    wait_until(lambda: not scene.status().sessions, "the session's end")
    second = RawEngine(scene.daemon.socket, **opening)
    assert second.scheduler.opened.namespace_id == number
    assert second.load([1]) == [block(1)]
    second.scheduler.send(close=engine_pb2.CloseSession())
    wait_until(lambda: not scene.status().sessions, "the session's orderly end")
    second.close()
    wait_until(lambda: all(n.namespace_id != number for n in scene.status().namespaces), "its end")


def test_private_engine_finds_its_blocks_again_after_the_daemons_restart(
    own_scene: MakeScene,
) -> None:
    scene = own_scene(private_grace_seconds=12)
    engine, gone = scene.engines("alone", "gone", unshared=True)
    assert engine.store("prompt", BLOCKS) == BLOCKS
    assert gone.store("prompt", BLOCKS) == BLOCKS
    scene.kill_daemon()
    gone.kill()
    scene.daemon.start()
    engine.wait_usable()
    assert scene.status().recovered_blocks == 2 * BLOCKS
    assert engine.load("prompt", BLOCKS) == BLOCKS
    wait_until(lambda: scene.status().pool.slots_ready == BLOCKS, "the end of the other's", 60)
    assert engine.load("prompt", BLOCKS) == BLOCKS
    assert len(scene.status().namespaces) == 1


def stored_after_reset(scene: Scene) -> Probe:
    engine = scene.engine("one")
    assert engine.store("before", BLOCKS) == BLOCKS
    engine.ask("reset")
    assert engine.store("after", 2 * BLOCKS) == 2 * BLOCKS
    assert scene.status().pool.slots_ready == 3 * BLOCKS
    return engine


def test_killed_engines_own_epoch_goes_and_the_shared_one_stays(scene: Scene) -> None:
    stored_after_reset(scene).kill()
    wait_until(lambda: scene.status().pool.slots_ready == BLOCKS, "the end of its epoch")
    assert scene.engine("two").load("before", BLOCKS) == BLOCKS


def test_epoch_that_a_second_reset_leaves_goes_at_once(scene: Scene) -> None:
    engine = stored_after_reset(scene)
    engine.ask("reset")
    wait_until(lambda: scene.status().pool.slots_ready == BLOCKS, "the end of the first epoch")
    assert engine.hits("after", BLOCKS) == (0, 0)


def test_own_epoch_waits_for_its_engine_over_a_restart_and_not_for_ever(
    own_scene: MakeScene,
) -> None:
    scene = own_scene(private_grace_seconds=12)
    engine = stored_after_reset(scene)
    scene.kill_daemon()
    scene.daemon.start()
    engine.wait_usable()
    assert engine.load("after", 2 * BLOCKS) == 2 * BLOCKS
    scene.kill_daemon()
    engine.kill()
    scene.daemon.start()
    assert scene.status().pool.slots_ready == 3 * BLOCKS
    wait_until(lambda: scene.status().pool.slots_ready == BLOCKS, "the end of its epoch", 60)
