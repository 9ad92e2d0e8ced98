"""The index pages of all namespaces, each as large as the rows of its namespace want it.

Tags lie anywhere in a page, so one for all that the pool could hold would soon be in memory as a
whole, for each namespace that ever stored much. So a page follows the slots that were granted: it
is replaced by a larger one before it fills, and by a smaller one once it has been SHRINK_SHARE
times too large for a while. The tags go over in pieces, while both are kept; then readers are told
to ask for the new one. An empty page is replaced at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvd.core.keys import U64, NamespaceId
from kvd.pool.config import PoolError
from kvd.pool.index_page import IndexPage
from kvd_proto import layout

log = logging.getLogger(__name__)

SMALLEST_SLOTS = 32
GROWN = 2  # times the slots that there are, and at most twice that
SHRINK_SHARE = 8
SHRINK_PIECES = 40  # of upkeep, for which a page was too large
TRY_AGAIN_PIECES = 20  # of upkeep, after there was no memory or descriptor for a page
BUCKETS_COPIED = 2048  # in one piece of upkeep
BUCKETS_A_TAG = 1  # copied with each insertion, so that it ends before the old page is full


@dataclass(slots=True)
class _Kept:
    page: IndexPage
    slots: int  # granted to the namespace
    next: IndexPage | None = None  # takes the page's place once all tags are in it
    copied: int = 0  # buckets
    lost: int = 0  # tags that had found no place before there was a next one


class Pages:
    """Synchronous; a page that can't be had is tried again later, and the old one serves on."""

    def __init__(self) -> None:
        self._kept: dict[NamespaceId, _Kept] = {}
        self._spare: IndexPage | None = None  # for the next namespace
        self._copying: dict[NamespaceId, None] = {}
        self._misfits: dict[NamespaceId, int] = {}  # number of the piece from which to refit it
        self._piece = 0

    def prepare(self) -> None:
        """Make sure that the next namespace gets its page; PoolError where it can't be had."""
        if self._spare is None:
            self._spare = _first_page(0)

    def recovered(self, namespace: NamespaceId, slots: int) -> None:
        """A page for a namespace that has so many slots; PoolError where it can't be had."""
        self._kept[namespace] = _Kept(_first_page(slots), slots)

    def open(self, namespace: NamespaceId) -> None:
        """Give the namespace a page unless it has one."""
        if namespace in self._kept:
            return
        self.prepare()
        assert self._spare is not None, "it was prepared"
        self._kept[namespace] = _Kept(self._spare, 0)
        self._spare = None

    def granted(self, namespace: NamespaceId, slots: int) -> None:
        """So many slots more."""
        kept = self._kept[namespace]
        kept.slots += slots
        if kept.page.capacity < kept.slots:
            self._refit(namespace)

    def released(self, namespace: NamespaceId, slots: int) -> None:
        """So many slots fewer; also of a namespace that was forgotten before its rows were."""
        kept = self._kept.get(namespace)
        if kept is None:
            return
        kept.slots -= slots
        if _too_large(kept):
            self._misfits.setdefault(namespace, self._piece + SHRINK_PIECES)

    def forget(self, namespace: NamespaceId) -> None:
        """Tell those who map its page that nobody keeps it any more."""
        kept = self._kept.pop(namespace)
        self._copying.pop(namespace, None)
        self._misfits.pop(namespace, None)
        for page in (kept.page, kept.next):
            if page is not None:
                page.close()

    def close(self) -> None:
        """Forget them all."""
        for namespace in list(self._kept):
            self.forget(namespace)
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    # -- what stands in them ----------------------------------------------------------------------

    def insert(self, namespace: NamespaceId, tags: U64) -> int:
        """Make tags visible; how many of them found no place."""
        kept = self._kept[namespace]
        spilled = kept.page.insert(tags)
        if kept.next is not None:
            kept.next.insert(tags)
            self._copy(namespace, kept, BUCKETS_A_TAG * len(tags))
        return spilled

    def remove(self, namespace: NamespaceId, tags: U64) -> None:
        """Take tags out."""
        kept = self._kept[namespace]
        kept.page.remove(tags)
        if kept.next is not None:
            kept.next.remove(tags)

    def set_room(self, namespace: NamespaceId, rooms: Sequence[int]) -> None:
        """Say for each group how many blocks a store could get now."""
        self._kept[namespace].page.set_room(rooms)

    # -- what they are ----------------------------------------------------------------------------

    def read_only_fd(self, namespace: NamespaceId) -> int:
        """A read-only descriptor of the page, which stays open here."""
        return self._kept[namespace].page.read_only_fd

    def page_bytes(self, namespace: NamespaceId) -> int:
        return self._kept[namespace].page.page_bytes

    def spilled(self, namespace: NamespaceId) -> int:
        """Tags that found no place."""
        return self._kept[namespace].page.spilled

    def taken(self) -> int:
        """Bytes of memory behind all pages."""
        pages = [page for kept in self._kept.values() for page in (kept.page, kept.next)]
        return sum(os.fstat(page.read_only_fd).st_blocks * 512 for page in pages if page)

    # -- their size -------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """A piece of what is left to do."""
        self._piece += 1
        if self._copying:
            namespace = next(iter(self._copying))
            self._copy(namespace, self._kept[namespace], BUCKETS_COPIED)
        elif self._misfits:
            namespace, due = next(iter(self._misfits.items()))
            if due <= self._piece:
                del self._misfits[namespace]
                self._refit(namespace)

    def _refit(self, namespace: NamespaceId) -> None:
        """Begin to replace the page if it doesn't fit; one that is being replaced comes later."""
        kept = self._kept[namespace]
        if kept.next is not None or not (kept.page.capacity < kept.slots or _too_large(kept)):
            return
        wanted = max(SMALLEST_SLOTS, GROWN * kept.slots)
        try:
            kept.next = IndexPage(f"kvd-page-{namespace}", wanted)
        except OSError as error:
            log.warning("the index page of namespace %d stays small: %s", namespace, error)
            self._misfits[namespace] = self._piece + TRY_AGAIN_PIECES
            return
        kept.lost = kept.page.spilled
        kept.copied = 0 if kept.page.tags else kept.page.buckets
        self._copying[namespace] = None
        # A small one at once: it would soon be full.
        self._copy(namespace, kept, BUCKETS_COPIED if kept.page.buckets <= BUCKETS_COPIED else 0)

    def _copy(self, namespace: NamespaceId, kept: _Kept, buckets: int) -> None:
        """Take over the tags of some buckets; after the last the new page is the page."""
        old, new = kept.page, kept.next
        assert new is not None, "nothing is to be copied"
        new.copy_from(old, kept.copied, buckets)
        kept.copied += buckets
        if kept.copied < old.buckets:
            return
        new.take_room_from(old)
        new.spilled += min(kept.lost, old.spilled)
        kept.page, kept.next = new, None
        del self._copying[namespace]
        old.close(layout.PAGE_REPLACED)
        self._refit(namespace)  # it may have grown or shrunk meanwhile


def _first_page(slots: int) -> IndexPage:
    try:
        return IndexPage("kvd-page", max(SMALLEST_SLOTS, GROWN * slots))
    except OSError as error:
        raise PoolError(
            f"no index page for another namespace: {error.strerror}; give the daemon more file"
            " descriptors (LimitNOFILE) and memory, or open fewer namespaces"
        ) from error


def _too_large(kept: _Kept) -> bool:
    return kept.page.capacity > SHRINK_SHARE * max(SMALLEST_SLOTS, kept.slots)
