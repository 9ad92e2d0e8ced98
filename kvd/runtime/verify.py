"""Goes through a running daemon's state and pool for broken invariants, beside all its work.

Control's loop does one piece at a time, of a few milliseconds at most, and others have their turns
in between. Core and files are compared in one piece: between two events they agree, or something
is broken. Bytes are read in a thread, at a rate that leaves memory to the movers; a difference
counts only where the slot still has the record that it had before.

A look goes on where the one before ended: nothing is kept for who asks.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from kvd.core.actions import OpenScope
from kvd.core.blocks.slot_lifecycle import keys_of
from kvd.core.keys import U64, NamespaceId, RowId, ScopeId, Slots
from kvd.core.machine import Machine
from kvd.core.model.size_class import Row, SizeClass
from kvd.core.upkeep import verify as core
from kvd.core.upkeep.verify import Finding, SomeBlocks
from kvd.mover.checksums import checksums, differ
from kvd.pool.pool import Pool
from kvd.pool.verify import EXTENTS_AT_ONCE, NAMES_AT_ONCE, CoreBlocks, Flags
from kvd.runtime.threads import apart
from kvd.runtime.turns import FairQueue

MAX_FINDINGS = 64  # in one answer; more are counted
SLOTS_AT_ONCE = 512
PIECES_OF_A_LOOK = 64  # of blocks
BYTES_AT_ONCE = 8 << 20  # but for a larger block's
BYTES_A_SECOND = 256 << 20
TRIES = 3  # at counts that need several pieces
_USER = "verify"  # takes turns with users


class Stage(enum.IntEnum):
    """What is looked at, in this order; as in VerifyPart of the protocol."""

    NOTHING = 0
    ACCOUNTS = 1
    BLOCKS = 2
    EXTENTS = 3
    REGISTRY = 4


@dataclass(slots=True)
class Look:
    """What one look found, and where the next begins."""

    findings: list[Finding] = field(default_factory=list)
    more_findings: int = 0
    next_part: Stage = Stage.NOTHING
    next_after: int = 0
    blocks: int = 0
    bytes: int = 0
    unsettled: int = 0

    def add(self, found: list[Finding] | None) -> None:
        """Take these in; None: it could not be told."""
        if found is None:
            self.unsettled += 1
            return
        room = MAX_FINDINGS - len(self.findings)
        self.findings += found[:room]
        self.more_findings += len(found[room:])


class Verifier:
    """Looks at the daemon's state on its event loop; one look at a time."""

    def __init__(self, machine: Machine, pool: Pool, turns: FairQueue) -> None:
        self._machine = machine
        self._pool = pool
        self._turns = turns
        self._looking = asyncio.Lock()

    async def look(self, part: Stage, after: int, *, with_bytes: bool) -> Look:
        """One part, or of the blocks a share; the next begins where the answer says.

        Nothing is read of a pool whose files were removed or cut short: what is mapped beyond a
        file's end kills who reads it. NoThread where bytes are to be read, and there is no thread
        for that.
        """
        look = Look()
        async with self._looking:
            look.add(self._pool.books.directory())
            if look.findings:
                return look
            match part:
                case Stage.NOTHING | Stage.ACCOUNTS:
                    await self._accounts(look)
                    look.next_part = Stage.BLOCKS
                case Stage.BLOCKS:
                    await self._blocks(look, after, with_bytes=with_bytes)
                case Stage.EXTENTS:
                    await self._extents(look)
                    look.next_part = Stage.REGISTRY
                case Stage.REGISTRY:
                    await self._registry(look)
        return look

    async def _others(self) -> None:
        await self._turns.let_others_in(_USER)

    # -- accounts -------------------------------------------------------------------------------

    async def _accounts(self, look: Look) -> None:
        state = self._machine.state
        for check in (core.sums, core.sessions, core.pins):
            look.add(check(state))
            await self._others()
        for number in list(state.namespaces):
            namespace = state.namespaces.get(number)
            if namespace is None:
                continue
            look.add(core.namespace_sums(state, namespace))
            look.add(self._pool.books.page(number, namespace.tally.ready))
            await self._others()
            for owner in namespace.classes:
                for _ in range(TRIES):
                    if not state.is_there(owner) or await self._count(look, owner):
                        break
                else:
                    look.add(None)

    async def _count(self, look: Look, owner: SizeClass) -> bool:
        """Compare a group's counts; False where they changed meanwhile."""
        for found in core.class_counts(self._machine.state, owner):
            if found is not None:
                look.add(found)
                await self._others()
                return True
            await self._others()
        return False

    # -- blocks ---------------------------------------------------------------------------------

    async def _blocks(self, look: Look, after: int, *, with_bytes: bool) -> None:
        """Of the rows from this number on."""
        state = self._machine.state
        numbers = np.fromiter(state.rows, dtype=np.int64, count=len(state.rows))
        numbers = np.sort(numbers[numbers >= after])
        pieces = 0
        for number in numbers.tolist():
            if pieces >= PIECES_OF_A_LOOK:
                look.next_part, look.next_after = Stage.BLOCKS, number
                return
            async for _ in self._row(look, RowId(number), with_bytes=with_bytes):
                pieces += 1
                await self._others()
        look.next_part = Stage.EXTENTS

    async def _row(self, look: Look, number: RowId, *, with_bytes: bool) -> AsyncIterator[None]:
        state, books = self._machine.state, self._pool.books
        row = state.rows.get(number)
        if row is None:
            return
        look.add(core.row_itself(state, row))
        if number not in books.rows and not core.some_blocks(state, row, 0, row.slots).ready.any():
            return  # the pool had no memory for it: the core is about to give it back
        look.add(books.row(row.grant(), core.row_place(row)))
        first = 0
        while state.rows.get(number) is row and first < row.slots:
            some = core.some_blocks(state, row, first, SLOTS_AT_ONCE)
            first += SLOTS_AT_ONCE
            look.add(core.blocks(state, some))
            look.blocks += len(some.readable)
            look.add(books.blocks(self._core_blocks(some)))
            yield
            if with_bytes and books.files.checksums is not None:
                await self._compare_bytes(look, some)

    def _core_blocks(self, some: SomeBlocks) -> CoreBlocks:
        state, owner, slots = self._machine.state, some.row.size_class, some.readable
        scopes = state.slots.scopes[slots]
        # Of what was cleared nothing need be shown any more.
        live = slots[scopes >= state.namespaces[owner.namespace].cleared_below]
        return CoreBlocks(
            some.row.grant(),
            core.row_place(some.row),
            some.ordinals,
            some.ready,
            scopes,
            keys_of(state, owner, slots),
            state.slots.tags[live],
        )

    async def _compare_bytes(self, look: Look, some: SomeBlocks) -> None:
        """Of the readable slots, some at a time, each shard's part."""
        grant = some.row.grant()
        step = max(1, BYTES_AT_ONCE // max(grant.part_bytes))
        ordinals = some.ordinals[some.ready]
        for shard in range(len(grant.extents)):
            for first in range(0, len(ordinals), step):
                await self._compare_part(look, some.row, shard, ordinals[first : first + step])

    async def _compare_part(self, look: Look, row: Row, shard: int, ordinals: Slots) -> None:
        """Those that are readable still, of one shard."""
        state, files, grant = self._machine.state, self._pool.books.files, row.grant()
        if state.rows.get(row.row) is not row or files.checksums is None:
            return
        records = row.row * files.slots_per_extent + ordinals
        readable = files.slot_table.ready(records)
        ordinals, records = ordinals[readable], records[readable]
        before = files.slot_table.states(records)
        extent, size = grant.extents[shard], grant.part_bytes[shard]
        extents = np.full(len(ordinals), extent, dtype=np.int64)
        due = files.checksums.read(extents, ordinals)
        path = files.extents.files.path(extent)
        place = f"{core.row_place(row)}, extent {extent}"
        try:
            sums = await apart(partial(_sums_of, path, ordinals * size, size))
        except OSError as error:
            look.add([Finding("files", str(path), f"it can't be read: {error.strerror}")])
            return
        same = (files.slot_table.states(records) == before) & differ(sums, due)
        if state.rows.get(row.row) is row and same.any():
            wrong = core.named(row.first_slot + ordinals[same])
            problem = f"those of slots {wrong} are not those that were stored"
            look.add([Finding("bytes", place, problem)])
        count = len(ordinals) * size
        look.bytes += count
        await asyncio.sleep(count / BYTES_A_SECOND)

    # -- extents --------------------------------------------------------------------------------

    async def _extents(self, look: Look) -> None:
        count = self._machine.config.extents
        look.add(core.extents_held(self._machine.state))
        await self._others()
        owned = self._owned()
        for first in range(0, count, EXTENTS_AT_ONCE):
            await self._others()
            span = slice(first, min(first + EXTENTS_AT_ONCE, count))
            if self._stray(span, owned):  # or somebody's since
                owned = self._owned()
                look.add(self._stray(span, owned))
            look.add(self._pool.books.extent_files(span.start, span.stop - span.start))

    def _owned(self) -> Flags:
        """Which extents are of a row, granted or on its way back."""
        state = self._machine.state
        owned = np.zeros(self._machine.config.extents, dtype=np.bool_)
        rows = (*state.rows.values(), *state.retiring.values())
        owned[[extent for row in rows for extent in row.extents]] = True
        return owned

    def _stray(self, span: slice, owned: Flags) -> list[Finding]:
        """What nobody's extents say."""
        rows = self._machine.state.rows
        numbers = range(span.start, span.stop)
        slots = [rows[number].slots if number in rows else 0 for number in map(RowId, numbers)]
        return self._pool.books.stray(span.start, owned[span], np.array(slots))

    # -- registry -------------------------------------------------------------------------------

    async def _registry(self, look: Look) -> None:
        state = self._machine.state
        for found in self._pool.books.registry():
            look.add(found)
            await self._others()
        namespaces = iter(list(state.namespaces))
        while some := list(islice(namespaces, NAMES_AT_ONCE)):
            look.add(self._unregistered_namespaces(some))
            await self._others()
        scopes = iter(list(state.scopes))
        while names := list(islice(scopes, NAMES_AT_ONCE)):
            look.add(self._unregistered_scopes(names))
            await self._others()

    def _unregistered_namespaces(self, numbers: list[NamespaceId]) -> list[Finding]:
        state, registry = self._machine.state, self._pool.books.files.registry
        found = []
        for number in numbers:
            namespace, known = state.namespaces.get(number), registry.namespaces.get(number)
            if namespace is not None and (known is None or known.spec != namespace.spec):
                problem = "the registry doesn't know it, or another of this number"
                found.append(Finding("registry", f"namespace {number}", problem))
        return found

    def _unregistered_scopes(self, numbers: list[ScopeId]) -> list[Finding]:
        state, registry = self._machine.state, self._pool.books.files.registry
        found = []
        for number in numbers:
            scope, known = state.scopes.get(number), registry.scopes.get(number)
            if scope is None:
                continue
            own = False if known is None else known.own
            if known != OpenScope(
                number, scope.namespace, scope.epoch, scope.account, scope.group, own
            ):
                problem = "the registry doesn't know it, or another of this number"
                found.append(Finding("registry", f"scope {number}", problem))
        return found


def _sums_of(path: Path, offsets: Slots, size: int) -> U64:
    """The checksums of parts that lie at these places of an extent."""
    content = bytearray(len(offsets) * size)
    view = memoryview(content)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for number, offset in enumerate(offsets.tolist()):
            if os.preadv(fd, [view[number * size : (number + 1) * size]], offset) != size:
                raise OSError(0, "it is too short")
    finally:
        os.close(fd)
    return checksums(np.frombuffer(content, dtype=np.uint64).reshape(len(offsets), size // 8))
