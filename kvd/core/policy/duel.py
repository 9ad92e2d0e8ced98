"""Policies tried side by side on a sample of a class's blocks, without their bytes.

A block is in the sample by its *segment* of the prompt, and a segment begins where a block's tag
says so, at one block in eight, and at the prompt's first one. So it does not matter how many
prompts share a beginning, and a segment is in the sample again when it comes back.

Each policy has a *shadow*: the policy itself, over as large a part of the class's slots as the
sample is of its blocks. What one request uses of the sample is shown to all shadows at once. A
shadow scores the leading blocks that it has.

Scores are compared by *windows*. In each of them as many blocks were used as a shadow has slots.
Each window counts a part in 32 less than the next one. A policy is better than another if the sum
of the differences is more than twice the root of the sum of their squares, as chance would hardly
have it, more than a hundredth of what the other found, and more than half as many blocks as a
shadow has slots. For a switch costs about a turnover of the pool, and what was learnt before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvd.core.keys import U64, Slots
from kvd.core.policy.base import EvictionPolicy, Sight
from kvd.core.policy.slot_queue import Capacity, PolicyMemory

SHADOW_BLOCKS = 256  # a shadow has so many slots, if a part of SAMPLED_FROM is not less
SAMPLED_FROM = 5  # one block in two to this power, at least while the class is small
MAX_SHADOW_BLOCKS = 4096
SHADOWED_AT_ONCE = 256  # blocks of one request that are shown
SEGMENT = 8  # blocks, on average; a power of two
GROWS_AT = 2  # times the slots that the shadows were made for: then others begin
WINDOW_KEPT = 31 / 32
BEYOND_CHANCE = 2.0
WORTH_A_SWITCH = 0.01
TURNOVER_WORTH_A_SWITCH = 0.5

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the top bits are spread
_MARK_SHIFT, _HEAD_SHIFT = np.uint64(48), np.uint64(40)
_ALL_MARKS = 1 << 16

MakePolicy = Callable[[str, Capacity, PolicyMemory], EvictionPolicy]


class Shadow:
    """A policy over slots without bytes."""

    def __init__(self, name: str, slots: int, make: MakePolicy) -> None:
        self._policy = make(name, lambda: slots, PolicyMemory(slots))
        self._slots: dict[int, int] = {}
        self._tags = [0] * slots
        self._free = list(range(slots))[::-1]

    def show(self, tags: U64, sight: Sight) -> int:
        """A request uses these, in order of the prompt, as many as the shadow has slots at most.

        How many of the leading ones were there.
        """
        names = tags.tolist()
        slots = [self._slots.get(name, -1) for name in names]
        at = np.array(slots, np.int64)
        there = at >= 0
        leading = int(at.size if there.all() else there.argmin())
        if leading < at.size:
            self._policy.missed(tags[~there])
        if there.any():
            self._policy.touch(at[there], sight)
        if not there.all():
            missing = np.flatnonzero(~there)
            at[missing] = self._make_room(int(missing.size), at[there])
            parent = int(at[missing[0] - 1]) if missing[0] else -1
            self._policy.insert(at[missing], tags[missing], sight._replace(parent=parent))
            for place in missing.tolist():
                slot = int(at[place])
                self._slots[names[place]] = slot
                self._tags[slot] = names[place]
        if there.any():  # else they came in in the order of the prompt
            self._policy.touch(at, sight, as_use=False)
        return leading

    def _make_room(self, count: int, used: Slots) -> list[int]:
        more = count - len(self._free)
        if more > 0:
            stays = set(used.tolist())

            def may_go(slots: Slots) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
                return np.array([slot not in stays for slot in slots.tolist()], np.bool_)

            victims = self._policy.evict(more, may_go, 0)
            assert victims is not None, "a request has no more blocks than a shadow has slots"
            for slot in victims.tolist():
                del self._slots[self._tags[slot]]
                self._free.append(slot)
        return [self._free.pop() for _ in range(count)]


class Duel:
    """Shows each shadow what is used of the sample, and says who is better."""

    def __init__(self, names: Sequence[str], capacity: Capacity, make: MakePolicy) -> None:
        self._names = tuple(names)
        self._capacity, self._make = capacity, make
        self.forget()

    def forget(self) -> None:
        """Know nothing, and take no memory until there is something to evict."""
        self._made_for = 0
        self._below = 0  # marks of the sample
        self._shadows: list[Shadow] = []
        self._sight = Sight()
        self._under_way: list[U64] = []
        self._to_show = 0  # so many are in there
        self._start_scoring()

    def _start_scoring(self) -> None:
        count = len(self._names)
        self._window = np.zeros(count)
        self._offered = 0
        self._found = np.zeros(count)
        self._gained = np.zeros((count, count))  # by the first over the second
        self._squared = np.zeros((count, count))

    @property
    def shadow_slots(self) -> int:
        """Of each shadow."""
        return self._made_for * self._below // _ALL_MARKS

    def fit(self) -> None:
        """Follow the class, which evicts; shadows of another size begin empty."""
        slots = self._capacity()
        if self._made_for <= slots * GROWS_AT and slots <= self._made_for * GROWS_AT:
            return
        self.forget()
        bits = min(max((slots // SHADOW_BLOCKS).bit_length() - 1, 0), SAMPLED_FROM)
        while slots >> bits > MAX_SHADOW_BLOCKS:
            bits += 1
        self._made_for = slots
        self._below = max(1, _ALL_MARKS >> bits)
        size = max(1, self.shadow_slots)
        self._shadows = [Shadow(name, size, self._make) for name in self._names]

    # -- what is used ---------------------------------------------------------------------------

    @staticmethod
    def marks_of(tags: U64, before: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        """The mark of each block's segment; `before`: that of the block before them, -1: none."""
        spread = tags * _SPREAD
        begins = spread >> _HEAD_SHIFT & np.uint64(SEGMENT - 1) == 0
        if before < 0:
            begins[0] = True
        heads = np.flatnonzero(begins)
        own = (spread.take(heads) >> _MARK_SHIFT).astype(np.uint16)
        if not heads.size or heads[0]:
            heads = np.concatenate(([0], heads))
            own = np.concatenate((np.array([max(before, 0)], np.uint16), own))
        return own.repeat(np.diff(heads, append=tags.size))

    def use(self, tags: U64, marks: np.ndarray, sight: Sight) -> None:
        """A request uses these, those that it brings too."""
        if not self._shadows:
            return
        if sight.request != self._sight.request or not sight.request:
            self._show()
            self._sight = sight
        left = min(SHADOWED_AT_ONCE, max(1, self.shadow_slots)) - self._to_show
        if left <= 0:  # one request may use its blocks for ever
            return
        sampled = np.flatnonzero(marks < self._below)[:left]
        if sampled.size:
            self._under_way.append(tags[sampled])
            self._to_show += int(sampled.size)

    def _show(self) -> None:
        """Show what the last request used."""
        if not self._under_way:
            return
        tags = np.concatenate(self._under_way)
        self._under_way, self._to_show = [], 0
        _, first = np.unique(tags, return_index=True)
        tags = tags[np.sort(first)]
        for number, shadow in enumerate(self._shadows):
            self._window[number] += shadow.show(tags, self._sight)
        self._offered += int(tags.size)
        if self._offered >= self.shadow_slots:
            self._end_window()

    def _end_window(self) -> None:
        gained = self._window[:, None] - self._window[None, :]
        self._found = self._found * WINDOW_KEPT + self._window
        self._gained = self._gained * WINDOW_KEPT + gained
        self._squared = self._squared * WINDOW_KEPT**2 + gained**2
        self._window[:] = 0
        self._offered = 0

    def better_than(self, name: str) -> str | None:
        """The policy that found the most, if that is clearly more than this one did."""
        this, best = self._names.index(name), int(self._found.argmax())
        gained = self._gained[best, this]
        by_chance = BEYOND_CHANCE * float(np.sqrt(self._squared[best, this]))
        turnover = TURNOVER_WORTH_A_SWITCH * self.shadow_slots
        if gained > max(by_chance, WORTH_A_SWITCH * self._found[this], turnover):
            return self._names[best]
        return None
