"""A store whose keys another engine has in flight: what it says, and what comes of them."""

from __future__ import annotations

from kvd_proto.v1 import common_pb2
from tests.control.daemon_rig import RawEngine, block, identity, store_job
from tests.faults.scene import Scene
from tests.waiting import wait_until

MISS, HIT, PENDING = 0, 1, 2
DONE, PARTIAL = common_pb2.JOB_STATUS_DONE, common_pb2.JOB_STATUS_PARTIAL
COUNT = 8


def test_a_store_never_says_done_for_keys_that_another_engine_then_fails_to_store(
    scene: Scene,
) -> None:
    leader = RawEngine(scene.daemon.socket, identity=identity("leader"))
    second = RawEngine(scene.daemon.socket, identity=identity("second"))
    leader.scheduler.step(stores=[store_job(1, [1, 2, 3, 4], [0, 1, 2, 3])])
    ended = second.store({key: block(key) for key in (3, 4, 5, 6)})
    assert (ended.status, ended.blocks, ended.left) == (PARTIAL, 2, 2)
    assert second.scheduler.statuses([3, 4, 5, 6]) == [PENDING, PENDING, HIT, HIT]
    leader.close()
    wait_until(lambda: second.scheduler.statuses([3, 4]) == [MISS, MISS], "the leader's failure")
    again = second.store({key: block(key) for key in (3, 4, 5, 6)})
    assert (again.status, again.blocks, again.left) == (DONE, 2, 0)
    assert second.load([3, 4, 5, 6]) == [block(key) for key in (3, 4, 5, 6)]
    second.close()


def test_an_engine_stores_what_it_left_to_another_that_died(scene: Scene) -> None:
    leader, second = scene.engines("leader", "second")
    leader.ask("store", prefix="p", count=COUNT, wait=False, hold=True)
    wait_until(lambda: scene.status().pool.slots_reserved == COUNT, "the leader's store")
    said = second.ask("store", prefix="p", count=COUNT, finish=False)
    assert said["stored"] == 0, "it believes to be stored what another has in flight"
    leader.kill()
    wait_until(lambda: scene.status().pool.slots_reserved == 0, "the leader's failure")
    healed = second.ask("go_on", request=said["request"], count=COUNT)
    assert healed["stored"] == COUNT
    assert scene.engine("third").load("p", COUNT) == COUNT


def test_an_engine_hears_that_what_it_left_to_another_was_stored(scene: Scene) -> None:
    leader, second = scene.engines("leader", "second")
    leader.ask("store", prefix="q", count=COUNT, wait=False, hold=True)
    wait_until(lambda: scene.status().pool.slots_reserved == COUNT, "the leader's store")
    said = second.ask("store", prefix="q", count=COUNT)
    assert said["stored"] == 0
    leader.ask("ready")
    assert leader.ask("pump")["stored"] == COUNT
    wait_until(lambda: second.ask("pump_for", seconds=0.1)["stored"] == COUNT, "the news")
