"""Tags that an index page had no place for are written in bounded pieces once it has."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from kvd.core.keys import U64, NamespaceId
from kvd.core.machine import TAGGED_SLOTS
from kvd.pool.index_page import IndexPage
from kvd.runtime.page_mending import PAUSE_TICKS, PIECES_AT_ONCE, TAGS_AT_ONCE, PageMending
from kvd_proto.page import PageReader
from kvd_proto.tags import mix

BLOCKS = 40_000
NAMESPACE = NamespaceId(1)


class Blocks:
    """Machine and pool in one: the readable blocks of one namespace, some in each piece."""

    def __init__(self, page: IndexPage, pieces: list[U64]) -> None:
        self.page = page
        self.pieces = pieces
        self.turns = 0
        self.looked_at: list[int] = []  # tags, piece by piece

    def readable_tags(self, _namespace: NamespaceId) -> Iterator[U64]:
        self.turns += 1
        yield from self.pieces

    def page_to_mend(self) -> NamespaceId | None:
        return NAMESPACE if self.page.has_room_again else None

    def mend_page(self, namespace: NamespaceId, tags: U64) -> int | None:
        assert namespace == NAMESPACE
        self.looked_at.append(len(tags))
        return self.page.mend(tags) if self.page.has_room_again else None


@pytest.fixture
def spilled(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[IndexPage, U64]]:
    """A page that has grown after a shortage, and the tags of its blocks."""

    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    page = IndexPage("kvd-test-page", BLOCKS)
    tags = mix(np.arange(1, BLOCKS + 1, dtype=np.uint64))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        for first in range(0, BLOCKS, 256):
            page.insert(tags[first : first + 256])
    while page.unsettled:
        page.upkeep(4096)
    yield page, tags
    page.close()


def test_a_tick_looks_at_few_tags_and_all_blocks_are_found_in_the_end(
    spilled: tuple[IndexPage, U64],
) -> None:
    page, tags = spilled
    sparse = [tags[number : number + 1] for number in range(500)]
    dense = np.array_split(tags[500:], len(tags[500:]) // TAGGED_SLOTS + 1)
    blocks = Blocks(page, [*sparse, *dense])
    mending = PageMending(cast("Any", blocks), cast("Any", blocks))
    ticks = 0
    while page.spilled:
        blocks.looked_at.clear()
        mending.go_on()
        ticks += 1
        assert 1 <= len(blocks.looked_at) <= PIECES_AT_ONCE
        assert sum(blocks.looked_at) < TAGS_AT_ONCE + TAGGED_SLOTS
        assert ticks < 100
    reader = PageReader(page.read_only_fd)
    assert reader.probe(tags).all()
    reader.close()
    assert blocks.turns == 1


def test_a_turn_that_mended_nothing_is_followed_by_a_pause(
    spilled: tuple[IndexPage, U64],
) -> None:
    page, _tags = spilled
    blocks = Blocks(page, [])
    mending = PageMending(cast("Any", blocks), cast("Any", blocks))
    for _ in range(3 * (PAUSE_TICKS + 1)):
        mending.go_on()
    assert blocks.turns == 3
