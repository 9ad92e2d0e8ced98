"""Removals as an engine passes them on: of its own blocks, each once, and none that is untrue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvd_client import event_watch
from kvd_client.event_watch import EventWatch, key_of
from kvd_client.session import DaemonSession
from kvd_client.tier_record import HOST, Key, News
from kvd_proto.v1 import events_pb2, operator_pb2
from tests.client.content import block_hashes
from tests.client.small_engine import SmallEngine
from tests.control.daemon_rig import Caller
from tests.daemon_process import DaemonProcess

PATIENCE_S = 20.0
BLOCKS = 200  # of a prompt; the pool holds 1024
PROMPTS = [f"prompt {number}" for number in range(8)]


def keys_of(prompt: str, blocks: int = BLOCKS) -> list[Key]:
    return [key_of(0, each) for each in block_hashes(prompt, blocks)]


@pytest.fixture
def watched(daemon: DaemonProcess) -> Iterator[Watched]:
    daemon.end()
    daemon.pool_bytes = 4 << 20
    daemon.start()
    made = Watched(daemon)
    yield made
    made.close()


def removed_from_host(watch: EventWatch) -> list[Key]:
    """What has left host memory since the last call; nothing else has happened."""
    news = watch.take()
    assert all(each.place == HOST and each.removed for each in news)
    return [key for each in news for key in each.keys]


class Watched:
    """An engine that announces what it stores, and gathers what it hears of removals."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.engine = SmallEngine(daemon.socket)
        self.engine.wait_usable()
        self.watch = EventWatch(daemon.socket, "test")
        self.removed: list[Key] = []
        self.follow()

    @property
    def session(self) -> DaemonSession:
        session = self.engine.connection.session
        assert isinstance(session, DaemonSession)
        return session

    def follow(self) -> None:
        self.watch.follow(self.session.namespace_id, self.session.epoch)

    def store(self, prompt: str, announced: bool = True) -> None:
        self.engine.store(prompt, prompt, BLOCKS)
        if announced:
            self.watch.announce(keys_of(prompt))

    def resident(self) -> set[Key]:
        """The daemon's own word, in a snapshot."""
        caller = Caller(self.daemon.socket)
        request = events_pb2.WatchEventsRequest(namespace_id=self.session.namespace_id)
        stream = caller.events.WatchEvents(request, metadata=caller.metadata)
        found: set[Key] = set()
        for message in stream:
            for event in message.events:
                cut = range(0, len(event.hashes), event.hash_bytes)
                found |= {key_of(0, event.hashes[at : at + event.hash_bytes]) for at in cut}
            if message.snapshot_end:
                break
        stream.cancel()
        caller.close()
        return found

    def hear(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, f"heard of {len(self.removed)} removals only"
            self.removed += removed_from_host(self.watch)
            time.sleep(0.01)

    def close(self) -> None:
        self.watch.close()
        self.engine.close()


def test_evicted_blocks_are_told_once_and_resident_ones_never(watched: Watched) -> None:
    for prompt in PROMPTS:
        watched.store(prompt)
    announced = {key for prompt in PROMPTS for key in keys_of(prompt)}
    gone = announced - watched.resident()
    assert gone, "the pool is too large for this test"
    watched.hear(lambda: len(watched.removed) >= len(gone))
    assert sorted(watched.removed) == sorted(gone)


def test_without_a_thread_the_engine_goes_on_and_another_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = EventWatch("/nowhere", "test")

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        watch.follow(1, "")
    assert watch.take() == []
    watch.follow(1, "")
    assert watch._thread is not None
    watch.close()
    assert not watch._thread.is_alive()


def test_removals_of_what_was_never_announced_are_not_told(watched: Watched) -> None:
    watched.store(PROMPTS[0], announced=False)
    for prompt in PROMPTS[1:]:
        watched.store(prompt)
    announced = {key for prompt in PROMPTS[1:] for key in keys_of(prompt)}
    gone = announced - watched.resident()
    watched.hear(lambda: len(watched.removed) >= len(gone))
    assert not set(watched.removed) & set(keys_of(PROMPTS[0]))


def test_what_went_while_the_daemon_was_away_is_told_when_it_is_back(watched: Watched) -> None:
    watched.store(PROMPTS[0])
    watched.store(PROMPTS[1])
    watched.daemon.kill()
    for file in watched.daemon.pool.iterdir():
        if file.is_file():
            file.unlink()  # a cold start
    watched.daemon.start()
    watched.engine.wait_usable()
    watched.follow()
    gone = {*keys_of(PROMPTS[0]), *keys_of(PROMPTS[1])}
    watched.hear(lambda: len(watched.removed) >= len(gone))
    assert sorted(watched.removed) == sorted(gone)


def test_what_a_restarted_daemon_still_has_is_not_told(watched: Watched) -> None:
    watched.store(PROMPTS[0])
    watched.daemon.kill()
    watched.daemon.start()
    watched.engine.wait_usable()
    watched.follow()
    for prompt in PROMPTS[1:]:
        watched.store(prompt)
    announced = {key for prompt in PROMPTS for key in keys_of(prompt)}
    gone = announced - watched.resident()
    assert gone
    watched.hear(lambda: len(watched.removed) >= len(gone))
    assert sorted(watched.removed) == sorted(gone)


def test_a_cleared_namespace_is_told_block_by_block(watched: Watched) -> None:
    watched.store(PROMPTS[0])
    caller = Caller(watched.daemon.socket)
    request = operator_pb2.ClearRequest(namespace_id=watched.session.namespace_id)
    caller.call(caller.operator.Clear, request)
    caller.close()
    watched.hear(lambda: len(watched.removed) >= BLOCKS)
    assert sorted(watched.removed) == sorted(keys_of(PROMPTS[0]))


def test_what_the_engine_has_forgotten_is_not_told(watched: Watched) -> None:
    watched.store(PROMPTS[0])
    watched.watch.forget()
    for prompt in PROMPTS[1:]:
        watched.store(prompt)
    announced = {key for prompt in PROMPTS[1:] for key in keys_of(prompt)}
    gone = announced - watched.resident()
    watched.hear(lambda: len(watched.removed) >= len(gone))
    assert not set(watched.removed) & set(keys_of(PROMPTS[0]))


def test_another_epoch_leaves_nothing_of_the_one_before(watched: Watched) -> None:
    watched.store(PROMPTS[0])
    watched.watch.follow(watched.session.namespace_id, "another")
    assert sorted(removed_from_host(watched.watch)) == sorted(keys_of(PROMPTS[0]))


# -- the stream may be ahead of the engine's own reports, or behind them --------------------------


class Stream:
    """A watch that is fed by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.watch = EventWatch("/nowhere", "test", clock=lambda: self.now)
        monkeypatch.setattr(self.watch, "_run", lambda: None)
        self.watch.follow(1, "e")
        self.reading = event_watch.Reading(self.watch._turn, "e", set(), {})

    def tell(self, kind: str, *keys: Key, epoch: str = "e") -> None:
        hashes = b"".join(key[: -event_watch.GROUP_BYTES] for key in keys)
        event = events_pb2.CacheEvent(
            kind=f"KIND_{kind}",
            epoch=epoch,
            hashes=hashes,
            hash_bytes=32,
        )
        self.watch._take_in(event, self.reading)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    return Stream(monkeypatch)


KEY, OTHER = keys_of("hand-fed", 2)


def test_block_that_went_before_it_was_announced_is_told(stream: Stream) -> None:
    stream.tell("STORED", KEY)
    stream.tell("REMOVED", KEY)
    stream.watch.announce([KEY])
    assert removed_from_host(stream.watch) == []  # it may be of before
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == [KEY]
    assert removed_from_host(stream.watch) == []


def test_block_that_is_announced_before_the_stream_says_so_is_not_told(stream: Stream) -> None:
    stream.tell("REMOVED", KEY)
    stream.watch.announce([KEY])
    stream.tell("STORED", KEY)
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == []
    stream.tell("REMOVED", KEY)
    assert removed_from_host(stream.watch) == [KEY]


def test_a_copy_that_is_announced_before_the_one_before_is_told_as_removed_is_there(
    stream: Stream,
) -> None:
    stream.watch.announce([KEY])
    stream.tell("STORED", KEY)
    assert stream.watch.announce([KEY]) == []  # it went meanwhile, and came again
    stream.tell("REMOVED", KEY)
    stream.tell("STORED", KEY)
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == []
    stream.tell("REMOVED", KEY)
    assert removed_from_host(stream.watch) == [KEY]


def test_a_block_in_doubt_goes_with_a_cleared_namespace(stream: Stream) -> None:
    stream.tell("REMOVED", KEY)
    stream.watch.announce([KEY])
    stream.now = event_watch.DOUBT_S
    stream.tell("CLEARED")
    assert removed_from_host(stream.watch) == [KEY]


def test_a_block_that_is_announced_before_a_clear_is_heard_of_is_not_told(stream: Stream) -> None:
    stream.watch.announce([KEY])
    stream.now = event_watch.DOUBT_S
    stream.watch.announce([OTHER])  # stored behind the clear
    stream.tell("CLEARED")
    stream.tell("STORED", OTHER)
    stream.now = 2 * event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == [KEY]
    stream.tell("REMOVED", OTHER)
    assert removed_from_host(stream.watch) == [OTHER]


def test_a_block_that_a_clear_took_just_after_it_was_announced_is_told(stream: Stream) -> None:
    stream.tell("STORED", KEY)
    stream.watch.announce([KEY])
    stream.tell("CLEARED")
    assert removed_from_host(stream.watch) == []  # it may be of after
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == [KEY]


def test_a_copy_that_is_announced_before_the_end_of_anothers_is_heard_of_is_not_told(
    stream: Stream,
) -> None:
    stream.tell("STORED", KEY)  # by another engine
    stream.watch.announce([KEY])
    stream.tell("REMOVED", KEY)  # the other's
    stream.tell("STORED", KEY)
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == []


def test_a_block_in_doubt_is_announced_once(stream: Stream) -> None:
    assert stream.watch.announce([KEY]) == [KEY]
    assert stream.watch.announce([KEY]) == []
    stream.tell("REMOVED", KEY)  # of this copy, or of the one before
    assert stream.watch.announce([KEY]) == [], "nobody was told that it went"
    stream.tell("STORED", KEY)
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == []
    stream.tell("REMOVED", KEY)
    assert removed_from_host(stream.watch) == [KEY]


def test_a_block_that_is_announced_again_behind_its_end_is_told_as_removed(stream: Stream) -> None:
    stream.tell("STORED", KEY)
    stream.watch.announce([KEY])
    stream.now = event_watch.DOUBT_S
    stream.tell("REMOVED", KEY)
    assert removed_from_host(stream.watch) == [KEY]
    stream.watch.announce([KEY])  # of a store that left it to the first
    stream.now = 2 * event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == [KEY]


def test_of_blocks_announced_behind_a_clear_those_of_before_are_told_as_removed(
    stream: Stream,
) -> None:
    stream.tell("STORED", KEY)
    stream.tell("CLEARED")
    stream.tell("STORED", OTHER)
    stream.watch.announce([KEY, OTHER])
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == [KEY]


def test_so_many_blocks_are_known_to_be_stored_since_a_clear(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_watch, "MAX_GONE", 4)
    stream.tell("CLEARED")
    stream.tell("STORED", *keys_of("since", 5))
    stream.watch.announce([KEY])
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == []  # it may be there


@pytest.mark.parametrize("end", [("CLEARED",), ("REMOVED", KEY)], ids=["cleared", "removed"])
def test_a_block_that_is_stored_anew_is_told_again_however_late_the_stream_is(
    stream: Stream, end: tuple[str, *tuple[Key, ...]]
) -> None:
    stream.watch.announce([KEY])
    stream.tell("STORED", KEY)
    assert stream.watch.announce([KEY]) == []  # it went meanwhile, and came again
    stream.now = event_watch.DOUBT_S
    stream.tell(*end)
    assert removed_from_host(stream.watch) == [KEY]
    stream.tell("STORED", KEY)
    assert stream.watch.take() == [News(HOST, removed=False, keys=[KEY])]
    assert stream.watch.announce([KEY]) == []
    stream.now = 2 * event_watch.DOUBT_S
    stream.tell("REMOVED", KEY)
    assert removed_from_host(stream.watch) == [KEY]


def test_a_block_that_went_in_a_gap_just_before_it_was_announced_is_told(stream: Stream) -> None:
    stream.watch.announce([KEY])  # since the call began
    snapshot = events_pb2.WatchEventsResponse(snapshot=True, snapshot_end=True)
    stream.watch._read([snapshot], stream.reading)
    stream.watch.announce([OTHER])
    assert removed_from_host(stream.watch) == []  # they may be of after
    stream.now = event_watch.DOUBT_S
    assert removed_from_host(stream.watch) == [KEY, OTHER]


def test_what_went_is_told_before_what_is_announced(stream: Stream) -> None:
    stream.watch.announce([KEY])
    stream.now = event_watch.DOUBT_S
    stream.tell("REMOVED", KEY)
    earlier, fresh = stream.watch.take_and_announce([KEY])
    assert [(each.removed, each.keys) for each in earlier] == [(True, [KEY])]
    assert fresh == [KEY]


def test_removals_in_other_epochs_are_not_told(stream: Stream) -> None:
    stream.watch.announce([KEY])
    stream.tell("REMOVED", KEY, epoch="other")
    assert removed_from_host(stream.watch) == []


def test_a_call_of_an_earlier_session_is_not_listened_to(stream: Stream) -> None:
    stream.watch.announce([KEY])
    stream.watch.follow(2, "e")
    stream.tell("REMOVED", KEY)
    assert removed_from_host(stream.watch) == []


def test_too_many_blocks_are_forgotten_as_removed(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_watch, "MAX_TRACKED", 1)
    stream.watch.announce([KEY, OTHER])
    assert removed_from_host(stream.watch) == [KEY]
    monkeypatch.setattr(event_watch, "MAX_GONE", 1)
    stream.tell("REMOVED", *keys_of("unknown", 5))
    assert len(stream.watch._gone) == 1
