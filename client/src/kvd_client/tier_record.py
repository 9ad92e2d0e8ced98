"""Which of the blocks that an engine announced lie in the daemon's tiers, as it tells others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, count, groupby, islice
from operator import itemgetter
from typing import NamedTuple

from kvd_proto.limits import MAX_TIERS

MAX_EARLY = 1 << 16  # blocks in tiers that the engine has not announced, or not yet
MAX_TOLD = 1 << 18  # blocks in tiers; beyond it the oldest are said to be removed

MAX_NEWS = 1 << 19  # not taken yet, until what came and went meanwhile is left out of it
MAX_TAKEN = 1024  # of what is new, with one call; or, where that is more,
TAKEN_IN_STEPS = 128  # one in so many of what is new
MAX_LOOKED_AT = 16  # of a block's news, for the last one at a place
MAX_AGAIN = 256  # said once more with one call

Key = bytes


class Residence(NamedTuple):
    """Where a block lies, in the words of the daemon's event stream."""

    medium: str
    locality: str = ""
    tier: str = ""


HOST = Residence("CPU")


class News(NamedTuple):
    """What came to a place, or (`removed`) left it."""

    place: Residence
    removed: bool
    keys: list[Key]


class _NewsEntry(NamedTuple):
    """One block's news, and the number of the one before it, if any was not taken by then."""

    place: Residence
    removed: bool
    key: Key
    before: int | None
    stays: bool  # it went before it was said again


class NewsList:
    """News one after the other, in the order in which they happened, until they are taken."""

    def __init__(self) -> None:
        self._news: dict[int, _NewsEntry] = {}  # numbered as they came
        self._last: dict[Key, int] = {}  # a block's last one; each knows the one before it
        self._numbers = count()
        self._heard_from = 0  # those before went to who has dropped all since
        self._again: OrderedDict[tuple[Residence, Key], None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._news or self._again)

    def add(self, place: Residence, key: Key, *, removed: bool) -> None:
        stays = self.drop_again(place, key)
        if len(self._news) < MAX_NEWS or not self._takes_back(place, key, removed=removed):
            number = next(self._numbers)
            self._news[number] = _NewsEntry(place, removed, key, self._last.get(key), stays)
            self._last[key] = number

    def _takes_back(self, place: Residence, key: Key, *, removed: bool) -> bool:
        """Leave out the last news of a block at its place. True: that and this say nothing new.

        An engine without requests takes nothing, while others have blocks evicted and brought up.
        """
        number, later = self._last.get(key), None
        for _ in range(MAX_LOOKED_AT):
            if number is None or number not in self._news or number < self._heard_from:
                return False
            entry = self._news[number]
            if entry.place == place:
                if entry.stays:
                    return False
                self._leave_out(number, entry, later)
                return entry.removed != removed
            number, later = entry.before, number
        return False

    def _leave_out(self, number: int, entry: _NewsEntry, later: int | None) -> None:
        """`later`: the number of the block's next one."""
        del self._news[number]
        if later is not None:
            self._news[later] = self._news[later]._replace(before=entry.before)
        elif entry.before is not None and entry.before in self._news:
            self._last[entry.key] = entry.before
        else:
            del self._last[entry.key]

    def say_again(self, said: Iterable[tuple[Residence, Key]]) -> None:
        """All this was said, and whoever listens has dropped it."""
        self._heard_from = next(self._numbers)
        self._again = OrderedDict.fromkeys(said)
        for entry in self._news.values():
            if not entry.removed:
                self.drop_again(entry.place, entry.key)

    def drop_again(self, place: Residence, key: Key) -> bool:
        """Whether this was to be said once more; now it is not."""
        if (place, key) not in self._again:
            return False
        del self._again[place, key]
        return True

    def take(self) -> list[News]:
        """The next of what is new, in its order: some, for a step waits for it.

        Of very much more at once: where each step brings more than MAX_TAKEN, it would be told ever
        later. What follows each other of one kind is one piece of news.
        """
        most = max(MAX_TAKEN, len(self._news) // TAKEN_IN_STEPS)
        return self._taken(list(islice(self._news, most)))

    def take_of(self, keys: Collection[Key]) -> list[News]:
        """All that is new of these blocks, in its order; what is new of others costs nothing."""
        numbers: list[int] = []
        for key in dict.fromkeys(keys):
            number = self._last.get(key)
            while number is not None and number in self._news:
                numbers.append(number)
                number = self._news[number].before
        return self._taken(sorted(numbers))

    def _taken(self, numbers: list[int]) -> list[News]:
        entries = [self._news.pop(number) for number in numbers]
        for number, entry in zip(numbers, entries, strict=True):
            if self._last[entry.key] == number:
                del self._last[entry.key]
        if not self._news:
            self._news.clear()  # the room that it has for many, too
        return self._gathered([(entry.place, entry.removed, entry.key) for entry in entries])

    def take_again(self) -> list[News]:
        """The next of what is said once more: a few, for a step waits for it."""
        count = min(MAX_AGAIN, len(self._again))
        again = [self._again.popitem(last=False)[0] for _ in range(count)]
        return self._gathered([(place, False, key) for place, key in again])

    @staticmethod
    def _gathered(news: list[tuple[Residence, bool, Key]]) -> list[News]:
        return [
            News(place, removed, [key for _, _, key in run])
            for (place, removed), run in groupby(news, key=itemgetter(0, 1))
        ]

    def clear(self) -> None:
        self._news.clear()
        self._last.clear()
        self._again.clear()


class TierRecord:
    """Says of announced blocks, and of no others, which tiers hold them.

    A tier is often told of before the engine has announced the block: it is said then.
    """

    def __init__(self, news: NewsList) -> None:
        self._news = news
        self._told: dict[Residence, OrderedDict[Key, None]] = {}
        self._early: OrderedDict[tuple[Residence, Key], None] = OrderedDict()
        self._count = 0
        self._leaving: deque[tuple[Residence, OrderedDict[Key, None]]] = deque()  # to be said yet

    def holds(self, key: Key) -> bool:
        """Whether any tier is said to hold it."""
        return any(key in keys for keys in self._told.values())

    def known(self) -> dict[Residence, set[Key]]:
        """All that is said, by place."""
        return {place: set(keys) for place, keys in self._told.items()}

    def in_order(self) -> Iterator[tuple[Residence, Key]]:
        """The same one by one, of each tier the oldest first, and before it what is leaving."""
        said = chain(self._leaving, self._told.items())
        return ((place, key) for place, keys in said for key in keys)

    def announced(self, key: Key) -> None:
        """The engine says that the block is stored."""
        if self._early:
            for place in self._told:
                if (place, key) in self._early:
                    del self._early[place, key]
                    self._tell(place, key)

    def stored(self, place: Residence, key: Key, *, is_announced: bool) -> None:
        """The tier holds the block now."""
        if place not in self._told:
            if len(self._told) == MAX_TIERS:
                return
            self._told[place] = OrderedDict()
        if is_announced or self.holds(key):
            self._tell(place, key)
            return
        self._early[place, key] = None
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def removed(self, place: Residence, key: Key) -> None:
        """The tier does not hold it any more."""
        self._early.pop((place, key), None)
        keys = self._told.get(place, OrderedDict())
        if key in keys:
            del keys[key]
            self._count -= 1
            self._news.add(place, key, removed=True)

    def lost(self, tier: str) -> None:
        """Nothing that the tier holds can be found: `let_go` says so."""
        for place in list(self._told):
            if place.tier == tier:
                self._leave(place)

    def lose_all(self) -> None:
        """No tier holds any of it: `let_go` says so."""
        for place in list(self._told):
            self._leave(place)

    def let_go(self, most: int) -> bool:
        """Say of so many lost blocks that they were removed. Whether some are left to be said."""
        while most > 0 and self._leaving:
            place, keys = self._leaving[0]
            for _ in range(min(most, len(keys))):
                key, _ = keys.popitem(last=False)
                self._news.add(place, key, removed=True)
                most -= 1
            if not keys:
                self._leaving.popleft()
        return bool(self._leaving)

    def clear(self) -> None:
        """All of it was taken back otherwise."""
        self._told.clear()
        self._leaving.clear()
        self._early.clear()
        self._count = 0

    def _leave(self, place: Residence) -> None:
        keys = self._told.pop(place)
        self._count -= len(keys)
        self._leaving.append((place, keys))
        left = (early for early in self._early if early[0] != place)
        self._early = OrderedDict.fromkeys(left)

    def _tell(self, place: Residence, key: Key) -> None:
        keys = self._told[place]
        if key in keys:
            return
        keys[key] = None
        self._count += 1
        self._news.add(place, key, removed=False)
        if self._count > MAX_TOLD:
            longest = max(self._told, key=lambda each: len(self._told[each]))
            self.removed(longest, next(iter(self._told[longest])))
