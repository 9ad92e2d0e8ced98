"""Index pages are as large as the slots of their namespace want them, whatever came before."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.core.keys import U64, NamespaceId
from kvd.pieces import PIECE_KEYS
from kvd.pool.config import PoolError
from kvd.pool.pages import SHRINK_PIECES, SHRINK_SHARE, SMALLEST_SLOTS, Pages
from kvd_proto.page import PageReader
from kvd_proto.tags import mix
from tests import leaks

ONE, TWO = NamespaceId(1), NamespaceId(2)


@pytest.fixture
def pages() -> Iterator[Pages]:
    kept = Pages()
    yield kept
    kept.close()


def tags(first: int, count: int) -> U64:
    return mix(np.arange(first + 1, first + count + 1, dtype=np.uint64))


def probe(pages: Pages, wanted: U64) -> list[bool]:
    reader = PageReader(pages.read_only_fd(ONE))
    try:
        found: list[bool] = reader.probe(wanted).tolist()
        return found
    finally:
        reader.close()


def settle(pages: Pages) -> None:
    for _ in range(20 * SHRINK_PIECES):
        pages.upkeep()


def test_a_page_takes_a_small_part_of_what_its_slots_take(pages: Pages) -> None:
    """Of a page for all that the pool could hold, random tags touch all."""
    pages.open(ONE)
    for row in range(32):
        pages.granted(ONE, 16384)
        pages.insert(ONE, tags(16384 * row, 16384))
    settle(pages)
    held = 32 * 16384
    assert pages.spilled(ONE) == 0
    assert all(probe(pages, tags(0, held)))
    assert pages.taken() <= 4 * 16 * held + 8192
    for row in range(31):
        pages.remove(ONE, tags(16384 * row, 16384))
        pages.released(ONE, 16384)
    settle(pages)
    assert all(probe(pages, tags(31 * 16384, 16384)))
    assert pages.taken() <= SHRINK_SHARE * 16 * 16384 + 8192


def test_emptied_namespaces_give_their_pages_memory_back(pages: Pages) -> None:
    for number in range(50):
        pages.open(NamespaceId(number))
        pages.granted(NamespaceId(number), 16384)
        pages.insert(NamespaceId(number), tags(0, 16384))
        pages.remove(NamespaceId(number), tags(0, 16384))
        pages.released(NamespaceId(number), 16384)
    assert pages.taken() > 50 * 16 * 16384
    for _ in range(SHRINK_PIECES + 50):
        pages.upkeep()
    assert pages.taken() <= 50 * 8192


def test_readers_are_told_of_the_page_that_follows(pages: Pages) -> None:
    pages.open(ONE)
    pages.granted(ONE, 16384)
    pages.set_room(ONE, (7, 5))
    pages.insert(ONE, tags(0, 10))
    reader = PageReader(pages.read_only_fd(ONE))
    pages.granted(ONE, 100_000)
    said = [(reader.replaced, reader.closed)]
    assert reader.probe(tags(0, 10)).all()
    settle(pages)
    said.append((reader.replaced, reader.closed))
    assert said == [(False, False), (True, False)]
    reader.close()
    reader = PageReader(pages.read_only_fd(ONE))
    assert (reader.room(0), reader.room(1)) == (7, 5)
    assert reader.probe(tags(0, 10)).all()
    pages.forget(ONE)
    pages.released(ONE, 16384)
    assert reader.closed
    reader.close()


@pytest.mark.parametrize("call", ["memfd_create", "open"])
def test_what_the_system_refuses_is_said_and_asked_for_again(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = leaks.descriptors()
    pages.open(ONE)

    def refuse(*_args: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(PoolError, match="LimitNOFILE"):
            pages.prepare()
        pages.granted(ONE, 1000)  # the page stays as it is for a while
        pages.insert(ONE, tags(0, 10))
        assert len(leaks.descriptors()) == len(before) + 2
    settle(pages)
    assert pages.insert(ONE, tags(10, 990)) == 0
    assert all(probe(pages, tags(0, 1000)))
    pages.open(TWO)


class PagesOfAnyHistory(RuleBasedStateMachine):
    """What is resident is found, and nothing else, while pages grow and shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages()
        self.pages.open(ONE)
        self.slots = 0
        self.resident: dict[int, None] = {}
        self.next = 0

    @rule(count=st.integers(1, 8000))
    def grant(self, count: int) -> None:
        self.slots += count
        self.pages.granted(ONE, count)

    @precondition(lambda self: len(self.resident) < self.slots)
    @rule(share=st.floats(0.01, 1))
    def store(self, share: float) -> None:
        count = max(1, int(share * (self.slots - len(self.resident))))
        for first in range(self.next, self.next + count, PIECE_KEYS):
            piece = min(PIECE_KEYS, self.next + count - first)
            assert self.pages.insert(ONE, tags(first, piece)) == 0
        self.resident.update(dict.fromkeys(range(self.next, self.next + count)))
        self.next += count

    @precondition(lambda self: self.resident)
    @rule(share=st.floats(0.01, 1), newest=st.booleans())
    def evict(self, share: float, newest: bool) -> None:
        order = list(self.resident)[:: -1 if newest else 1]
        gone = order[: max(1, int(share * len(order)))]
        self.pages.remove(ONE, mix(np.array(gone, dtype=np.uint64) + np.uint64(1)))
        for number in gone:
            del self.resident[number]

    @precondition(lambda self: self.slots > len(self.resident))
    @rule(share=st.floats(0.01, 1))
    def release(self, share: float) -> None:
        count = max(1, int(share * (self.slots - len(self.resident))))
        self.slots -= count
        self.pages.released(ONE, count)

    @rule(pieces=st.integers(1, 3 * SHRINK_PIECES))
    def tick(self, pieces: int) -> None:
        for _ in range(pieces):
            self.pages.upkeep()

    @invariant()
    def found_is_what_is_resident(self) -> None:
        every = tags(0, self.next)
        expected = np.zeros(self.next, dtype=bool)
        expected[list(self.resident)] = True
        assert probe(self.pages, every) == expected.tolist()

    def teardown(self) -> None:
        settle(self.pages)
        most = SHRINK_SHARE * 16 * max(self.slots, SMALLEST_SLOTS) + 8192
        assert self.pages.taken() <= most
        self.found_is_what_is_resident()
        self.pages.close()


TestPagesOfAnyHistory = PagesOfAnyHistory.TestCase
TestPagesOfAnyHistory.settings = settings(deadline=None, max_examples=25, stateful_step_count=25)
