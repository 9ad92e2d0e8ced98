"""Compares the pool's files and index pages with what the core knows; reads, and changes nothing.

Each call is a piece of a few milliseconds at most. The core's side comes as arrays.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.core.actions import GrantRow
from kvd.core.keys import NO_SUM, U32, U64, KeyBatch, NamespaceId, RowId, Slots
from kvd.core.upkeep.verify import Finding, named
from kvd.linux.standing import Standing
from kvd.pool import sealed_json
from kvd.pool.checksum_table import NO_DIGEST
from kvd.pool.index_page import IndexPage
from kvd.pool.recovery import PoolFiles
from kvd.pool.registry import Registry
from kvd.pool.row_table import GrantedRow

LINES_AT_ONCE = 64  # of the registry
NAMES_AT_ONCE = 512  # of namespaces and scopes, that are compared
EXTENTS_AT_ONCE = 16
PAGE_WORDS_LOOKED_AT = 1 << 20

Flags = npt.NDArray[np.bool_]


class CoreBlocks(NamedTuple):
    """Some slots of one row, as the core has them. `shown`: what the index page should show."""

    row: GrantRow
    place: str
    ordinals: Slots
    ready: Flags
    scopes: U32  # these and the next ones of the readable slots alone
    keys: KeyBatch
    shown: U64


@dataclass(frozen=True, slots=True)
class Books:
    """The pool's files and pages, with all rows that are granted."""

    files: PoolFiles
    rows: Mapping[RowId, GrantedRow]
    pages: Mapping[NamespaceId, IndexPage]
    standing: Standing

    def row(self, grant: GrantRow, place: str) -> list[Finding]:
        """The pool knows the row, and a restart would."""
        wanted = GrantedRow(
            grant.row, grant.namespace, grant.group, grant.extents, grant.part_bytes, grant.slots
        )
        known = self.rows.get(grant.row)
        if known != wanted:
            return [Finding("rows", place, f"the pool has {known} for it")]
        wrong = self.files.row_table.wrong(wanted)
        if not wrong:
            return []
        problem = f"the headers of extents {named(np.array(wrong))} in rows.table are damaged"
        return [Finding("rows", place, problem)]

    def blocks(self, some: CoreBlocks) -> list[Finding]:
        """Records and index page say of these slots what the core says."""
        table, row, place = self.files.slot_table, some.row, some.place
        records = row.row * self.files.slots_per_extent + some.ordinals
        slots = row.first_slot + some.ordinals
        said = table.ready(records)
        found = [
            Finding("records", place, f"the records of slots {named(slots[wrong])} {problem}")
            for wrong, problem in (
                (some.ready & ~said, "are not READY, and their blocks are"),
                (said & ~some.ready, "are READY, and there are no such blocks"),
            )
            if wrong.any()
        ]
        both = (some.ready & said)[some.ready]
        readable, records = slots[some.ready][both], records[some.ready][both]
        keys = table.keys(records, some.keys.hash_bytes).words
        right = table.whole(records, some.keys.hash_bytes)
        right &= table.scopes(records) == some.scopes[both]
        right &= (keys == some.keys.words[both]).all(axis=1)
        if not right.all():
            problem = f"the records of slots {named(readable[~right])} are damaged, or of others"
            found.append(Finding("records", place, problem))
        return found + self._shown(some) + self._sums(some, readable, records)

    def _shown(self, some: CoreBlocks) -> list[Finding]:
        page = self.pages.get(some.row.namespace)
        if page is None:
            return [Finding("pages", some.place, "its namespace has no index page")]
        missing = int(np.count_nonzero(~page.shows(some.shown)))
        if missing <= page.spilled:
            return []
        problem = f"{missing} blocks are not shown, and {page.spilled} had no place"
        return [Finding("pages", some.place, problem)]

    def _sums(self, some: CoreBlocks, slots: Slots, records: Slots) -> list[Finding]:
        if self.files.checksums is None or not len(records):
            return []
        ordinals = records - some.row.row * self.files.slots_per_extent
        digests = self.files.slot_table.digests(records)
        extents = np.repeat(np.array(some.row.extents)[:, None], len(ordinals), axis=1)
        wrong = digests != self.files.checksums.digests(extents, ordinals)
        if self.files.keeps_unsummed:  # stored at a time without checksums: nothing is known
            sums = [self.files.checksums.read(shard, ordinals) for shard in extents]
            wrong &= (digests != NO_DIGEST) | (np.stack(sums) != NO_SUM).any(axis=0)
        if not wrong.any():
            return []
        problem = f"those of slots {named(slots[wrong])} are missing, or not those of the records"
        return [Finding("checksums", some.place, problem)]

    def page(self, namespace: NamespaceId, blocks: int) -> list[Finding] | None:
        """The page is whole, and has as many tags as there are readable blocks.

        None: its table is too large to be counted at once.
        """
        place = f"the index page of namespace {namespace}"
        page = self.pages.get(namespace)
        if page is None:
            return [Finding("pages", place, "there is none")]
        found = [Finding("pages", place, problem) for problem in page.problems()]
        if page.tags + page.spilled != blocks:
            problem = f"{page.tags} blocks stand in it and {page.spilled} do not, of {blocks}"
            found.append(Finding("pages", place, problem))
        if page.words > PAGE_WORDS_LOOKED_AT:
            return found or None
        if (there := page.count()) != page.tags:
            problem = f"{page.tags} tags are said to stand in it, and {there} do"
            found.append(Finding("pages", place, problem))
        return found

    def stray(self, first: int, owned: Flags, slots: npt.NDArray[np.int64]) -> list[Finding]:
        """Of these extents nobody's says that it is somebody's.

        `owned`: by rows that are granted or on their way back. `slots`: records that may be READY,
        of the extents that lead a row; else 0.
        """
        found = []
        touched = self.files.row_table.touched_among(first, len(owned))
        if (nobodys := touched & ~owned).any():
            place = f"extents {named(first + np.flatnonzero(nobodys))}"
            found.append(Finding("rows", place, "rows.table says that they are of a row"))
        per_extent = self.files.slots_per_extent
        for at, count in enumerate(slots.tolist()):
            extent = first + at
            records = np.arange(extent * per_extent + count, (extent + 1) * per_extent)
            said = self.files.slot_table.ready(records)
            if said.any():
                wrong = named(np.flatnonzero(said) + count)
                problem = f"records {wrong} are READY, and no slots"
                found.append(Finding("records", f"extent {extent}", problem))
        return found

    def extent_files(self, first: int, count: int) -> list[Finding]:
        """These extents' files are there, of the right size."""
        found = []
        for extent in range(first, first + count):
            path = self.files.extents.files.path(extent)
            try:
                size = path.stat().st_size
            except OSError as error:
                found.append(Finding("files", str(path), f"it can't be found: {error.strerror}"))
                continue
            if size != self.files.extents.extent_bytes:
                found.append(Finding("files", str(path), f"it has {size} bytes"))
        return found

    def directory(self) -> list[Finding]:
        """The pool's files are those that it began with."""
        lost = self.standing.missing()
        return [] if lost is None else [Finding("files", str(lost.path), f"it {lost.how}")]

    def registry(self) -> Iterator[list[Finding]]:
        """The file tells a restart what is known, piece by piece."""
        registry = self.files.registry
        namespaces, scopes = registry.written()
        try:
            content = registry.path.read_bytes()
        except OSError as error:
            problem = f"it can't be read: {error.strerror}"
            yield [Finding("registry", str(registry.path), problem)]
            return
        read = Registry(registry.path, registry.reserve)
        found: list[Finding] = []
        for number, line in enumerate(io.BytesIO(content), 1):
            record = sealed_json.unseal(line)
            if record is None or not read.take(record):
                place = f"{registry.path}, line {number}"
                found.append(Finding("registry", place, "it is damaged"))
            if number % LINES_AT_ONCE == 0:
                yield found
                found = []
        names: list[tuple[str, object, object, object]] = [
            (f"namespace {n}", known, registry.namespaces.get(n), read.namespaces.get(n))
            for n, known in namespaces.items()
        ]
        names += [
            (f"scope {s}", scope, registry.scopes.get(s), read.scopes.get(s))
            for s, scope in scopes.items()
        ]
        for at, (place, before, now, there) in enumerate(names, 1):
            if now is before and there != before:
                found.append(Finding("registry", place, f"a restart would know it as {there}"))
            if at % NAMES_AT_ONCE == 0:
                yield found
                found = []
        yield found
