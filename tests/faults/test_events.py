"""The event stream, checked as an etcd watch is: ordered, whole, resumable, equal to the index."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvd.control.services.events import MAX_WATCHERS_OF_A_USER
from kvd_proto.v1 import events_pb2, operator_pb2
from tests.client.content import HASH_BYTES, block_hashes
from tests.control.daemon_rig import Caller, refusal
from tests.faults.scene import MakeScene, Scene
from tests.faults.stand import resident_kib
from tests.waiting import wait_until

Place = tuple[int, str, str, int, bytes]  # namespace, epoch, account, group, hash


class Validator:
    """What a watcher knows, by the stream alone; `faults` names every broken promise."""

    def __init__(self) -> None:
        self.blocks: set[Place] = set()
        self.incarnation = b""
        self.sequence = 0
        self.faults: list[str] = []
        self.kinds: set[str] = set()
        self.in_snapshot = False
        self.snapshots = 0

    def take(self, message: events_pb2.WatchEventsResponse) -> None:
        if message.snapshot and not self.in_snapshot:
            self.blocks.clear()
            self.in_snapshot = True
            self.snapshots += 1
            self.incarnation = message.incarnation
        elif message.incarnation != self.incarnation:
            self.faults.append("another incarnation without a snapshot")
        elif message.sequence < self.sequence:
            self.faults.append(f"sequence {message.sequence} after {self.sequence}")
        for event in message.events:
            self._apply(event)
        self.sequence = message.sequence
        if message.snapshot_end:
            self.in_snapshot = False

    def _apply(self, event: events_pb2.CacheEvent) -> None:
        kind = events_pb2.CacheEvent.Kind.Name(event.kind)
        self.kinds.add(kind)
        places = {
            (event.namespace_id, event.epoch, event.account, event.group, each)
            for each in cut(event.hashes)
        }
        if kind == "KIND_STORED":
            if places & self.blocks and not self.in_snapshot:
                self.faults.append("a block was announced twice")
            self.blocks |= places
        elif kind == "KIND_REMOVED":
            if not places <= self.blocks and not self.in_snapshot:
                self.faults.append("a block was removed that had not been announced")
            self.blocks -= places
        else:
            self.blocks = {place for place in self.blocks if place[0] != event.namespace_id}


def cut(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


class Watcher:
    """Follows the stream on a thread, until the daemon or `stop` ends it."""

    def __init__(self, socket: str, validator: Validator, resume: bool = False) -> None:
        self.validator = validator
        self._caller = Caller(socket)
        request = events_pb2.WatchEventsRequest()
        if resume:
            request.incarnation = validator.incarnation
            request.after_sequence = validator.sequence
        events = self._caller.events
        self._stream: Any = events.WatchEvents(request, metadata=self._caller.metadata)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for message in self._stream:
                self.validator.take(message)
        except grpc.RpcError:
            pass

    def stop(self) -> None:
        self._stream.cancel()
        self._thread.join(10)
        self._caller.close()


def index_of(scene: Scene) -> set[Place]:
    """What the daemon says now, by a snapshot of its own."""
    validator = Validator()
    watcher = Watcher(scene.daemon.socket, validator)
    wait_until(lambda: bool(validator.snapshots) and not validator.in_snapshot, "a snapshot")
    watcher.stop()
    assert len(validator.blocks) == scene.status().pool.slots_ready
    return validator.blocks


@pytest.fixture
def small(own_scene: MakeScene) -> Scene:
    """1024 blocks, so that the work below evicts."""
    return own_scene(pool_bytes=4 << 20)


def agrees(scene: Scene, validator: Validator) -> Callable[[], bool]:
    expected = index_of(scene)
    return lambda: not validator.in_snapshot and validator.blocks == expected


def test_events_from_the_start_to_the_end_are_the_index(small: Scene) -> None:
    validator = Validator()
    watcher = Watcher(small.daemon.socket, validator)
    engines = small.engines("one", "two")
    prompts = [f"prompt {number}" for number in range(8)]
    for engine in engines:
        engine.order("churn", prefixes=prompts, rounds=15, most=256)
    for engine in engines:
        assert engine.answer()["wrong"] == []
    wait_until(agrees(small, validator), "the index after evictions")
    engines[0].ask("reset")
    assert engines[0].store("of another epoch", 20) == 20
    wait_until(agrees(small, validator), "the index with another epoch")
    small.clear()
    wait_until(lambda: validator.blocks == set(), "nothing after a clear")
    assert engines[1].store("after", 30) == 30
    wait_until(agrees(small, validator), "the index after a clear")
    watcher.stop()
    assert engines[1].store("unwatched", 30) == 30
    watcher = Watcher(small.daemon.socket, validator, resume=True)
    wait_until(agrees(small, validator), "the index after a resumption")
    assert validator.snapshots == 1  # it went on where it had stopped
    known = set(validator.blocks)
    small.kill_daemon()
    watcher.stop()
    small.daemon.start()
    watcher = Watcher(small.daemon.socket, validator, resume=True)
    wait_until(lambda: validator.snapshots == 2 and not validator.in_snapshot, "a new snapshot")
    assert validator.blocks == known
    for engine in engines:
        engine.wait_usable()
    assert engines[1].store("later", 30) == 30
    wait_until(agrees(small, validator), "the index after a restart")
    watcher.stop()
    assert validator.faults == []
    assert validator.kinds == {"KIND_STORED", "KIND_REMOVED", "KIND_CLEARED"}


def test_block_is_announced_by_the_time_its_store_is_reported(small: Scene) -> None:
    validator = Validator()
    watcher = Watcher(small.daemon.socket, validator)
    engine = small.engine("one")
    for number in range(30):
        assert engine.store(f"prompt {number}", 4) == 4
    keys = {key for number in range(30) for key in block_hashes(f"prompt {number}", 4)}
    wait_until(lambda: {place[4] for place in set(validator.blocks)} == keys, "the events")
    watcher.stop()
    assert validator.faults == []


def test_watcher_of_one_namespace_hears_of_no_other(small: Scene) -> None:
    engine = small.engine("one", model="watched")
    other = small.engine("two", model="other")
    namespaces = small.caller.call(
        small.caller.operator.ListNamespaces, operator_pb2.ListNamespacesRequest()
    ).namespaces
    [watched] = [n.namespace_id for n in namespaces if n.fields["model"] == "watched"]
    caller = Caller(small.daemon.socket)
    request = events_pb2.WatchEventsRequest(namespace_id=watched)
    stream: Any = caller.events.WatchEvents(request, metadata=caller.metadata)
    heard: list[events_pb2.CacheEvent] = []
    assert next(stream).snapshot
    other.store("a", 8)
    engine.store("a", 8)
    while sum(len(cut(event.hashes)) for event in heard) < 8:
        heard += next(stream).events
    assert {event.namespace_id for event in heard} == {watched}
    stream.cancel()
    caller.close()


def test_honest_watcher_beside_many_that_never_read_gets_its_snapshot_and_the_news(
    own_scene: MakeScene,
) -> None:
    scene = own_scene()
    engine = scene.engine("one", num_blocks=4096)
    assert engine.store("prompt", 4000) == 4000
    request = events_pb2.WatchEventsRequest()
    deaf = [Caller(scene.daemon.socket) for _ in range(MAX_WATCHERS_OF_A_USER - 2)]
    streams = [c.events.WatchEvents(request, metadata=c.metadata) for c in deaf]
    assert next(streams[-1]).snapshot
    validator = Validator()
    watcher = Watcher(scene.daemon.socket, validator)
    wait_until(lambda: len(validator.blocks) == 4000 and not validator.in_snapshot, "a snapshot")
    assert engine.store("more", 50) == 50
    wait_until(lambda: len(validator.blocks) == 4050, "the news")
    watcher.stop()
    assert validator.faults == []
    for caller in deaf:
        caller.close()


def test_user_with_as_many_watchers_as_it_may_have_is_told_so(own_scene: MakeScene) -> None:
    scene = own_scene()
    callers = [Caller(scene.daemon.socket) for _ in range(MAX_WATCHERS_OF_A_USER)]
    request = events_pb2.WatchEventsRequest()
    streams: list[Any] = [c.events.WatchEvents(request, metadata=c.metadata) for c in callers]
    assert all(next(stream).snapshot for stream in streams)
    last = callers[-1]  # there may be no more connections of tools than watchers
    one_more: Any = last.events.WatchEvents(request, metadata=last.metadata, timeout=25)
    code, reason, _ = refusal(lambda: next(one_more))
    assert (code, reason) == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    for caller in callers:
        caller.close()


def test_watchers_that_never_read_cost_the_daemon_little_each(own_scene: MakeScene) -> None:
    scene = own_scene()
    engine = scene.engine("one", num_blocks=4096)
    for number in range(2):
        assert engine.store(f"prompt {number}", 4000) == 4000
    pid = scene.daemon.pid
    before = resident_kib(pid)
    deaf = [Caller(scene.daemon.socket) for _ in range(40)]
    request = events_pb2.WatchEventsRequest()
    streams = [c.events.WatchEvents(request, metadata=c.metadata) for c in deaf]
    assert next(streams[-1]).snapshot
    time.sleep(0.5)
    grown = resident_kib(pid) - before
    assert engine.store("meanwhile", 100) == 100
    for caller in deaf:
        caller.close()
    assert grown < 40 * 256, f"{grown} KiB"  # 8000 hashes alone are 250 KiB
