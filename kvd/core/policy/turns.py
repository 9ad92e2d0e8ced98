"""Turns: what is kept is what comes back soonest for the room it takes.

In conversations the chance that a session goes on rises with its turn, and falls with the time
since its last one. So blocks stand in seven queues by their *turn*, each in the order of last use,
and for each queue it is learnt how likely a block of some age is to come back (`hazard`).

A block's turn is its *generation* and how often other requests have used it since. A generation
is the parent block's and one more; blocks that one request brings in are of one generation.
So all blocks of a session are about as many turns old, and so is what many sessions share. No
block has fewer turns than those behind it in its prompt. Each of the first four turns has a queue
of its own; 5 to 8, 9 to 16, and 17 and more have one each, which tells apart what many ask for.

The victim is the block that was used longest ago, unless the oldest of another queue scores less
than 0.8 of that: then it is that one. With nothing learnt this is least recently used. Within a
queue the tail of a prompt leaves before its head.

What has left is remembered as a ghost: its turn and its last use, eight bytes in a table that has
four to eight places for each slot of the class. A ghost's place is a hash of its tag; another one
there takes it. A block that comes back while it is remembered has its turns again, and its return
is learnt.

One block in four is learnt from, by its tag, and each prompt's first one: a few blocks with which
nearly all prompts begin would else be a queue of which nothing is known.

Each block has a word of 64 bits: the time of last use (17 ms are one stamp; two years go round),
its turn and generation, how many blocks of its request are learnt from, as a power of two, whether
it is one of them, and the end of its request's number, so that a request counts as one use however
often it touches.

Time is the policy's own: it never goes back, and a longer silence than an hour counts as one.
After a restart all turns begin at one, and nothing is learnt; the order of use is known.

Source: measured on traces, see docs/policies.md. Memory: 24 bytes a slot (its place, its tag and
this word), rings of 4 to 16 bytes a resident block, 8 bytes a ghost, 30 KB for what is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from kvd.core.keys import NO_SLOTS, U64, Bools, Slots
from kvd.core.policy.base import UNKNOWN, Evictable, Sight
from kvd.core.policy.hazard import BINS, CLASSES, EDGES, WEIGHTS, Hazards, Seen, bins_of
from kvd.core.policy.slot_queue import (
    NUMBER_MASK,
    Capacity,
    PolicyMemory,
    Positions,
    Scan,
    SlotQueue,
    joined,
    nth_true,
    whoever,
)
from kvd.core.policy.turn_ghosts import TurnGhosts

STAMP_SHIFT = 24  # 2**24 ns are a stamp
LONGEST_SILENCE_NS = 3_600_000_000_000  # a longer one counts as so long
CLEARLY_LESS = 0.8  # of the score of the block used longest ago
LEARNT_FROM = 4  # one block in so many, a power of two

FIRST_TURNS = (1, 2, 3, 4, 5, 9, 17)  # of each queue
MOST_TURNS = 31  # are counted

# The lowest bits of a word's fields, which are 32, 5, 5, 4, 1 and 16 wide; the stamp is the first.
_STAMP_MASK = 0xFFFFFFFF
_TURN, _GENERATION, _WEIGHT, _LEARNT, _REQUEST = 32, 37, 42, 46, 47
_TURN_MASK = MOST_TURNS  # of a generation, too
_REQUEST_MASK = (1 << 16) - 1  # of a request's number; of a ghost there is the tag's check
_KEPT = _TURN_MASK << _GENERATION | 1 << _LEARNT
_CLASS_OF: Slots = np.searchsorted(FIRST_TURNS, np.arange(MOST_TURNS + 1), side="right") - 1
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the top bits are spread
_SAMPLE_SHIFT = np.uint64(16)


class TurnsPolicy:
    """The least likely to come back for the time it is kept leaves first, by turn and age."""

    heeds_requests: ClassVar = True

    def __init__(self, capacity: Capacity, memory: PolicyMemory) -> None:
        self._queues = [SlotQueue(memory.places) for _ in range(CLASSES)]
        numbers = np.array([queue.number for queue in self._queues], np.int64)
        self._numbers = numbers.take(_CLASS_OF, mode="clip")  # by turn
        self._places = memory.places.array
        self._tags = memory.tags
        self._words = memory.words
        self._ghosts = TurnGhosts(capacity)
        self._hazards = Hazards()
        self._clock = _Clock()
        self._request = 0  # the latest

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    @property
    def stamp(self) -> int:
        """Now, in the policy's own time."""
        return self._clock.stamp

    # -- what comes and is used -----------------------------------------------------------------

    def insert(self, slots: Slots, tags: U64, sight: Sight = UNKNOWN) -> None:
        now = self._look(sight)
        if not slots.size:
            return
        spread = tags * _SPREAD
        turns, generations = self._known_of(spread, now, self._generation(sight))
        learnt = (spread >> _SAMPLE_SHIFT & np.uint64(LEARNT_FROM - 1)) == 0
        if sight.parent < 0:
            learnt[0] = True
        weight = _weight(learnt)
        words = turns << _TURN | generations << _GENERATION | learnt.astype(np.int64) << _LEARNT
        words |= weight << _WEIGHT | (sight.request & _REQUEST_MASK) << _REQUEST
        self._words[slots] = words | now & _STAMP_MASK
        self._tags[slots] = tags
        classes = _CLASS_OF.take(turns)
        self._hazards.begin(now, classes[learnt], weight)
        for number, members in _by_class(classes[::-1], slots[::-1]):
            self._queues[number].append(members)

    def touch(self, slots: Slots, sight: Sight = UNKNOWN, *, as_use: bool = True) -> None:
        now = self._look(sight)
        if not slots.size:
            return
        words = self._words.take(slots)
        before = words >> _TURN & _TURN_MASK
        held = self._places.take(slots) & NUMBER_MASK == self._numbers.take(before)
        assert held.all(), "a slot was touched that no queue of the policy holds"
        turns, kept = before, _KEPT
        request = sight.request & _REQUEST_MASK
        new = np.full(slots.size, as_use)
        if as_use and sight.request:
            new = words >> _REQUEST != request
        if as_use:
            turns = np.minimum(before + new, MOST_TURNS)
        if as_use and sight.request:
            turns = _no_less_than_behind(turns)
            after = request << _REQUEST
        else:
            kept, after = kept | _REQUEST_MASK << _REQUEST, 0
        learnt = words >> _LEARNT & 1
        weight = _weight(learnt)
        after |= weight << _WEIGHT | now & _STAMP_MASK
        renewed = words & kept | turns << _TURN | after
        self._words[slots[::-1]] = renewed[::-1]  # of a block named twice the first mention counts
        classes = _classes_of(self._words.take(slots))
        once = self._move(slots[::-1], _CLASS_OF.take(before)[::-1], classes[::-1])[::-1]
        learnt = np.flatnonzero(learnt & once)
        if learnt.size:
            self._learn(_seen(words[learnt], now), new[learnt], now)
            self._hazards.begin(now, classes[learnt], weight)

    def remove(self, slots: Slots) -> None:
        if not slots.size:
            return
        words = self._words.take(slots)
        turns = words >> _TURN & _TURN_MASK
        held = self._places.take(slots) & NUMBER_MASK == self._numbers.take(turns)
        assert held.all(), "a slot was removed that no queue of the policy holds"
        now = self._clock.stamp
        learnt = words[words >> _LEARNT & 1 == 1]
        self._hazards.end(now, _seen(learnt, now), returned=False)
        for number, members in _by_class(_CLASS_OF.take(turns), slots):
            self._queues[number].drop(members)

    def missed(self, tags: U64) -> None:
        """Ghosts are asked only when a block comes in."""

    def forget_gone(self) -> None:
        self._ghosts.forget_all()
        self._hazards.forget(self._clock.stamp + 1)

    # -- who leaves -------------------------------------------------------------------------------

    def evict(self, count: int, evictable: Evictable, now_ns: int = 0) -> Slots | None:
        self._clock.look(now_ns)
        now = self._clock.stamp
        walks, order = self._choose(count, evictable)
        if sum(part.size for part in order) < count:
            return None
        victims = joined(order)
        for walk in walks:
            walk.commit()
        if self._ghosts.fit():
            self._hazards.watch_from(now + 1)
        words = self._words.take(victims)
        lost = self._ghosts.add(self._tags[victims] * _SPREAD, words)
        self._end_ghosts(lost, now, returned=False)
        return victims

    def coldest(self, count: int) -> Slots:
        _, order = self._choose(count, whoever)
        return joined(order)[:count]

    def _choose(self, count: int, evictable: Evictable) -> tuple[list[_Walk], list[Slots]]:
        """Up to `count` victims, in the order in which they leave; changes nothing."""
        now = self._clock.stamp
        scores = self._hazards.scores
        walks = [
            _Walk(number, queue, self._words, now, evictable)
            for number, queue in enumerate(self._queues)
            if len(queue)
        ]
        left, order = count, list[Slots]()
        open_walks = walks
        while left > 0:
            open_walks = [walk for walk in open_walks if walk.age >= 0]
            if not open_walks:
                break
            walk, youngest, eldest = _next(open_walks, scores)
            taken = walk.take(left, youngest, eldest)
            order.append(taken)
            left -= taken.size
        return walks, order

    # -- what is known of blocks -----------------------------------------------------------------

    def _look(self, sight: Sight) -> int:
        """The time of the sight, as a stamp; a new request is counted."""
        self._clock.look(sight.now_ns)
        now = self._clock.stamp
        if not sight.request or sight.request > self._request:
            self._request = max(self._request, sight.request)
            self._hazards.request_came(now)
        return now

    def _generation(self, sight: Sight) -> int:
        """Of blocks that come in behind the sight's parent."""
        if sight.parent < 0:
            return 1
        word = int(self._words[sight.parent])
        turn, generation = word >> _TURN & _TURN_MASK, word >> _GENERATION & _TURN_MASK
        same = word >> _REQUEST == sight.request & _REQUEST_MASK
        brought_by_it = sight.request and same and turn == generation
        return generation if brought_by_it else min(generation + 1, MOST_TURNS)

    def _known_of(self, spread: U64, now: int, generation: int) -> tuple[Slots, Slots]:
        """Turns and generations of blocks that come in; what ghosts remember is learnt from."""
        generations = np.full(spread.size, generation)
        where, ghosts = self._ghosts.take(spread)
        if not where.size:
            return generations, generations
        self._end_ghosts(ghosts, now, returned=True)
        known = ghosts >> _GENERATION & _TURN_MASK
        behind = np.searchsorted(where, np.arange(spread.size), side="right") - 1
        after = behind >= 0
        generations[after] = np.minimum(known[behind[after]] + 1, MOST_TURNS)
        generations[where] = known
        turns = generations.copy()
        turns[where] = np.minimum((ghosts >> _TURN & _TURN_MASK) + 1, MOST_TURNS)
        return _no_less_than_behind(turns), generations

    def _learn(self, seen: Seen, new: Bools, now: int) -> None:
        """Blocks that are there are used, for the first time by this request or not."""
        if new.all():
            self._hazards.end(now, seen, returned=True)
        elif not new.any():
            self._hazards.used_longer(seen)
        else:
            self._hazards.end(now, seen.only(new), returned=True)
            self._hazards.used_longer(seen.only(~new))

    def _end_ghosts(self, ghosts: Slots, now: int, *, returned: bool) -> None:
        learnt = ghosts[ghosts >> _LEARNT & 1 == 1]
        if learnt.size:
            self._hazards.end(now, _seen(learnt, now), returned=returned)

    def _move(self, slots: Slots, before: Slots, classes: Slots) -> Bools:
        """To the young ends of the queues of these classes, the first slot oldest.

        Marks the last mention of each slot.
        """
        lost = np.zeros(CLASSES, np.int64)
        once = np.ones(slots.size, np.bool_)
        for number, members in _by_class(classes, np.arange(slots.size)):
            last = self._queues[number].take_in(slots[members])
            lost += np.bincount(before[members][last], minlength=CLASSES)
            once[members] = last
        for number in np.flatnonzero(lost).tolist():
            self._queues[number].lose(int(lost[number]))
        return once


class _Clock:
    """Stamps that never fall and pass over long silences."""

    def __init__(self) -> None:
        self._last_ns = 0
        self._ns = 0

    def look(self, now_ns: int) -> None:
        """It is so late outside; 0: unknown."""
        if now_ns:
            step = now_ns - self._last_ns if self._last_ns else 0
            self._ns += min(max(step, 0), LONGEST_SILENCE_NS)
            self._last_ns = now_ns

    @property
    def stamp(self) -> int:
        return self._ns >> STAMP_SHIFT


class _Walk:
    """One queue, read from its old end for victims; `age` is the next one's, -1 at the end."""

    def __init__(
        self, number: int, queue: SlotQueue, words: Slots, now: int, evictable: Evictable
    ) -> None:
        self.number = number
        self._queue, self._words, self._now, self._evictable = queue, words, now, evictable
        self._pieces: Iterator[tuple[int, Positions, Slots]] | None = None
        self._slots, self._at = NO_SLOTS, 0
        self._taken: list[Slots] = []
        self._passed: list[Slots] = []
        self._end = 0
        self.age = int(self._ages_of(np.array([queue.head()]))[0])

    def take(self, count: int, youngest: float, eldest: float) -> Slots:
        """Up to `count` of the next that may go, while they are of such an age."""
        if self._at == self._slots.size:
            self._read(count)
        ages = self._ages[self._at :]
        others = np.flatnonzero((ages < youngest) | (ages >= eldest))
        stop = self._at + int(others[0]) if others.size else self._slots.size
        may_go = self._may_go[self._at : stop]
        stop = self._at + nth_true(may_go, count) + 1
        slots, may_go = self._slots[self._at : stop], self._may_go[self._at : stop]
        self._taken.append(slots[may_go])
        self._passed.append(slots[~may_go])
        self._end = self._start + int(self._positions[stop - 1]) + 1
        self._at = stop
        if stop == self._slots.size:
            self._read(count)
        self.age = int(self._ages[self._at]) if self._at < self._slots.size else -1
        return self._taken[-1]

    def commit(self) -> None:
        """Take what was taken out of the queue; nothing may have changed since."""
        if self._taken:
            self._queue.commit(Scan(joined(self._taken), joined(self._passed), self._end))

    def _read(self, count: int) -> None:
        if self._pieces is None:
            self._pieces = self._queue.pieces(count)
        nothing = (0, NO_SLOTS, NO_SLOTS)
        self._start, self._positions, self._slots = next(self._pieces, nothing)
        self._at = 0
        self._ages = self._ages_of(self._slots)
        self._may_go = self._evictable(self._slots)

    def _ages_of(self, slots: Slots) -> Slots:
        return _ages(self._words.take(slots), self._now)


def _next(walks: list[_Walk], scores: list[list[float]]) -> tuple[_Walk, float, float]:
    """Whose turn it is to give victims; while these are so old or older, and younger than that."""
    bins = bins_of(np.array([walk.age for walk in walks])).tolist()
    worths = [scores[walk.number][at] for walk, at in zip(walks, bins, strict=True)]
    oldest = max(range(len(walks)), key=lambda each: walks[each].age)
    least = min(range(len(walks)), key=lambda each: worths[each])
    chosen = least if worths[least] < CLEARLY_LESS * worths[oldest] else oldest
    youngest, eldest = EDGES[bins[chosen]], EDGES[bins[chosen] + 1]
    if chosen == oldest:  # of two that are as old the queue of fewer turns comes first
        for at, walk in enumerate(walks):
            if at != chosen:
                youngest = max(youngest, walk.age + (at < chosen))
    return walks[chosen], youngest, eldest if bins[chosen] < BINS - 1 else math.inf


def _weight(learnt: Slots | Bools) -> int:
    """1 / the blocks that are learnt from, as a negative power of two."""
    return min(round(math.log2(max(1, int(np.count_nonzero(learnt))))), WEIGHTS - 1)


def _classes_of(words: Slots) -> Slots:
    return _CLASS_OF.take(words >> _TURN & _TURN_MASK)


def _no_less_than_behind(turns: Slots) -> Slots:
    """No block of a prompt has fewer turns than one behind it."""
    raised: Slots = np.maximum.accumulate(turns[::-1])[::-1]
    return raised


def _ages(words: Slots, now: int) -> Slots:
    ages = now - words & _STAMP_MASK
    return np.where(ages > _STAMP_MASK >> 1, 0, ages)


def _seen(words: Slots, now: int) -> Seen:
    return Seen(now - _ages(words, now), _classes_of(words), words >> _WEIGHT & 15)


def _by_class(classes: Slots, values: Slots) -> Iterator[tuple[int, Slots]]:
    """Number of each queue that these classes name, and its values in order."""
    first = int(classes[0])
    if (classes == first).all():
        yield first, values
        return
    for number in range(CLASSES):
        members = values[classes == number]
        if members.size:
            yield number, members
