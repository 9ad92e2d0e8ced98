"""What became of the blocks that an engine announced to others: gone, or in the daemon's tiers.

An engine that publishes what is cached says "stored" by itself, once its own copies have ended.
"Removed" only the daemon knows, and what its tiers hold. A thread follows the daemon's event stream
for the session's namespace, and the engine takes from here what it has to say, without ever waiting
for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain, takewhile
from typing import NamedTuple

import grpc

from kvd_client.backoff import EXPECTED, Backoff, error_of, problem_of
from kvd_client.daemon import greeted
from kvd_client.forks import keep_from_children
from kvd_client.tier_record import HOST, Key, News, NewsList, Residence, TierRecord
from kvd_proto.v1 import companion_pb2, events_pb2, events_pb2_grpc

log = logging.getLogger(__name__)

MAX_TRACKED = 1 << 18  # announced blocks; beyond it the oldest are said to be removed
MAX_GONE = 1 << 16  # removals: of blocks that are announced late, among others
DOUBT_S = 1.0  # how long the stream may be behind the engine's own reports
KEYS_AT_ONCE = 256  # looked through under the lock
GROUP_BYTES = 4
NOWHERE = (b"", 0)


def key_of(group: int, block_hash: bytes) -> Key:
    """A block's name within one namespace and epoch: its hash, and its group's number."""
    return block_hash + group.to_bytes(GROUP_BYTES, "big")


class Reading(NamedTuple):
    """One call of the event stream: which namespace and epoch, and what was said by then."""

    turn: int
    epoch: str
    announced: set[Key]
    in_tiers: dict[Residence, set[Key]]


class EventWatch:
    """Watches the blocks that an engine has announced, and says what became of them.

    `follow`, `announce`, `forget` and `take` come from one thread, the engine's; none of them
    waits for the daemon. A block may be said to be removed though it is there, when the stream
    was behind for longer than DOUBT_S or too many are announced; it is never the other way round
    for longer than DOUBT_S or the stream is away. One that was said to be removed is said to be
    stored again as soon as the stream says so. `with_tiers`: also which of them tiers hold, and
    that one which a tier brought up is in host memory again.
    """

    def __init__(
        self,
        socket_path: str,
        program: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        with_tiers: bool = True,
    ) -> None:
        self._socket_path = socket_path
        self._program = program
        self._clock = clock
        # Held for microseconds, but where the engine loses all, or a call of the stream begins.
        self._lock = threading.Lock()
        # Announced, and until when what the stream says may be of a copy before the announced one.
        # Ordered: to take the oldest of many from a dict walks over all that were taken before it.
        self._tracked: OrderedDict[Key, float] = OrderedDict()
        self._cleared: OrderedDict[Key, float] = OrderedDict()  # likewise; to be looked through yet
        # Removed, so a copy that is announced late may be of before; and whether that was told.
        self._gone: OrderedDict[Key, bool] = OrderedDict()
        # Stored since the namespace was cleared, or by a snapshot and since; None: unknown.
        self._since: set[Key] | None = None
        self._doubtful: dict[Key, float] = {}  # announced and removed, in which order is not known
        self._news = NewsList()
        self._tiers = TierRecord(self._news)
        self._with_tiers = with_tiers
        self._namespace_id = 0
        self._epoch = ""
        self._turn = 0  # another one = another namespace or epoch: a call of before is void
        self._call: grpc.Call | None = None
        self._place: tuple[bytes, int] = NOWHERE  # where to go on in the stream
        self._backoff = Backoff()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        keep_from_children(self)

    def leave_to_parent(self) -> None:
        """In a forked process nothing was announced, and nothing is heard."""
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._closing.set()
        self._call = self._thread = None
        self._news.clear()
        self._clear()

    # -- the engine's side ------------------------------------------------------------------

    def follow(self, namespace_id: int, epoch: str) -> None:
        """Where the engine's session is now. Cheap to repeat."""
        is_there = namespace_id == self._namespace_id and epoch == self._epoch
        if is_there and self._thread is not None:
            return
        if self._closing.is_set():
            return
        with self._lock:
            if epoch != self._epoch:
                self._lose_all()
            self._namespace_id, self._epoch = namespace_id, epoch
            self._place = NOWHERE
            self._turn += 1
        self._cancel()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvd-events", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread is to be had; the next call tries again
                self._backoff.warn("kvd events", str(error))
                return
            self._thread = thread

    def announce(self, keys: Iterable[Key]) -> list[Key]:
        """The engine is about to say that these are stored; those of which it has not been said."""
        with self._lock:
            return self._announce(keys)

    def take_and_announce(self, keys: Collection[Key]) -> tuple[list[News], list[Key]]:
        """What came and went of these blocks, and then `announce`, at once: what goes after that is
        told behind what is announced."""
        with self._lock:
            self._tell_overdue()
            return self._news.take_of(keys), self._announce(keys)

    def _announce(self, keys: Iterable[Key]) -> list[Key]:
        fresh = []
        until = self._clock() + DOUBT_S
        for key in keys:
            is_due = self._news.drop_again(HOST, key)
            if key in self._tracked:
                self._tracked[key] = until
                if is_due:
                    fresh.append(key)
                continue
            is_in_doubt = key in self._doubtful or self._cleared.pop(key, None) is not None
            if is_due or not is_in_doubt:
                fresh.append(key)
            if is_in_doubt or key in self._gone or self._went_with_all(key):
                self._doubtful[key] = until
            else:
                self._tracked[key] = until
            self._tiers.announced(key)
        self._bound_tracked()
        return fresh

    def _went_with_all(self, key: Key) -> bool:
        """Whether a clear or a gap took it, and it isn't stored since, as far as is known."""
        return self._since is not None and key not in self._since

    def forget(self) -> None:
        """The engine has said of all that it is gone (it reset its cache).

        What went before stays known: a store that had ended by then may be announced yet.
        """
        with self._lock:
            self._news.clear()
            self._clear_announced()

    def say_again(self) -> None:
        """Whoever listens has dropped all that was said, and it is still so: say it once more, some
        with each `take`."""
        with self._lock:
            announced = ((HOST, key) for key in chain(self._cleared, self._tracked, self._doubtful))
            self._news.say_again(chain(announced, self._tiers.in_order()))

    def take(self) -> list[News]:
        """What came and went since the last call, in its order; of much the rest comes later."""
        if not self._news and not self._doubtful:
            return []
        with self._lock:
            self._tell_overdue()
            return self._news.take() + self._news.take_again()

    def _tell_overdue(self) -> None:
        now = self._clock()
        overdue = [key for key, deadline in self._doubtful.items() if now >= deadline]
        for key in overdue:
            del self._doubtful[key]
            self._tell_gone(key)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._cancel()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _bound_tracked(self) -> None:
        while len(self._tracked) > MAX_TRACKED:
            oldest, _ = self._tracked.popitem(last=False)
            self._news.add(HOST, oldest, removed=True)

    def _lose_all(self) -> None:
        for key in (*self._cleared, *self._tracked, *self._doubtful):
            self._news.add(HOST, key, removed=True)
        self._tiers.lose_all()
        while self._tiers.let_go(KEYS_AT_ONCE):
            pass
        self._clear()

    def _clear(self) -> None:
        self._clear_announced()
        self._gone.clear()
        self._since = None

    def _clear_announced(self) -> None:
        self._tiers.clear()
        self._cleared.clear()
        self._tracked.clear()
        self._doubtful.clear()

    # -- the stream's thread ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._end_attempt(error_of(self._watch)))

    def _end_attempt(self, error: Exception | None) -> float:
        """The pause before the next attempt."""
        if isinstance(error, EXPECTED):
            # The session's own thread warns of an absent daemon; here it is nothing new.
            log.debug("kvd events: %s", problem_of(error, self._socket_path))
        elif error is not None:
            self._backoff.warn("kvd events", problem_of(error, self._socket_path), error)
        return self._backoff.after(error)

    def _watch(self) -> None:
        with greeted(self._socket_path, companion_pb2.PEER_ROLE_TOOL, self._program) as daemon:
            self._backoff.meet()
            with self._lock:
                # Announced before the call, so stored before a snapshot that the call begins with.
                reading = Reading(self._turn, self._epoch, set(self._tracked), self._tiers.known())
                incarnation, sequence = self._place
                request = events_pb2.WatchEventsRequest(
                    incarnation=incarnation,
                    after_sequence=sequence,
                    namespace_id=self._namespace_id,
                    with_tiers=self._with_tiers,
                )
            stub = events_pb2_grpc.EventServiceStub(daemon.channel)
            call = stub.WatchEvents(request, metadata=daemon.metadata)
            self._call = call
            try:
                if reading.turn == self._turn and not self._closing.is_set():
                    self._backoff.hold()
                    self._read(call, reading)
            finally:
                call.cancel()
                self._call = None

    def _read(self, call: Iterable[events_pb2.WatchEventsResponse], reading: Reading) -> None:
        """Take messages in. Returns to begin anew, where the stream has lost us."""
        may_begin, is_first = True, True  # may begin with a snapshot
        for response in call:
            if response.snapshot and not may_begin:
                # What was announced before THIS snapshot isn't known: ask for another.
                self._go_on_at(NOWHERE, reading)
                return
            if response.snapshot and is_first:
                self._begin_snapshot(reading)
            is_first = False
            may_begin = response.snapshot and not response.snapshot_end
            for event in response.events:
                self._take_in(event, reading)
            if response.snapshot_end:
                self._note(list(reading.announced), reading, self._removed)
                for place, left in reading.in_tiers.items():
                    self._note(list(left), reading, partial(self._left, place))
            if not may_begin:
                self._go_on_at((response.incarnation, response.sequence), reading)

    def _begin_snapshot(self, reading: Reading) -> None:
        """What is announced late may have gone before it, and then nothing tells of that."""
        with self._lock:
            if reading.turn == self._turn:
                self._since = set()
                newest = reversed(self._tracked)
                late = list(takewhile(lambda key: key not in reading.announced, newest))
                self._doubtful.update((key, self._tracked.pop(key)) for key in reversed(late))

    def _go_on_at(self, place: tuple[bytes, int], reading: Reading) -> None:
        with self._lock:
            if reading.turn == self._turn:
                self._place = place

    def _take_in(self, event: events_pb2.CacheEvent, reading: Reading) -> None:
        kind = event.kind
        if kind == events_pb2.CacheEvent.KIND_CLEARED:
            with self._lock:
                if reading.turn == self._turn:
                    self._begin_clear()
            self._let_go()
        elif kind == events_pb2.CacheEvent.KIND_TIER_LOST:
            with self._lock:
                if reading.turn == self._turn:
                    self._tiers.lost(event.tier)
            self._let_go()
        elif event.epoch != reading.epoch:
            return
        elif event.tier:
            place = Residence(event.medium, event.locality, event.tier)
            if kind == events_pb2.CacheEvent.KIND_REMOVED:
                self._note(_keys_of(event), reading, partial(self._left, place))
            elif kind == events_pb2.CacheEvent.KIND_STORED:
                keys = _keys_of(event)
                if place in reading.in_tiers:
                    reading.in_tiers[place].difference_update(keys)
                self._note(keys, reading, partial(self._kept, place))
        elif kind == events_pb2.CacheEvent.KIND_REMOVED:
            self._note(_keys_of(event), reading, self._removed)
        elif kind == events_pb2.CacheEvent.KIND_STORED:
            keys = _keys_of(event)
            reading.announced.difference_update(keys)
            self._note(keys, reading, self._stored)

    def _note(self, keys: list[Key], reading: Reading, note: Callable[[list[Key]], None]) -> None:
        """Have them noted under the lock, some at a time, unless all has begun anew meanwhile."""
        for start in range(0, len(keys), KEYS_AT_ONCE):
            with self._lock:
                if reading.turn != self._turn:
                    return
                note(keys[start : start + KEYS_AT_ONCE])

    def _begin_clear(self) -> None:
        self._cleared, self._tracked = self._tracked, OrderedDict()
        self._cleared.update(self._doubtful)
        self._doubtful = {}
        self._since = set()
        self._tiers.lose_all()

    def _let_go(self) -> None:
        """Look through what was cleared or lost, some at a time: the engine's step goes between."""
        now, is_more = self._clock(), True
        while is_more:
            with self._lock:
                for _ in range(min(KEYS_AT_ONCE, len(self._cleared))):
                    key, until = self._cleared.popitem(last=False)
                    if now < until:
                        self._doubtful[key] = until
                    else:
                        self._tell_gone(key)
                is_more = self._tiers.let_go(KEYS_AT_ONCE) or bool(self._cleared)

    def _removed(self, keys: list[Key]) -> None:
        now = self._clock()
        for key in keys:
            until = self._tracked.pop(key, None)
            if until is not None and now < until:
                self._doubtful[key] = until
            elif until is not None or self._doubtful.pop(key, None) is not None:
                self._tell_gone(key)
            else:
                self._note_gone(key, is_told=self._gone.get(key, False))

    def _tell_gone(self, key: Key) -> None:
        self._news.add(HOST, key, removed=True)
        self._note_gone(key, is_told=True)

    def _note_gone(self, key: Key, *, is_told: bool) -> None:
        self._gone[key] = is_told
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _stored(self, keys: list[Key]) -> None:
        for key in keys:
            was_told_gone = self._gone.pop(key, False)
            until = self._doubtful.pop(key, None)
            if until is not None:
                self._tracked[key] = until
            elif key not in self._tracked and (was_told_gone or self._tiers.holds(key)):
                self._tracked[key] = self._clock()  # brought up, or the stream was late
                self._news.add(HOST, key, removed=False)
                self._tiers.announced(key)
        if self._since is not None:
            self._since.update(keys)
            if len(self._since) > MAX_GONE:
                self._since = None
        self._bound_tracked()

    def _kept(self, place: Residence, keys: list[Key]) -> None:
        for key in keys:
            is_announced = key in self._tracked or key in self._doubtful
            self._tiers.stored(place, key, is_announced=is_announced)

    def _left(self, place: Residence, keys: list[Key]) -> None:
        for key in keys:
            self._tiers.removed(place, key)

    def _cancel(self) -> None:
        call = self._call
        if call is not None:
            with contextlib.suppress(Exception):
                call.cancel()


def _keys_of(event: events_pb2.CacheEvent) -> list[Key]:
    suffix = event.group.to_bytes(GROUP_BYTES, "big")
    hashes, length = event.hashes, event.hash_bytes or 1
    return [hashes[at : at + length] + suffix for at in range(0, len(hashes), length)]
