"""Whatever the stream's lag and gaps, whoever listens ends with what is there and was announced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvd_client.event_watch import DOUBT_S, GROUP_BYTES, NOWHERE, EventWatch, Reading
from kvd_client.tier_record import HOST, Key, News
from kvd_proto.v1 import events_pb2
from tests.client.test_event_watch import keys_of

KEYS = keys_of("modelled", 4)
SOME = st.sampled_from(KEYS)
SECONDS = st.sampled_from([0.1, DOUBT_S / 2, DOUBT_S, 3 * DOUBT_S])
MEANWHILE = st.sampled_from(["announce", "take", "wait"])
Event = tuple[str, Key | None]  # its kind, and of which block


class Thread(EventWatch):
    """A watch whose messages are read by hand."""

    def _run(self) -> None:
        pass


class Listening(RuleBasedStateMachine):
    """A daemon with a few blocks, its stream, which is read late, and a router that listens."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.watch = Thread("/nowhere", "test", clock=lambda: self.now)
        self.watch.follow(1, "e")
        self.resident: set[Key] = set()
        self.finished: list[Key] = []  # by this engine, and not announced yet
        self.announced: set[Key] = set()  # of what is there
        self.told: set[Key] = set()
        self.stream: list[Event] = []  # not read yet
        self.snapshot = 0  # so many of them are one's
        self.begin()

    # -- the daemon's side

    def has_stored(self, key: Key) -> None:
        if key not in self.resident:
            self.resident.add(key)
            self.stream.append(("STORED", key))

    @rule(key=SOME)
    def another_engine_stores(self, key: Key) -> None:
        self.has_stored(key)

    @rule(key=SOME)
    def this_engine_stores(self, key: Key) -> None:
        self.has_stored(key)
        self.finished.append(key)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.resident)))
        self.resident.discard(key)
        self.announced.discard(key)
        self.stream.append(("REMOVED", key))

    @rule()
    def clear(self) -> None:
        self.resident.clear()
        self.announced.clear()
        self.stream.append(("CLEARED", None))

    # -- the engine's side

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def announce(self) -> None:
        keys, self.finished = list(dict.fromkeys(self.finished)), []
        news, fresh = self.watch.take_and_announce(keys)
        self.hear(news)
        self.hear([News(HOST, removed=False, keys=fresh)])
        self.announced |= set(keys) & self.resident

    @rule()
    def take(self) -> None:
        self.hear(self.watch.take())

    @rule()
    def reset(self) -> None:
        """The engine says that all is gone. What ended before may be announced yet."""
        self.watch.forget()
        self.told.clear()
        self.announced.clear()

    def hear(self, news: list[News]) -> None:
        for _, removed, keys in news:
            for key in keys:
                assert (key in self.told) is removed, "told twice, or removed untold"
                self.told ^= {key}

    # -- the stream's side

    @rule(count=st.integers(1, 6), meanwhile=st.lists(MEANWHILE, max_size=3))
    def read(self, count: int, meanwhile: list[str]) -> None:
        """Some messages, between which other things happen. It may be lost amid a snapshot."""
        is_lost = count < self.snapshot
        self.watch._read(self.messages(count, meanwhile), self.reading)
        if is_lost:
            self.begin()

    def messages(
        self, count: int, meanwhile: list[str]
    ) -> Iterator[events_pb2.WatchEventsResponse]:
        while count and self.stream:
            count -= 1
            kind, key = self.stream.pop(0)
            hashes = b"" if key is None else key[:-GROUP_BYTES]
            event = events_pb2.CacheEvent(
                kind=cast(events_pb2.CacheEvent.Kind, f"KIND_{kind}"),
                epoch="e",
                hashes=hashes,
                hash_bytes=len(hashes),
            )
            is_snapshot, self.snapshot = self.snapshot > 0, max(0, self.snapshot - 1)
            yield events_pb2.WatchEventsResponse(
                events=[event],
                snapshot=is_snapshot,
                snapshot_end=is_snapshot and not self.snapshot,
            )
            if meanwhile:
                self.do(meanwhile.pop())

    def do(self, what: str) -> None:
        if what == "announce":
            self.announce()
        elif what == "take":
            self.take()
        else:
            self.now += DOUBT_S

    @rule()
    def begin(self) -> None:
        """The stream has lost the watch, which asks for a snapshot."""
        self.watch._place = NOWHERE
        self.reading = Reading(
            self.watch._turn, "e", set(self.watch._tracked), self.watch._tiers.known()
        )
        self.stream = [("STORED", key) for key in sorted(self.resident)] or [("UNSPECIFIED", None)]
        self.snapshot = len(self.stream)

    def teardown(self) -> None:
        self.announce()
        self.read(len(self.stream), [])
        self.now += DOUBT_S
        self.take()
        assert self.told <= self.resident, "what is gone is told as there"
        assert self.announced <= self.told, "what is there and was announced is not told"
        self.watch.close()


TestListening = Listening.TestCase
TestListening.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
