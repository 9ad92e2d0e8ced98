"""Whether a history of calls by many clients could have happened one after the other.

Each block is a register by itself, there or not. A call takes effect at one moment between its
beginning and its end. Wing and Gong's search: of the calls that no other precedes, one is taken as
the next, if the register allows it; states seen before are not gone into again.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a call did to a block, or saw of it."""

    STORED = "stored"  # there from now on
    MAYBE_STORED = "maybe stored"  # it was asked for, and nobody said that it was done
    FOUND = "found"
    MISSED = "missed"
    REMOVED = "removed"  # announced: it was there, and is not
    CLEARED = "cleared"  # not there, whether it was or not
    MAYBE_CLEARED = "maybe cleared"  # it was asked for, and nobody said that it was done


@dataclass(frozen=True, slots=True)
class Call:
    """One call on one block. Times are of one clock."""

    kind: Kind
    begin: float
    end: float
    who: str = ""


_MAYBE = (Kind.MAYBE_STORED, Kind.MAYBE_CLEARED)
_LOOKS = {Kind.FOUND: True, Kind.MISSED: False}
MOST_STATES = 200_000  # of the search in one block: more than any history here takes


class TooLong(AssertionError):
    """The search was given up; the history says neither yes nor no."""


def faults(history: Iterable[tuple[object, Call]]) -> list[str]:
    """The blocks whose calls can't have happened, with those calls in order."""
    by_block: dict[object, list[Call]] = defaultdict(list)
    for block, call in history:
        by_block[block].append(call)
    return [
        f"{block}: {[(c.kind.value, round(c.begin, 3), round(c.end, 3), c.who) for c in calls]}"
        for block, calls in by_block.items()
        if not possible(sorted(calls, key=lambda call: (call.begin, call.end)))
    ]


def possible(calls: Sequence[Call]) -> bool:
    """Whether there is an order of these calls on one block that a register would follow."""
    whole = (1 << len(calls)) - 1
    optional = sum(1 << n for n, call in enumerate(calls) if call.kind in _MAYBE)
    # Announcements come in the order of what they announce.
    removals = [n for n, call in enumerate(calls) if call.kind is Kind.REMOVED]
    removals.sort(key=lambda n: calls[n].end)
    before = dict(zip(removals[1:], removals, strict=False))
    seen: set[tuple[int, bool]] = set()
    left = [(0, False)]
    while left:
        done, there = left.pop()
        if done | optional == whole:
            return True
        if (done, there) in seen:
            continue
        if len(seen) > MOST_STATES:
            raise TooLong(f"{len(calls)} calls")
        seen.add((done, there))
        due = min(
            (c.end for n, c in enumerate(calls) if not (done | optional) >> n & 1),
            default=math.inf,
        )
        next_ones = [
            number
            for number, call in enumerate(calls)
            if not done >> number & 1
            and call.begin <= due
            and (number not in before or done >> before[number] & 1)
        ]
        # What only looks, and sees what is so, may as well have looked now.
        looks = [number for number in next_ones if _LOOKS.get(calls[number].kind) is there]
        if looks:
            left.append((done | sum(1 << number for number in looks), there))
            continue
        for number in next_ones:
            after = _step(calls[number].kind, there=there)
            if after is not None:
                left.append((done | 1 << number, after))
    return False


def _step(kind: Kind, *, there: bool) -> bool | None:
    """The register after the call; None where it can't be the next."""
    match kind:
        case Kind.STORED:
            return True
        case Kind.MAYBE_STORED:  # of one that is there nothing is to be said
            return None if there else True
        case Kind.FOUND:
            return True if there else None
        case Kind.MISSED:
            return None if there else False
        case Kind.REMOVED:
            return False if there else None
        case Kind.CLEARED:
            return False
        case Kind.MAYBE_CLEARED:  # of one that is not there nothing is to be said
            return False if there else None
