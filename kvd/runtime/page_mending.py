"""Tags that an index page had no place for are written once it has.

A page without memory for a larger table spills tags: those blocks are readable, and nobody looks
for them. Which ones they are nobody remembers, so that a long shortage costs no memory either.
Once a page has room again the readable blocks of its namespace are gone through, some at each
tick, and what is missing is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from kvd.core.keys import U64, NamespaceId
from kvd.core.machine import Machine
from kvd.pool.pool import Pool

log = logging.getLogger(__name__)

# In one tick, some milliseconds where all are missing.
TAGS_AT_ONCE = 2048  # but for the rest of the last piece
PIECES_AT_ONCE = 64  # of TAGGED_SLOTS slots each, many of them empty
PAUSE_TICKS = 20  # after a turn through a namespace that mended nothing


class PageMending:
    """Mends index pages that lacked memory, one namespace after the other; called at each tick."""

    def __init__(self, machine: Machine, pool: Pool) -> None:
        self._machine = machine
        self._pool = pool
        self._namespace = NamespaceId(0)
        self._tags: Iterator[U64] | None = None  # of the rest of its blocks
        self._mended = 0  # of it
        self._pause = 0  # ticks

    def go_on(self) -> None:
        """A piece of the work, if there is any."""
        if self._tags is None and not self._begin():
            return
        looked_at = 0
        for _ in range(PIECES_AT_ONCE):
            count = self._mend_some()
            if count is None:
                self._end()
                return
            looked_at += count
            if looked_at >= TAGS_AT_ONCE:
                return

    def _begin(self) -> bool:
        if self._pause:
            self._pause -= 1
            return False
        namespace = self._pool.page_to_mend()
        if namespace is None:
            return False
        self._namespace, self._mended = namespace, 0
        self._tags = self._machine.readable_tags(namespace)
        return True

    def _mend_some(self) -> int | None:
        """How many tags were looked at; None where there is nothing left, or no room."""
        assert self._tags is not None, "there is nothing to go through"
        tags = next(self._tags, None)
        mended = None if tags is None else self._pool.mend_page(self._namespace, tags)
        if tags is None or mended is None:
            return None
        self._mended += mended
        return len(tags)

    def _end(self) -> None:
        self._tags = None
        if self._mended:
            log.info("%d more blocks are found by an index page again", self._mended)
        else:
            self._pause = PAUSE_TICKS
