"""What a policy of turns remembers of blocks that have left: one word each, in one table.

A ghost's place is the top bits of its spread tag; another one there takes it, so the table
forgets by chance, the longer ago a block left the likelier. What a word says of its block is the
policy's; its highest bits, which are free there, check the tag: one in 65,536 is taken for
another block's, which costs a little of the policy's judgement and nothing else.
"""

from __future__ import annotations

import numpy as np

from kvd.core.keys import NO_SLOTS, U64, Slots
from kvd.core.policy.slot_queue import Capacity
from kvd.core.sparse import sparse_zeros

GHOSTS_A_SLOT = 4  # places for each slot of the class at least; up to twice as many
MAX_GHOST_PLACES = 1 << 22  # of one policy
LEAST_GHOST_PLACES = 256
GROWS_AT = 2  # times the capacity that the table was made for: then a larger one begins, empty
SHRINKS_AT = 16  # times fewer

_CHECK_SHIFT = np.uint64(21)
_CHECK_BIT = 47  # the lowest one
_CHECK_MASK = np.uint64((1 << 16) - 1)
_WORD_MASK = (1 << _CHECK_BIT) - 1


class TurnGhosts:
    """Words by tag. A word is never 0, and has no bit above the 47th. Tags come spread."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.forget_all()

    @property
    def bytes_used(self) -> int:
        return self._words.nbytes

    def forget_all(self) -> None:
        """Remember nothing, and take no memory until there is something to remember."""
        self._make(0)

    def fit(self) -> bool:
        """Follow the class before more are added. True: what was remembered is not any more."""
        wanted = max(self._capacity(), LEAST_GHOST_PLACES // GHOSTS_A_SLOT)
        if wanted > GROWS_AT * self._made_for or SHRINKS_AT * wanted < self._made_for:
            had_some = self._made_for > 0
            self._make(wanted)
            return had_some
        return False

    def add(self, spread: U64, words: Slots) -> Slots:
        """Remember these. The words that are no longer known; one of two at one place is such."""
        places = self._places_of(spread)
        before = self._words.take(places)
        after = words & _WORD_MASK | self._checks(spread)
        self._words[places] = after
        stands = self._words.take(places) == after
        lost: Slots = np.where(stands, before, after) & _WORD_MASK
        known: Slots = lost[lost != 0]
        return known

    def take(self, spread: U64) -> tuple[Slots, Slots]:
        """Which of these are remembered, and their words; they are not any more."""
        if not self._made_for:
            return NO_SLOTS, NO_SLOTS
        places = self._places_of(spread)
        words = self._words.take(places)
        found = np.flatnonzero((words != 0) & (words & ~_WORD_MASK == self._checks(spread)))
        if not found.size:
            return NO_SLOTS, NO_SLOTS
        self._words[places[found]] = 0
        return found, words[found] & _WORD_MASK

    def _make(self, capacity: int) -> None:
        self._made_for = capacity
        places = min(GHOSTS_A_SLOT * capacity, MAX_GHOST_PLACES)
        bits = max(1, (places - 1).bit_length()) if capacity else 1
        self._shift = np.uint64(64 - bits)
        self._words: Slots = sparse_zeros(1 << bits, np.int64)

    def _places_of(self, spread: U64) -> Slots:
        return (spread >> self._shift).astype(np.int64)

    @staticmethod
    def _checks(spread: U64) -> Slots:
        return (spread >> _CHECK_SHIFT & _CHECK_MASK).astype(np.int64) << _CHECK_BIT
