"""The pool as the driver sees it: opens, tells what it recovered, carries out the core's orders."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np

from kvd.core.actions import (
    ClearScopes,
    ForgetNamespace,
    ForgetScopes,
    GrantRow,
    OpenNamespace,
    OpenScope,
    PublishTags,
    ReleaseRow,
    RetractTags,
    WriteFree,
    WriteReady,
    WriteStamps,
    ZeroRow,
)
from kvd.core.events import Event
from kvd.core.keys import U32, U64, NamespaceId, RowId, Slots, TenantId
from kvd.linux.proc import state_of
from kvd.linux.standing import Standing
from kvd.pool import capacity_check
from kvd.pool.checksum_table import NO_DIGEST
from kvd.pool.choices import NO_ROOM, open_checksums, settled
from kvd.pool.config import CHECKSUM_TABLE, FULL, PoolConfig, PoolError
from kvd.pool.extents import Extents, has_mark
from kvd.pool.generations import Generations
from kvd.pool.header import PoolHeader, read_header
from kvd.pool.holes import OneThread
from kvd.pool.index_page import IndexPage
from kvd.pool.nodes import deal, find_nodes
from kvd.pool.ownership import (
    MoverList,
    MoverRecord,
    Orphan,
    end_movers,
    extents_mapped_by,
    is_copied_here,
    note_place,
    own_directory,
    own_places,
    own_pool,
    remove_left,
    why_elsewhere,
)
from kvd.pool.placement import Placement
from kvd.pool.recovery import PoolFiles, Recovery
from kvd.pool.registry import RegisteredNamespace, Registry
from kvd.pool.reserve import Reserve
from kvd.pool.row_table import GrantedRow, RowTable, why_tables_lost
from kvd.pool.slot_table import SlotTableFile
from kvd.pool.verify import Books
from kvd_proto.layout import require_ordered_stores

TAG_SECRET_BYTES = 16
INCARNATION_BYTES = 16
# Of upkeep: about two milliseconds for all index pages that change, a millisecond for a look.
PAGE_UNITS = 2048
MOST_PAGES_SETTLED = 256
MOST_PAGES_LOOKED_AT = 16
REFILL_PIECES = 20  # of upkeep, between tries to have the whole reserve again


class Pool:
    """The daemon's files and shared memory: extents, tables, registry and index pages.

    Synchronous, called by the driver only; `zero_row` alone may run in a thread.
    """

    def __init__(self, config: PoolConfig, huge_page: int) -> None:
        """For `open` only. Owns the directories from here until `close`."""
        self.extents = config.extents
        self.extent_bytes = config.extent_bytes
        self.payload_checksums = config.payload_checksums
        self.checksums_reason = config.checksums_reason
        self.incarnation = os.urandom(INCARNATION_BYTES)
        self.cold_reason = ""
        self.tag_secret = b""
        self._config = config
        self._resources = ExitStack()
        self._lock = own_pool(config.directory / "lock")
        self._resources.callback(os.close, self._lock)
        self._nodes = find_nodes()
        self._files = Extents(config, huge_page, self._nodes)
        self._reserve = Reserve(config.directory / "reserve", config.reserve_bytes)
        self._resources.callback(self._reserve.close)
        self._movers = MoverList(config.directory / "movers")
        self._resources.callback(self._movers.close)
        self._placement = Placement(config)
        self._pages: dict[NamespaceId, IndexPage] = {}
        self._holes = OneThread()  # gives memory of theirs back
        self._spare_page: IndexPage | None = None  # for the next namespace
        self._holds_some_below = False
        self._unsettled_pages: dict[NamespaceId, None] = {}  # larger or smaller than they should be
        self._pages_to_look_at: deque[NamespaceId] = deque()
        self._spilled_pages: dict[NamespaceId, None] = {}  # that had no place for some tags
        self._refill_in = 0  # pieces of upkeep
        self._orphaned: dict[int, frozenset[int]] = {}  # extents by pid

    @classmethod
    def open(cls, config: PoolConfig, progress: Callable[[int, int], None]) -> Self:
        """Own the directory's pool: warm where the last owner's can be used, else new.

        Kills the last owner's movers that still live. `progress(bytes done, bytes in all)` is
        called while extents are made or zeroed, and while rows are read, in `recovered` too: what
        it raises comes out of either. PoolError with figures and the fix where the pool can't be
        had; nothing of an earlier pool was touched then.
        """
        require_ordered_stores()
        own_places(config)
        config = settled(config)
        huge_page = capacity_check.require_memory_files(config)
        capacity_check.require_new_files(config)
        pool: Self | None = None
        try:
            pool = cls(config, huge_page)
            capacity_check.require_space(config, capacity_check.measure(config))
            # The place in the pool's own directory too: another pool may be told to lie there.
            config.extents_place.mkdir(mode=0o700, exist_ok=True)
            pool._resources.callback(os.close, own_directory(config.extents_place))
            pool._files.progress = progress
            orphaned = pool._end_last_owner()
            pool._take_or_make()
            pool._recover(orphaned)
            pool._fill_reserve()
            pool._look_around()
        except BaseException as error:
            if pool is not None:
                pool.close()
            if isinstance(error, OSError) and error.errno in FULL:
                raise PoolError(
                    f"the file system of {config.directory} is full: enlarge it or keep others'"
                    " files out of it"
                ) from error
            raise
        return pool

    # -- what was there ---------------------------------------------------------------------------

    def recovered(self) -> Iterator[Event]:
        """Events for the core: scopes, rows with their READY slots, PoolRecovered."""
        return self._recovery.events()

    @property
    def dropped_records(self) -> int:
        """READY records left out of `recovered` because they were not whole."""
        return self._recovery.dropped_records

    @property
    def unchecked_records(self) -> int:
        """Of those, whole ones without checksums of their bytes, in a pool that wants them."""
        return self._recovery.unchecked_records

    @property
    def unsummed_records(self) -> int:
        """READY records `recovered` though nothing of theirs can be compared."""
        return self._recovery.unsummed_records

    def tenant_of(self, namespace: NamespaceId) -> TenantId:
        """Whose namespace it is."""
        return self._registry.namespaces[namespace].spec.tenant

    def namespace_fields(self, namespace: NamespaceId) -> Mapping[str, str]:
        """The display fields that the namespace was first opened with."""
        return self._registry.namespaces[namespace].fields

    def orphans(self) -> list[Orphan]:
        """Movers of earlier owners that could not be ended; known once `recovered` was read."""
        return [self._orphan(pid, extents) for pid, extents in self._orphaned.items()]

    def _orphan(self, pid: int, extents: frozenset[int]) -> Orphan:
        slots = {
            row: count
            for row, count in self._recovery.withheld.items()
            if not extents.isdisjoint(self._recovery.rows[row].extents)
        }
        return Orphan(
            pid,
            state_of(pid),
            len(extents),
            sum(slots.values()),
            sum(n * sum(self._recovery.rows[row].part_bytes) for row, n in slots.items()),
        )

    @property
    def place(self) -> str:
        """Where the extents lie, for the log: directory, huge pages, nodes."""
        files = self._files
        words = [str(files.files.directory)]
        if files.huge_page:
            words.append(f"huge pages of {files.huge_page >> 10} KiB")
        if files.nodes:
            words.append(f"nodes {', '.join(map(str, sorted(set(files.nodes))))}")
        return "; ".join(words)

    @property
    def on_shared_filesystem(self) -> bool:
        """Whether others may fill the file system that the tables lie on."""
        return capacity_check.is_shared(self._config.directory)

    @property
    def extent_nodes(self) -> tuple[int, ...]:
        """The NUMA node that each extent was dealt to; empty on a machine of one node."""
        return self._files.nodes

    # -- the core's orders ------------------------------------------------------------------------

    def open_namespace(self, order: OpenNamespace, fields: Mapping[str, str]) -> None:
        """Write the namespace down and give it an index page. Empty fields keep the known ones.

        PoolError where the page can't be had; never where `prepare_page` had it.
        """
        known = RegisteredNamespace(order.namespace, order.spec, dict(fields))
        self._registry.add_namespace(known)
        if order.namespace not in self._pages:
            self.prepare_page(order.page_blocks)
            assert self._spare_page is not None, "it was prepared"
            page, self._spare_page = self._spare_page, None
            # All at once what it will take, where its blocks are about to be read back.
            page.make_room(self._recovery.blocks.pop(order.namespace, 0))
            page.set_below(holds_some=self._holds_some_below)
            self._pages[order.namespace] = page

    def prepare_page(self, blocks: int) -> None:
        """Have the index page that a new namespace of at most so many blocks will be given.

        PoolError, and nothing has changed, where there is no memory or descriptor for it.
        """
        if self._spare_page is not None and self._spare_page.blocks == blocks:
            return
        self._drop_spare_page()
        try:
            self._spare_page = IndexPage("kvd-page", blocks, self._holes)
        except (OSError, MemoryError) as error:
            raise PoolError(
                f"no index page for another namespace ({_said(error)}): give the daemon more file"
                " descriptors (LimitNOFILE), addresses (LimitAS) or memory, or use fewer namespaces"
            ) from error

    def _drop_spare_page(self) -> None:
        page, self._spare_page = self._spare_page, None
        if page is not None:
            page.close()

    def open_scope(self, order: OpenScope) -> None:
        self._registry.add_scope(order)

    def clear_scopes(self, order: ClearScopes) -> None:
        """Recovery takes records of these scopes for free from now on."""
        self._registry.clear_scopes(order.namespace, order.below)

    def forget_scopes(self, order: ForgetScopes) -> None:
        self._registry.forget_scopes(order.scopes)

    def forget_namespace(self, order: ForgetNamespace) -> None:
        """Tell those who map its page that nobody keeps it any more, and forget it all."""
        self._pages.pop(order.namespace).close()
        self._registry.forget_namespace(order.namespace)

    def grant_row(self, order: GrantRow) -> None:
        """Give the row its slots and, unless it was recovered, its header.

        PoolError, and nothing was changed, where there is no memory for its records.
        """
        row = GrantedRow(
            order.row, order.namespace, order.group, order.extents, order.part_bytes, order.slots
        )
        recovered = self._rows.get(order.row)
        assert recovered is None or recovered == row, f"{recovered} was granted as {row}"
        if recovered is None:
            if self._checksums is not None:
                self._checksums.prepare(order.extents, order.slots)
            self._slot_table.prepare(order.row, order.slots)
            self._slot_table.free_all(order.row, order.slots)
            self._rows[order.row] = row
            self._row_table.grant(row)
        self._placement.add(order)

    def has(self, slots: Slots) -> bool:
        """Whether each of these slots is in a row that was granted."""
        return self._placement.knows(slots)

    def zero_row(self, order: ZeroRow) -> None:
        """Overwrite the row's extents with zeros; takes its time."""
        self._files.zero(self._rows[order.row].extents)

    def extents_of_row(self, row: RowId) -> tuple[int, ...]:
        """By shard, of a row that was granted and not released."""
        return self._rows[row].extents

    def part_bytes(self, slots: Slots) -> tuple[int, ...]:
        """Of a block in each shard; the slots are of one size class."""
        return self._placement.part_bytes_of(int(slots[0]))

    def release_row(self, order: ReleaseRow) -> None:
        row = self._rows[order.row]
        records = self._placement.records_of_row(row)
        assert not self._slot_table.ready(records).any(), f"row {row.row} has READY records"
        self._row_table.release(row.extents)
        self._placement.remove(row.row)
        del self._rows[order.row]

    def write_ready(self, order: WriteReady) -> None:
        """Write the records, with the digest of the checksums that were noted for the slots."""
        records = self._placement.records(order.slots)
        self._slot_table.write_ready(
            records, order.scopes, order.keys, order.stamps, self._digests(order.slots)
        )

    def _digests(self, slots: Slots) -> U64:
        if self._checksums is None or not len(slots):
            return np.full(len(slots), NO_DIGEST)
        shards = self._placement.shards_of(int(slots[0]))
        places = [self._placement.parts(slots, shard) for shard in range(shards)]
        return self._checksums.digests(np.stack([extents for extents, _ in places]), places[0][1])

    def write_stamps(self, order: WriteStamps) -> None:
        """Write down when READY blocks were last used."""
        self._slot_table.write_stamps(self._placement.records(order.slots), order.stamps)

    def write_free(self, order: WriteFree) -> None:
        self._slot_table.write_free(self._placement.records(order.slots))

    def publish(self, order: PublishTags) -> int:
        """Make tags visible to clients; returns how many found no place (a probe misses them)."""
        page = self._pages[order.namespace]
        spilled = page.insert(order.tags)
        if page.unsettled:
            self._unsettled_pages[order.namespace] = None
        if page.spilled:
            self._spilled_pages[order.namespace] = None
        return spilled

    def retract(self, order: RetractTags) -> None:
        page = self._pages[order.namespace]
        page.remove(order.tags)
        if page.unsettled:
            self._unsettled_pages[order.namespace] = None

    def page_to_mend(self) -> NamespaceId | None:
        """The next namespace, in turns, whose page has room for tags that it spilled before."""
        for namespace in list(islice(self._spilled_pages, MOST_PAGES_LOOKED_AT)):
            del self._spilled_pages[namespace]
            page = self._pages.get(namespace)
            if page is not None and page.spilled:
                self._spilled_pages[namespace] = None
                if page.has_room_again:
                    return namespace
        return None

    def mend_page(self, namespace: NamespaceId, tags: U64) -> int | None:
        """Make those tags of readable blocks visible that are not; None: there is no room (now)."""
        page = self._pages.get(namespace)
        if page is None or not page.has_room_again:
            return None
        return page.mend(tags)

    # -- for clients and movers -------------------------------------------------------------------

    def set_below(self, *, holds_some: bool) -> None:
        """Say to all clients whether a tier may hold blocks that index pages don't show."""
        if holds_some != self._holds_some_below:
            self._holds_some_below = holds_some
            for page in self._pages.values():
                page.set_below(holds_some=holds_some)

    def set_room(self, namespace: NamespaceId, rooms: Sequence[int]) -> None:
        """Say by group how many blocks a store could get now."""
        self._pages[namespace].set_room(rooms)

    def page_fd(self, namespace: NamespaceId) -> int:
        """A read-only descriptor of the index page; the pool keeps it open."""
        return self._pages[namespace].read_only_fd

    def locate(self, slots: Slots, shard: int) -> tuple[U32, U64]:
        """Where one shard's parts lie: extent numbers, byte offsets in the extent."""
        return self._placement.locate(slots, shard)

    def note_checksums(self, slots: Slots, shard: int, sums: U64) -> None:
        """Keep the checksums of one shard's parts until, and while, the slots are READY."""
        assert self._checksums is not None, "checksums came where none are kept"
        self._checksums.write(*self._placement.parts(slots, shard), sums)

    def checksums(self, slots: Slots, shard: int) -> U64 | None:
        """What one shard's parts of READY slots must have; None where none are kept."""
        if self._checksums is None:
            return None
        return self._checksums.read(*self._placement.parts(slots, shard))

    def record_mover(self, pid: int, start_time: int) -> None:
        """Before the mover maps anything: the next owner kills it if it still lives."""
        self._movers.add(MoverRecord(pid, start_time))

    def forget_mover(self, pid: int) -> None:
        """The process has ended."""
        self._movers.remove(pid)

    # -- books ------------------------------------------------------------------------------------

    @property
    def books(self) -> Books:
        """What tells whether all is whole."""
        return Books(self._books, self._rows, self._pages, self._standing)

    def close(self) -> None:
        """Mark every page closed and let go of the pool; its files stay for the next owner.

        Called again it does nothing.
        """
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        self._drop_spare_page()
        self._resources.close()

    # -- upkeep -----------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """A piece of the work that need not be done at once; called several times a second.

        PoolError where the pool's files have been removed or replaced: nothing heals that here.
        """
        if (lost := self._standing.missing() or self._registry.missing()) is not None:
            raise PoolError(
                f"{lost.path} {lost.how} while the daemon ran: its next start may be cold; keep"
                " cleaners of temporary files (and systemd-logind's RemoveIPC) away from the pool"
            )
        self._registry.upkeep()
        self._settle_pages()
        if not self._reserve.whole:
            self._fill_reserve()

    @property
    def unwritten(self) -> int:
        """Namespaces and scopes that a restart would not know, since the file system is full."""
        return self._registry.unwritten

    def _look_around(self) -> None:
        """Remember which files are ours, by more than their names."""
        directory = self._config.directory
        names = ["lock", "pool.header", "slots.table", "rows.table", "generations.table", "movers"]
        if self._checksums is not None:
            names.append(CHECKSUM_TABLE)
        files = self._files.files
        ends = (files.path(0), files.path(self.extents - 1))
        paths = [*(directory / name for name in names), files.directory, *ends]
        self._standing = Standing(paths)
        self.extent_files = replace(files, inode=files.directory.stat().st_ino)

    def _settle_pages(self) -> None:
        """A piece of what index pages have left to do, in turns."""
        units = PAGE_UNITS
        for namespace in list(islice(self._unsettled_pages, MOST_PAGES_SETTLED)):
            if units <= 0:
                break
            del self._unsettled_pages[namespace]
            page = self._pages.get(namespace)
            if page is not None:
                units = page.upkeep(units)
                if page.unsettled:
                    self._unsettled_pages[namespace] = None
                if page.spilled:
                    self._spilled_pages[namespace] = None
        for _ in range(MOST_PAGES_LOOKED_AT):
            if not self._pages_to_look_at:
                self._pages_to_look_at.extend(self._pages)
                break
            page = self._pages.get(self._pages_to_look_at.popleft())
            if page is not None:
                page.take_strays()

    def _fill_reserve(self) -> None:
        if self._refill_in:
            self._refill_in -= 1
        elif not self._reserve.fill():
            self._refill_in = REFILL_PIECES

    # -- opening ----------------------------------------------------------------------------------

    def _end_last_owner(self) -> frozenset[int]:
        """Kill what still lives of the last owner; returns extents that an orphaned mover maps."""
        orphaned = end_movers(self._movers.read_last_owner(), self._config.mover_kill_deadline_s)
        self._movers.replace(orphaned)
        self._orphaned = {m.pid: extents_mapped_by(m.pid, self._files) for m in orphaned}
        return frozenset().union(*self._orphaned.values())

    def _take_or_make(self) -> None:
        """Read the header; where the pool can't be used, remove it and make a new one."""
        directory, keep = self._config.directory, self._resources.enter_context
        self.generations = keep(closing(Generations.open(directory, self._reserve)))
        path = directory / "pool.header"
        nodes = [node.number for node in self._nodes]
        wanted = PoolHeader.wanted(self._config, nodes, os.urandom(TAG_SECRET_BYTES))
        header, self.cold_reason = read_header(path, wanted)
        if header is not None and not self.cold_reason:
            self.cold_reason = (
                why_elsewhere(self._lock, self._config, header.extents_directory)
                or self._files.missing(header.extents_mark)
                or why_tables_lost(self._config)
            )
        if header is None or self.cold_reason:
            self._reserve.let_go()
            # The header goes first and comes last: whatever is interrupted starts cold again.
            path.unlink(missing_ok=True)
            for name in ("slots.table", "rows.table", CHECKSUM_TABLE, "registry.jsonl"):
                (directory / name).unlink(missing_ok=True)
            self._remove_extents(header)
            header = wanted
            self._files.nodes = deal(self.extents, header.nodes)
            self._files.create_all(header.extents_mark)
            header.write(path)
        elif header.extents_directory != wanted.extents_directory:  # it has another name now
            header = replace(header, extents_directory=wanted.extents_directory)
            self._reserve.write(len(header.extents_directory), partial(header.write, path))
        note_place(self._lock, self._config)
        self._files.nodes = deal(self.extents, header.nodes)
        self.tag_secret = bytes.fromhex(header.tag_secret)

    def _remove_extents(self, before: PoolHeader | None) -> None:
        """Give back the memory of the pool that was here, wherever its extents lay.

        What a copy's header names is the other pool's, which still has it.
        """
        remove_left(self._config.directory / "extents")
        if before is not None and not is_copied_here(self._lock, self._config):
            place = Path(before.extents_directory)
            if has_mark(place, before.extents_mark):
                remove_left(place)
        self._files.remove_all()

    def _recover(self, orphaned_extents: frozenset[int]) -> None:
        directory = self._config.directory
        keep, config = self._resources.enter_context, self._config
        self._slot_table = keep(closing(SlotTableFile(config, directory / "slots.table")))
        self._row_table = keep(closing(RowTable(config, directory / "rows.table")))
        self._checksums = open_checksums(config)
        if self._checksums is not None:
            keep(closing(self._checksums))
        elif config.payload_checksums:
            self.payload_checksums, self.checksums_reason = False, NO_ROOM
        self._registry = keep(closing(Registry.open(directory / "registry.jsonl", self._reserve)))
        self._books = PoolFiles(
            config.slots_per_extent,
            self._files,
            self._slot_table,
            self._row_table,
            self._registry,
            self._checksums,
            keeps_unsummed=config.checksums_chosen,
        )
        # On a cold start an orphaned mover maps files that are gone; the new ones are nobody's.
        orphaned = frozenset() if self.cold_reason else orphaned_extents
        self._recovery = Recovery(self._books, orphaned)
        self._rows: dict[RowId, GrantedRow] = dict(self._recovery.rows)


def _said(error: OSError | MemoryError) -> str:
    return (isinstance(error, OSError) and error.strerror) or "Cannot allocate memory"
