"""From what a dead owner left to the events that tell the core.

Only what proves itself is taken: rows whose headers are whole and agree with the registry, and
in them READY records whose checksum holds. Everything else becomes free, with its bytes zeroed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.core.events import (
    Event,
    PoolRecovered,
    RecoveredRow,
    RecoveredScope,
    RowsRecovered,
    ScopesRecovered,
)
from kvd.core.keys import NO_SUM, NamespaceId, RowId, ScopeId, are_among
from kvd.pool.checksum_table import NO_DIGEST, ChecksumTable
from kvd.pool.extents import Extents
from kvd.pool.registry import Registry
from kvd.pool.row_table import GrantedRow, RowTable
from kvd.pool.slot_table import Records, SlotTableFile

# Records verified together: enough to make numpy's cost per call small, few enough for the cache.
_BATCH_SLOTS = 16384
_BATCH_SCOPES = 4096  # in one event: what is due once a namespace is little beside them


@dataclass(slots=True)
class PoolFiles:
    """The pool's files that recovery reads, and mends where they are broken."""

    slots_per_extent: int
    extents: Extents
    slot_table: SlotTableFile
    row_table: RowTable
    registry: Registry
    checksums: ChecksumTable | None = None  # None: none are wanted
    keeps_unsummed: bool = False  # blocks that were stored without, where they are wanted


@dataclass(slots=True)
class Recovery:
    """What a start found in a pool that is there already.

    What was found. `rows` stand as soon as it is made; records are read by `events`.
    """

    books: PoolFiles
    orphaned_extents: frozenset[int]  # still mapped by movers that couldn't be killed
    rows: dict[RowId, GrantedRow] = field(default_factory=dict)
    # READY records that were not whole, or named nothing known and were not cleared.
    dropped_records: int = 0
    withheld: dict[RowId, int] = field(default_factory=dict)  # free slots that orphaned movers map
    blocks: dict[NamespaceId, int] = field(default_factory=dict)  # READY records, whole or not
    unchecked_records: int = 0  # of those, whole ones without checksums where they are wanted
    unsummed_records: int = 0  # kept without, where `keeps_unsummed`

    def __post_init__(self) -> None:
        # Asked for every row: with an account a user there are tens of thousands of scopes.
        scoped = {scope.namespace for scope in self.books.registry.scopes.values()}
        namespaces: dict[int, NamespaceId] = {}  # of all whole rows, by leading extent
        for row in self.books.row_table.rows():
            namespaces[row.row] = row.namespace
            if row.namespace in scoped and self._credible(row):
                self.rows[row.row] = row
        self._clean(namespaces)
        self._forget_unused()

    def events(self) -> Iterator[Event]:
        """Scopes, then rows with their READY slots, then the end. Drops what isn't whole."""
        registry = self.books.registry
        for namespace, scopes in self._scopes():
            yield ScopesRecovered(namespace, registry.namespaces[namespace].spec, scopes)
        known = self._scopes_of_classes()
        for rows in self._batches():
            of_class = known.get((rows[0].namespace, rows[0].group), [])
            yield self._read(rows, np.array(of_class, dtype=np.int64))
        yield PoolRecovered(registry.highest_namespace + 1, registry.highest_scope + 1)

    def _scopes(self) -> Iterator[tuple[NamespaceId, tuple[RecoveredScope, ...]]]:
        """_BATCH_SCOPES of a namespace at a time."""
        of_namespace: dict[NamespaceId, list[RecoveredScope]] = {}
        for s in self.books.registry.scopes.values():
            found = RecoveredScope(s.scope, s.epoch, s.account, s.group, s.own)
            of_namespace.setdefault(s.namespace, []).append(found)
        for namespace, scopes in of_namespace.items():
            for first in range(0, len(scopes), _BATCH_SCOPES):
                yield namespace, tuple(scopes[first : first + _BATCH_SCOPES])

    def _credible(self, row: GrantedRow) -> bool:
        """Whether the registry knows what the row holds, and the row fits its extents."""
        known = self.books.registry.namespaces.get(row.namespace)
        if known is None or row.group >= len(known.spec.groups):
            return False
        extent_bytes = self.books.extents.extent_bytes
        return (
            known.spec.groups[row.group].part_bytes == row.part_bytes
            and 0 < row.slots <= self.books.slots_per_extent
            and all(row.slots * part <= extent_bytes for part in row.part_bytes)
        )

    def _clean(self, namespaces: Mapping[int, NamespaceId]) -> None:
        """Make free what no credible row owns: records first, then bytes, headers last.

        `namespaces`: of what is known whose it is, by leading extent.
        """
        table = self.books.slot_table
        owned = {extent for row in self.rows.values() for extent in row.extents}
        stray = self.books.row_table.touched() - owned
        for extent in stray:
            records = self._records(extent, self.books.slots_per_extent)
            scopes = table.scopes(records[table.ready(records)])
            below = self.books.registry.cleared_below(namespaces.get(extent, NamespaceId(0)))
            self.dropped_records += int((scopes >= below).sum())
            table.write_free(records)
        # An orphaned mover may go on writing: it keeps the old file, the pool gets a new one.
        self.books.extents.create(stray & self.orphaned_extents)
        self.books.extents.zero_all(stray - self.orphaned_extents)
        self.books.row_table.release(tuple(stray))

    def _forget_unused(self) -> None:
        """Take scopes out of the registry that no READY record names.

        Where accounts have blocks, their epoch keeps the scopes of the empty account: an engine
        opens its session with them, and couldn't come back where its payer may open no new ones.
        A namespace that owns rows keeps one scope in any case: it is by its scopes that the core
        comes to know of it.
        """
        registry = self.books.registry
        used: set[int] = set()
        for rows in self._batches():
            for row in rows:
                self.books.slot_table.prefetch(row.row, row.slots)
            records = self._records_of(rows)
            records = records[self.books.slot_table.ready(records)]
            namespace = rows[0].namespace
            self.blocks[namespace] = self.blocks.get(namespace, 0) + len(records)
            used.update(np.unique(self.books.slot_table.scopes(records)).tolist())
        namespaces = {row.namespace for row in self.rows.values()}
        # The newest of each name: an older one may stand there still, of no use to anybody.
        newest = {
            (scope.namespace, scope.epoch, scope.account, scope.group): scope
            for scope in sorted(registry.scopes.values(), key=lambda each: each.scope)
        }
        scopes = newest.values()
        # A damaged record may name any scope, an older one or one of a namespace without rows.
        kept = {s.scope: s for s in scopes if s.scope in used and s.namespace in namespaces}
        epochs = {(scope.namespace, scope.epoch) for scope in kept.values()}
        kept |= {
            scope.scope: scope
            for scope in scopes
            if not scope.account and (scope.namespace, scope.epoch) in epochs
        }
        scopeless = namespaces - {scope.namespace for scope in kept.values()}
        for scope in scopes:
            if scope.namespace in scopeless:
                kept[scope.scope] = scope
                scopeless.remove(scope.namespace)
        registry.keep_only(namespaces, kept)

    def _batches(self) -> Iterator[list[GrantedRow]]:
        """Rows of one class at a time, by ascending number, about _BATCH_SLOTS slots each.

        Before each of them it is told how far this has come.
        """
        extents, done = self.books.extents, 0
        for batch in self._batches_untold():
            extents.progress(done * extents.extent_bytes, len(self.rows) * extents.extent_bytes)
            done += len(batch)
            yield batch

    def _batches_untold(self) -> Iterator[list[GrantedRow]]:
        batch: list[GrantedRow] = []
        slots = 0
        of_class = (0, 0)
        for row in sorted(self.rows.values(), key=lambda r: (r.namespace, r.group, r.row)):
            before, of_class = of_class, (row.namespace, row.group)
            if batch and (slots >= _BATCH_SLOTS or of_class != before):
                yield batch
                batch, slots = [], 0
            batch.append(row)
            slots += row.slots
        if batch:
            yield batch

    def _read(self, rows: list[GrantedRow], known: npt.NDArray[np.int64]) -> RowsRecovered:
        """`known`: scopes of the rows' class, ascending."""
        table, namespace, group = self.books.slot_table, rows[0].namespace, rows[0].group
        hash_bytes = self.books.registry.namespaces[namespace].spec.hash_bytes
        records = self._records_of(rows)
        records = records[table.ready(records)]
        scopes = table.scopes(records)
        whole = table.whole(records, hash_bytes)
        good = whole & are_among(scopes, known)
        cleared = scopes < self.books.registry.cleared_below(namespace)
        self.dropped_records += int((~whole | ~good & ~cleared).sum())
        checked = self._checked(rows, records[good])
        self.unchecked_records += int((~checked).sum())
        good[good] = checked
        table.write_free(records[~good])
        self.dropped_records += int((~checked).sum())
        records, scopes = records[good], scopes[good]
        leading, ordinals = np.divmod(records, self.books.slots_per_extent)
        bounds = np.searchsorted(leading, [row.row for row in rows] + [rows[-1].row + 1])
        return RowsRecovered(
            namespace=namespace,
            group=group,
            rows=tuple(map(self._found, rows, np.diff(bounds).tolist())),
            ordinals=ordinals.astype(np.uint32),
            scopes=scopes,
            keys=table.keys(records, hash_bytes),
            stamps=table.stamps(records),
        )

    def _found(self, row: GrantedRow, ready: int) -> RecoveredRow:
        orphaned = not self.orphaned_extents.isdisjoint(row.extents)
        if orphaned:
            self.withheld[row.row] = row.slots - ready
        return RecoveredRow(row.row, row.extents, ready, orphaned)

    def _checked(self, rows: list[GrantedRow], records: Records) -> npt.NDArray[np.bool_]:
        """Which records may be served as far as checksums of their bytes are concerned.

        Where they are wanted: those that have the digest of what the table says. The bytes
        themselves are compared when they are loaded. Records without a digest are those of a time
        without checksums. Where they are kept, the table says of them that nothing is known.
        """
        if self.books.checksums is None:
            return np.ones(len(records), dtype=np.bool_)
        extents = np.zeros((len(rows[0].extents), self.books.extents.count), dtype=np.int64)
        for row in rows:
            extents[:, row.row] = row.extents
        leading, ordinals = np.divmod(records, self.books.slots_per_extent)
        said = self.books.slot_table.digests(records)
        found = self.books.checksums.digests(extents[:, leading], ordinals)
        unsummed = said == NO_DIGEST
        mask: npt.NDArray[np.bool_] = ~unsummed & (said == found)
        if self.books.keeps_unsummed and unsummed.any():
            for shard in extents[:, leading[unsummed]]:
                self.books.checksums.write(shard, ordinals[unsummed], NO_SUM)
            self.unsummed_records += int(unsummed.sum())
            mask |= unsummed
        return mask

    def _scopes_of_classes(self) -> dict[tuple[NamespaceId, int], list[ScopeId]]:
        """By namespace and group, ascending. Nothing is by number: those rise as the pool lives."""
        found: dict[tuple[NamespaceId, int], list[ScopeId]] = {}
        for number, scope in sorted(self.books.registry.scopes.items()):
            found.setdefault((scope.namespace, scope.group), []).append(number)
        return found

    def _records(self, extent: int, slots: int) -> Records:
        first = extent * self.books.slots_per_extent
        return np.arange(first, first + slots)

    def _records_of(self, rows: list[GrantedRow]) -> Records:
        return np.concatenate([self._records(row.row, row.slots) for row in rows])
