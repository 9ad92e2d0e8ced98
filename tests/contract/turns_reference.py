"""The policy `turns` again, one block at a time, with every interval kept: an oracle.

Only what is learnt is turned into scores by the policy's own function, which has tests of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvd.core.policy.base import UNKNOWN, Sight
from kvd.core.policy.hazard import BINS, CLASSES, EDGES, HALVED_EVERY, SCORED_EVERY, scores
from kvd.core.policy.turns import (
    _TURN,
    _TURN_MASK,
    CLEARLY_LESS,
    FIRST_TURNS,
    LONGEST_SILENCE_NS,
    MOST_TURNS,
    STAMP_SHIFT,
    TurnsPolicy,
)

MayGo = Callable[[int], bool]
WORD = (1 << 64) - 1


def turn_of(policy: TurnsPolicy, slot: int) -> int:
    """Of a known slot's block, as the policy itself has it."""
    return int(policy._words[slot]) >> _TURN & _TURN_MASK


@dataclass
class Block:
    tag: int
    turn: int
    generation: int
    weight: int
    request: int
    stamp: int
    learnt: bool
    watched: bool

    @property
    def spread(self) -> int:
        return self.tag * 0x9E3779B97F4A7C15 & WORD

    @property
    def number(self) -> int:
        return sum(self.turn >= first for first in FIRST_TURNS) - 1


def weight_of(learnt: int) -> int:
    return min(round(math.log2(max(1, learnt))), 15)


def bin_of(age: int) -> int:
    return min(int(np.searchsorted(EDGES, age, side="right")) - 1, BINS - 1)


class ReferenceTurns:
    def __init__(self, capacity: int) -> None:
        self.ghost_bits = (4 * max(capacity, 64) - 1).bit_length()
        self.blocks: dict[int, Block] = {}
        self.queues: list[list[int]] = [[] for _ in range(CLASSES)]
        self.ghosts: dict[int, Block] = {}
        self.made_ghosts = False
        self.scores = [[1.0] * BINS for _ in range(CLASSES)]
        self.returned = np.zeros((CLASSES, BINS))
        self.times = np.zeros((CLASSES, BINS))
        self.requests = self.latest = self.last_ns = self.ns = 0

    @property
    def now(self) -> int:
        return self.ns >> STAMP_SHIFT

    def look(self, sight: Sight) -> None:
        self.pass_time(sight.now_ns)
        if sight.request and sight.request <= self.latest:
            return
        self.latest = max(self.latest, sight.request)
        self.requests += 1
        if self.requests % HALVED_EVERY == 0:
            self.returned /= 2
            self.times /= 2
        if self.requests % SCORED_EVERY == 0:
            times = self.times.copy()
            for block in (*self.blocks.values(), *self.ghosts.values()):
                if block.watched:
                    times[block.number] += self.spent(block)
            self.scores = scores(self.returned, times).tolist()

    def pass_time(self, now_ns: int) -> None:
        if now_ns:
            step = now_ns - self.last_ns if self.last_ns else 0
            self.ns += min(max(step, 0), LONGEST_SILENCE_NS)
            self.last_ns = now_ns

    def spent(self, block: Block) -> np.ndarray:
        time = np.clip(self.now - block.stamp - EDGES[:-1], 0, np.diff(EDGES))
        return time * 0.5**block.weight

    def end(self, block: Block, *, returned: bool) -> None:
        if block.watched:
            self.times[block.number] += self.spent(block)
            if returned:
                at = bin_of(self.now - block.stamp)
                self.returned[block.number, at] += 0.5**block.weight

    # -- calls ------------------------------------------------------------------------------------

    def insert(self, blocks: list[tuple[int, int]], sight: Sight = UNKNOWN) -> None:
        self.look(sight)
        if not blocks:
            return
        generation = 1
        if sight.parent >= 0:
            parent = self.blocks[sight.parent]
            brought = sight.request and parent.request == sight.request
            same = brought and parent.turn == parent.generation
            generation = parent.generation if same else min(parent.generation + 1, MOST_TURNS)
        known = []
        for at, (slot, tag) in enumerate(blocks):
            block = Block(tag, generation, generation, 0, sight.request, self.now, False, False)
            begins = at == 0 and sight.parent < 0
            block.learnt = block.watched = begins or not block.spread >> 16 & 3
            place = block.spread >> 64 - self.ghost_bits
            ghost = self.ghosts.get(place)
            if self.made_ghosts and ghost is not None and ghost.tag == tag:
                del self.ghosts[place]
                self.end(ghost, returned=True)
                block.turn = min(ghost.turn + 1, MOST_TURNS)
                block.generation = ghost.generation
                generation = min(ghost.generation + 1, MOST_TURNS)
            known.append((slot, block))
        weight = weight_of(sum(block.learnt for _, block in known))
        least = 0
        for slot, block in reversed(known):
            block.weight = weight
            least = block.turn = max(block.turn, least)
            self.blocks[slot] = block
            self.queues[block.number].append(slot)

    def touch(self, slots: list[int], sight: Sight = UNKNOWN, *, as_use: bool = True) -> None:
        self.look(sight)
        weight = weight_of(sum(self.blocks[slot].learnt for slot in slots))
        before = {slot: replace(self.blocks[slot]) for slot in slots}
        least = 0
        for slot in reversed(slots):
            block, old = self.blocks[slot], before[slot]
            new = as_use and not (sight.request and old.request == sight.request)
            self.queues[block.number].remove(slot)
            block.turn = min(old.turn + new, MOST_TURNS)
            if as_use and sight.request:
                least = block.turn = max(block.turn, least)
                block.request = sight.request
            self.queues[block.number].append(slot)
            if slot in before and before[slot].watched is not None:
                if new:
                    self.end(old, returned=True)
                old.watched = False  # once, if it is named twice
            block.stamp, block.weight = self.now, weight
            block.watched = block.learnt

    def remove(self, slots: list[int]) -> None:
        for slot in slots:
            block = self.blocks.pop(slot)
            self.queues[block.number].remove(slot)
            self.end(block, returned=False)

    def evict(self, count: int, may_go: MayGo, now_ns: int = 0) -> list[int] | None:
        self.pass_time(now_ns)
        victims, looked_at = self.choose(count, may_go)
        if len(victims) < count:
            return None
        for number, queue in enumerate(self.queues):
            passed = [slot for slot in looked_at[number] if slot not in victims]
            queue[:] = [slot for slot in queue if slot not in looked_at[number]] + passed
        self.made_ghosts = True
        for slot in victims:
            block = self.blocks.pop(slot)
            place = block.spread >> 64 - self.ghost_bits
            if place in self.ghosts:
                self.end(self.ghosts[place], returned=False)
            self.ghosts[place] = block
        return victims

    def choose(self, count: int, may_go: MayGo) -> tuple[list[int], list[list[int]]]:
        at = [0] * len(self.queues)
        victims: list[int] = []
        looked_at: list[list[int]] = [[] for _ in self.queues]
        while len(victims) < count:
            heads = [
                (number, self.now - self.blocks[queue[at[number]]].stamp)
                for number, queue in enumerate(self.queues)
                if at[number] < len(queue)
            ]
            if not heads:
                break
            worth = {number: self.scores[number][bin_of(age)] for number, age in heads}
            oldest = max(heads, key=lambda head: head[1])[0]
            least = min(worth, key=lambda number: worth[number])
            chosen = least if worth[least] < CLEARLY_LESS * worth[oldest] else oldest
            slot = self.queues[chosen][at[chosen]]
            at[chosen] += 1
            looked_at[chosen].append(slot)
            if may_go(slot):
                victims.append(slot)
        return victims, looked_at

    def missed(self, tags: list[int]) -> None:
        pass

    def coldest(self, count: int) -> list[int]:
        return self.choose(count, lambda _: True)[0]
