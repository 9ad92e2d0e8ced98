"""The policies again, one block at a time in plain containers: oracles for the array versions.

They follow the prose that opens each module in kvd/core/policy, batch rules included.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from tests.contract.turns_reference import ReferenceTurns

MayGo = Callable[[int], bool]


class Reference(Protocol):
    def insert(self, blocks: list[tuple[int, int]]) -> None: ...
    def touch(self, slots: list[int], *, as_use: bool = True) -> None: ...
    def remove(self, slots: list[int]) -> None: ...
    def evict(self, count: int, may_go: MayGo) -> list[int] | None: ...
    def missed(self, tags: list[int]) -> None: ...
    def coldest(self, count: int) -> list[int]: ...


def oldest(queue: Iterable[int], count: int, may_go: MayGo) -> list[int]:
    return [slot for slot in queue if may_go(slot)][:count]


def take(queue: OrderedDict[int, int], victims: list[int], wanted: int) -> None:
    """Remove victims; what was passed over on the way to the last of them goes to the young end.

    Who wanted more victims than there were has passed over the whole queue.
    """
    order = list(queue)
    if wanted == len(victims):
        order = order[: order.index(victims[-1])] if victims else []
    passed = [slot for slot in order if slot not in victims]
    for slot in passed:
        queue.move_to_end(slot)
    for slot in victims:
        del queue[slot]


class ReferenceLru:
    def __init__(self, capacity: int) -> None:
        self.queue: OrderedDict[int, int] = OrderedDict()

    def insert(self, blocks: list[tuple[int, int]]) -> None:
        for slot, tag in reversed(blocks):
            self.queue[slot] = tag

    def touch(self, slots: list[int], *, as_use: bool = True) -> None:
        for slot in reversed(slots):
            self.queue.move_to_end(slot)

    def remove(self, slots: list[int]) -> None:
        for slot in slots:
            del self.queue[slot]

    def evict(self, count: int, may_go: MayGo) -> list[int] | None:
        victims = oldest(self.queue, count, may_go)
        if len(victims) < count:
            return None
        take(self.queue, victims, count)
        return victims

    def missed(self, tags: list[int]) -> None:
        pass

    def coldest(self, count: int) -> list[int]:
        return list(self.queue)[:count]


class ReferenceArc:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        self.recent: OrderedDict[int, int] = OrderedDict()  # slot -> tag
        self.frequent: OrderedDict[int, int] = OrderedDict()
        self.ghosts_of_recent: OrderedDict[int, bool] = OrderedDict()  # tag -> moved the target
        self.ghosts_of_frequent: OrderedDict[int, bool] = OrderedDict()

    def insert(self, blocks: list[tuple[int, int]]) -> None:
        self.missed([tag for _, tag in blocks])
        for slot, tag in reversed(blocks):
            known = tag in self.ghosts_of_recent or tag in self.ghosts_of_frequent
            (self.frequent if known else self.recent)[slot] = tag
            self.ghosts_of_recent.pop(tag, None)
            self.ghosts_of_frequent.pop(tag, None)
        self.trim()

    def touch(self, slots: list[int], *, as_use: bool = True) -> None:
        for slot in reversed(slots):
            if slot in self.recent and as_use:
                self.frequent[slot] = self.recent.pop(slot)
            elif slot in self.recent:
                self.recent.move_to_end(slot)
            else:
                self.frequent.move_to_end(slot)

    def remove(self, slots: list[int]) -> None:
        for slot in slots:
            (self.recent if slot in self.recent else self.frequent).pop(slot)

    def evict(self, count: int, may_go: MayGo) -> list[int] | None:
        room = max(0, math.floor(self.target) - len(self.recent) + 1)
        of_recent = count - min(count, room)
        first = oldest(self.recent, of_recent, may_go)
        of_frequent = count - len(first)
        second = oldest(self.frequent, of_frequent, may_go)
        if len(first) + len(second) < count:
            of_recent = count - len(second)
            first = oldest(self.recent, of_recent, may_go)
        if len(first) + len(second) < count:
            return None
        for slot in first:
            self.ghosts_of_recent[self.recent[slot]] = False
        for slot in second:
            self.ghosts_of_frequent[self.frequent[slot]] = False
        take(self.recent, first, of_recent)
        take(self.frequent, second, of_frequent)
        self.trim()
        return first + second

    def missed(self, tags: list[int]) -> None:
        ups = {tag for tag in tags if self.ghosts_of_recent.get(tag) is False}
        downs = {tag for tag in tags if self.ghosts_of_frequent.get(tag) is False}
        recent, frequent = len(self.ghosts_of_recent), len(self.ghosts_of_frequent)
        for tag in ups:
            self.ghosts_of_recent[tag] = True
        for tag in downs:
            self.ghosts_of_frequent[tag] = True
        if ups:
            step = max(1.0, frequent / recent)
            self.target = min(self.capacity, self.target + len(ups) * step)
        if downs:
            step = max(1.0, recent / frequent)
            self.target = max(0.0, self.target - len(downs) * step)

    def coldest(self, count: int) -> list[int]:
        queues = [list(self.recent), list(self.frequent)]
        if len(self.recent) <= self.target:
            queues.reverse()
        return (queues[0] + queues[1])[:count]

    def trim(self) -> None:
        while len(self.recent) + len(self.ghosts_of_recent) > self.capacity:
            if not self.ghosts_of_recent:
                break
            self.ghosts_of_recent.popitem(last=False)
        while self.ghosts_of_frequent and self.listed() > 2 * self.capacity:
            self.ghosts_of_frequent.popitem(last=False)

    def listed(self) -> int:
        resident = len(self.recent) + len(self.frequent)
        return resident + len(self.ghosts_of_recent) + len(self.ghosts_of_frequent)


class ReferenceS3Fifo:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: OrderedDict[int, int] = OrderedDict()  # slot -> tag
        self.main: OrderedDict[int, int] = OrderedDict()
        self.uses: dict[int, int] = {}
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    def insert(self, blocks: list[tuple[int, int]]) -> None:
        for slot, tag in reversed(blocks):
            (self.main if tag in self.ghosts else self.small)[slot] = tag
            self.uses[slot] = 0
        for _, tag in blocks:
            self.ghosts.pop(tag, None)

    def touch(self, slots: list[int], *, as_use: bool = True) -> None:
        for slot in set(slots) if as_use else ():
            self.uses[slot] = min(3, self.uses[slot] + 1)
        for slot in () if as_use else reversed(slots):
            (self.small if slot in self.small else self.main).move_to_end(slot)

    def remove(self, slots: list[int]) -> None:
        for slot in slots:
            (self.small if slot in self.small else self.main).pop(slot)

    def evict(self, count: int, may_go: MayGo) -> list[int] | None:
        if len(oldest([*self.small, *self.main], count, may_go)) < count:
            return None
        victims = self.walk_small(count, may_go)
        victims += self.walk_main(count - len(victims), may_go)
        for queue in (self.main, self.small):
            wanted = count - len(victims)
            rest = oldest(queue, wanted, may_go)
            if queue is self.small:
                self.remember([self.small[slot] for slot in rest])
            take(queue, rest, wanted)
            victims += rest
        return victims

    def walk_small(self, count: int, may_go: MayGo) -> list[int]:
        victims: list[int] = []
        tags: list[int] = []
        promotions = len(self.small) - max(1, self.capacity // 10) + 1
        for slot in list(self.small):
            if len(victims) == count or promotions <= 0:
                break
            tag = self.small.pop(slot)
            if not may_go(slot):
                self.small[slot] = tag
            elif self.uses[slot] > 1:
                self.main[slot] = tag
                self.uses[slot] = 0
                promotions -= 1
            else:
                victims.append(slot)
                tags.append(tag)
        self.remember(tags)
        return victims

    def walk_main(self, count: int, may_go: MayGo) -> list[int]:
        victims: list[int] = []
        for _ in range(4 * len(self.main)):
            if len(victims) == count or not self.main:
                break
            slot, tag = self.main.popitem(last=False)
            if may_go(slot) and self.uses[slot] == 0:
                victims.append(slot)
                continue
            if may_go(slot):
                self.uses[slot] -= 1
            self.main[slot] = tag
        return victims

    def remember(self, tags: list[int]) -> None:
        for tag in tags:
            self.ghosts[tag] = None
        while len(self.ghosts) > self.capacity - self.capacity // 10:
            self.ghosts.popitem(last=False)

    def missed(self, tags: list[int]) -> None:
        pass

    def coldest(self, count: int) -> list[int]:
        return [*self.small, *self.main][:count]


REFERENCES: dict[str, Callable[[int], Reference]] = {
    "lru": ReferenceLru,
    "arc": ReferenceArc,
    "s3fifo": ReferenceS3Fifo,
    "turns": ReferenceTurns,
}
