"""Shortens a failing world's journal: steps are left out as long as it fails in the same way."""

from __future__ import annotations

import traceback

from tests.simulation.whole.world import SimFailure, World

MOST_TRIES = 80


def failure_of(seed: int, steps: int, left_out: frozenset[int] = frozenset()) -> SimFailure | None:
    """How the world fails without these steps; None where it doesn't."""
    try:
        World(seed, steps, left_out).run()
    except SimFailure as failure:
        for error in (failure, failure.__cause__, failure.__context__):
            if error is not None:  # their frames hold the world, with all that it has open
                traceback.clear_frames(error.__traceback__)
        return failure
    return None


def shrunk(seed: int, steps: int, first: SimFailure, tries: int = MOST_TRIES) -> SimFailure:
    """The failure with as few steps as so many tries find; its journal tells them."""
    best, left_out = first, frozenset[int]()
    size = max(1, first.step // 2)
    while size and tries:
        shorter = False
        for start in range(0, best.step, size):
            some = frozenset(range(start, min(start + size, best.step))) - left_out
            if not some:
                continue
            if not tries:
                break
            tries -= 1
            failure = failure_of(seed, steps, left_out | some)
            if failure is not None and failure.kind == first.kind:
                best, left_out, shorter = failure, left_out | some, True
        if not shorter or size > 1:
            size //= 2
    return best
