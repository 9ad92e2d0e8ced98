"""Looks for broken invariants in the state of a running machine; reads, and changes nothing.

Each call is a piece of a few milliseconds at most, and what it compares stands still meanwhile.
What is too much for one piece is counted in several, and compared only where nothing has changed
between them. Nothing here asserts: what is found is said, and whoever asked decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.core.keys import NO_SLOTS, U64, Bools, Slots
from kvd.core.model.size_class import Row, SizeClass, Tally
from kvd.core.model.slots import SlotState
from kvd.core.model.state import Namespace, State
from kvd_proto.tags import tags_of

CLAIMS_LOOKED_AT = 8192  # leases, hand-offs and copies: with more, pins are not compared
CLAIMED_BLOCKS_LOOKED_AT = 1 << 16
ROWS_COUNTED_AT_ONCE = 64
EXTENTS_LOOKED_AT = 1 << 14  # with more, their owners are not compared
FREE_SLOTS_LOOKED_AT = 1 << 16
SLOTS_NAMED = 8  # in a finding
_COUNTS = ("capacity", "reserved", "ready", "quarantined", "evictable")


class Finding(NamedTuple):
    """A broken invariant: its name, where, and what is wrong."""

    invariant: str
    place: str
    problem: str


def named(slots: Slots) -> str:
    """The first of these numbers, for a finding."""
    more = f" and {len(slots) - SLOTS_NAMED} more" if len(slots) > SLOTS_NAMED else ""
    return f"{', '.join(map(str, slots[:SLOTS_NAMED].tolist()))}{more}"


# -- the whole machine ----------------------------------------------------------------------------


def sums(state: State) -> list[Finding]:
    """The pool's and the tenants' sums are those of the namespaces, and the index holds as much."""
    found = _sum_of(state.tally, [t.tally for t in state.tenants.values()], "the pool's sums")
    of_tenant: dict[str, list[Tally]] = {name: [] for name in state.tenants}
    for namespace in state.namespaces.values():
        of_tenant.setdefault(namespace.tenant.tenant, []).append(namespace.tally)
    for tenant in state.tenants.values():
        place, tally = f"tenant {tenant.tenant!r}", tenant.tally
        found += _sum_of(tally, of_tenant[tenant.tenant], place)
        used = tally.reserved_bytes + tally.ready_bytes + tally.quarantined_bytes
        if tenant.used_bytes != used:
            problem = f"{tenant.used_bytes} bytes are said to be in use, {used} are"
            found.append(Finding("accounts", place, problem))
        if tenant.quota_bytes and used > tenant.quota_bytes and not tenant.shrinking:
            problem = f"{used} bytes are in use, with a quota of {tenant.quota_bytes}"
            found.append(Finding("quota", place, problem))
    held = state.tally.ready + state.tally.reserved
    if len(state.index) != held:
        problem = f"{len(state.index)} blocks are in it, of {held} that are ready or reserved"
        found.append(Finding("index", "the index", problem))
    return found


def _sum_of(tally: Tally, parts: list[Tally], place: str) -> list[Finding]:
    found = []
    for name in (*_COUNTS, *(f"{count}_bytes" for count in _COUNTS)):
        said, there = getattr(tally, name), sum(getattr(part, name) for part in parts)
        if said != there:
            problem = f"{name} is said to be {said}, its parts come to {there}"
            found.append(Finding("accounts", place, problem))
    return found


def sessions(state: State) -> list[Finding]:
    """Sessions, movers and copies know one another."""
    found = []
    for mover in state.movers.values():
        session = state.sessions.get(mover.session)
        if session is None or session.movers.get(mover.rank) is not mover:
            problem = f"session {mover.session} doesn't know it as its rank {mover.rank}"
            found.append(Finding("sessions", f"mover {mover.mover}", problem))
    for session in state.sessions.values():
        place = f"session {session.session}"
        if session.namespace not in state.namespaces:
            problem = f"its namespace {session.namespace} is not known"
            found.append(Finding("sessions", place, problem))
        if not (session.is_open or session.jobs or session.movers or session.ended_leases):
            found.append(Finding("sessions", place, "it is over, and is not forgotten"))
        if session.leases and not session.is_open:
            found.append(Finding("sessions", place, "it is over, and holds leases"))
        listed = sum(map(len, session.by_request.values()))
        if listed != len(session.leases):
            problem = f"its requests hold {listed} leases, of {len(session.leases)}"
            found.append(Finding("sessions", place, problem))
    for number, transfer in state.transfers.items():
        if transfer.piece.transfers.get(number) is not transfer:
            found.append(Finding("sessions", f"copy {number}", "its job doesn't know it"))
    return found


def pins(state: State) -> list[Finding] | None:
    """Slots have as many pins as claims and copies hold them. None: these are too many."""
    gathered = _claims(state)
    if gathered is None:
        return None
    claims, copies = gathered
    claimed, claim_counts = np.unique(claims, return_counts=True)
    pinned, counts = np.unique(np.concatenate([claims, copies]), return_counts=True)
    table = state.slots
    found = []
    for what, slots, said, there in (
        ("claims", claimed, table.leases[claimed], claim_counts),
        ("pins", pinned, table.pins[pinned], counts),
    ):
        wrong = slots[said != there]
        if len(wrong):
            problem = f"the {what} that they are said to have are not those that hold them"
            found.append(Finding("pins", f"slots {named(wrong)}", problem))
    states = np.bincount(table.state[pinned], minlength=len(SlotState))
    tally = state.tally
    for name, wanted, due in (
        ("ready", SlotState.READY, tally.ready - tally.evictable),
        ("reserved", SlotState.RESERVED, tally.reserved),
        ("quarantined", SlotState.QUARANTINED, tally.quarantined),
    ):
        if states[wanted] != due:
            problem = f"{due} {name} slots are pinned, and something holds {states[wanted]}"
            found.append(Finding("pins", "all slots", problem))
    return found


def _claims(state: State) -> tuple[Slots, Slots] | None:
    """Slots under leases and hand-offs, and those that copies hold, each as often as it is."""
    rows = [*state.emptying.values(), *(r for r in state.rows.values() if r.orphaned)]
    count = len(state.hand_offs) + len(state.backlog.leases) + len(state.transfers)
    count += len(state.below.copies) + sum(len(s.leases) for s in state.sessions.values())
    if count > CLAIMS_LOOKED_AT:
        return None
    claims = [
        np.fromiter(slots, np.int64, len(slots))
        for each in state.hand_offs.values()
        for slots in each.held.values()
    ]
    claims += [lease.slots for lease in state.backlog.leases]
    claims += [lease.slots for s in state.sessions.values() for lease in s.leases.values()]
    copies = [part.pinned for t in state.transfers.values() for part in t.piece.parts]
    copies += [part.pinned for copy in state.below.copies.values() for part in copy.parts]
    for row in {row.row: row for row in rows}.values():
        copies += [row.withheld, row.copied_into, row.left]
    if sum(map(len, claims)) + sum(map(len, copies)) > CLAIMED_BLOCKS_LOOKED_AT:
        return None
    return np.concatenate([NO_SLOTS, *claims]), np.concatenate([NO_SLOTS, *copies])


# -- a group's counts -----------------------------------------------------------------------------


def namespace_sums(state: State, namespace: Namespace) -> list[Finding]:
    """The namespace is filed under its names, and its sums are those of its groups."""
    place = f"namespace {namespace.namespace}"
    parts = []
    for owner in namespace.classes:
        size = owner.block_bytes
        each = {name: getattr(owner, name) for name in _COUNTS}
        parts.append(Tally(**each, **{f"{name}_bytes": each[name] * size for name in _COUNTS}))
    found = _sum_of(namespace.tally, parts, place)
    if state.by_fingerprint.get(namespace.spec.fingerprint) is not namespace:
        found.append(Finding("namespaces", place, "its fingerprint is another's"))
    if not all(state.is_there(owner) for owner in namespace.classes):
        found.append(Finding("namespaces", place, "a group of it is not filed under its name"))
    return found


def class_counts(state: State, owner: SizeClass) -> Iterator[list[Finding] | None]:
    """The group's counts are those of its slots, in pieces; None: more is to come.

    The last piece says nothing at all where the group changed all the time.
    """
    rows = list(owner.rows.values())
    if len(rows) <= ROWS_COUNTED_AT_ONCE:
        counts, evictable = _counted(state, rows)
        yield _compared(owner, counts, evictable) + _free_slots(state, owner)
        return
    changes = state.story.changes
    counts, _ = _counted(state, [])
    for first in range(0, len(rows), ROWS_COUNTED_AT_ONCE):
        if state.story.changes != changes:
            return
        counts += _counted(state, rows[first : first + ROWS_COUNTED_AT_ONCE])[0]
        yield None
    if state.story.changes == changes:
        yield _compared(owner, counts, None)


def _counted(state: State, rows: list[Row]) -> tuple[npt.NDArray[np.int64], int]:
    counts = np.zeros(256, dtype=np.int64)
    evictable = 0
    for row in rows:
        states = state.slots.state[row.span]
        counts += np.bincount(states, minlength=256)
        unpinned = state.slots.pins[row.span] == 0
        evictable += int(np.count_nonzero(unpinned & (states == SlotState.READY)))
    return counts, evictable


def _compared(
    owner: SizeClass, counts: npt.NDArray[np.int64], evictable: int | None
) -> list[Finding]:
    place = f"namespace {owner.namespace}, group {owner.group}"
    pairs = [
        ("capacity", owner.capacity, int(counts.sum())),
        ("reserved", owner.reserved, int(counts[SlotState.RESERVED])),
        ("ready", owner.ready, int(counts[SlotState.READY])),
        ("quarantined", owner.quarantined, int(counts[SlotState.QUARANTINED])),
    ]
    if evictable is not None:
        pairs.append(("evictable", owner.evictable, evictable))
    return [
        Finding("accounts", place, f"{name} slots are said to be {said}, and are {there}")
        for name, said, there in pairs
        if said != there
    ]


def _free_slots(state: State, owner: SizeClass) -> list[Finding]:
    """Those that may be given out are the free ones, but for those of rows that the group loses."""
    lasting = [row for row in owner.rows.values() if row.row not in owner.emptying]
    if owner.capacity > FREE_SLOTS_LOOKED_AT:
        return []
    free = [
        row.first_slot + np.flatnonzero(state.slots.state[row.span] == SlotState.FREE)
        for row in lasting
    ]
    due = np.sort(np.concatenate([NO_SLOTS, *free]))
    there = np.sort(owner.free.all())
    if np.array_equal(due, there):
        return []
    place = f"namespace {owner.namespace}, group {owner.group}"
    wrong = np.setxor1d(due, there)
    problem = f"slots {named(wrong)} are free, or on the list of free ones, but not both"
    if not len(wrong):
        problem = "a slot is twice on the list of free ones"
    return [Finding("accounts", place, problem)]


# -- rows and their slots -------------------------------------------------------------------------


class SomeBlocks(NamedTuple):
    """Some slots of one row, by place in it, and which hold a readable block."""

    row: Row
    ordinals: Slots
    ready: Bools

    @property
    def readable(self) -> Slots:
        """Slot numbers of the readable ones."""
        slots: Slots = self.row.first_slot + self.ordinals[self.ready]
        return slots


def row_place(row: Row) -> str:
    """Where a finding of the row is."""
    return f"row {row.row} (namespace {row.size_class.namespace}, group {row.size_class.group})"


def row_itself(state: State, row: Row) -> list[Finding]:
    """It is filed under its number, and its class knows it."""
    found = []
    if state.rows.get(row.row) is not row or row.row != row.extents[0]:
        found.append(Finding("rows", row_place(row), "it is filed under another number"))
    if row.size_class.rows.get(row.row) is not row:
        found.append(Finding("rows", row_place(row), "its group doesn't know it"))
    if not state.is_there(row.size_class):
        found.append(Finding("rows", row_place(row), "it is of a group that is not known"))
    return found


def some_blocks(state: State, row: Row, first: int, count: int) -> SomeBlocks:
    """So many slots of the row from this one on."""
    ordinals = np.arange(first, min(first + count, row.slots), dtype=np.int64)
    ready = state.slots.state[row.first_slot + ordinals] == SlotState.READY
    return SomeBlocks(row, ordinals, ready)


def blocks(state: State, some: SomeBlocks) -> list[Finding]:
    """States, pins, scopes, tags and index of these slots agree."""
    table, place = state.slots, row_place(some.row)
    slots = some.row.first_slot + some.ordinals
    states = table.state[slots]
    held = (states == SlotState.READY) | (states == SlotState.RESERVED)
    copied = (states == SlotState.RESERVED) | (states == SlotState.QUARANTINED)
    pinned, leased = table.pins[slots], table.leases[slots]
    found = [
        Finding(invariant, place, f"slots {named(slots[wrong])} {problem}")
        for invariant, wrong, problem in (
            ("slots", states == SlotState.ABSENT, "have no state, in a row that is granted"),
            ("slots", states > max(SlotState), "are in a state that there is not"),
            ("pins", (states == SlotState.FREE) & (pinned != 0), "are free and pinned"),
            ("pins", copied & (pinned <= 0), "are reserved or quarantined for nobody"),
            ("pins", (leased < 0) | (leased > pinned), "have more claims than pins"),
        )
        if wrong.any()
    ]
    return found + _index(state, some.row, slots[held])


def _index(state: State, row: Row, held: Slots) -> list[Finding]:
    if not len(held):
        return []
    table, owner, place = state.slots, row.size_class, row_place(row)
    numbers = table.scopes[held]
    distinct, inverse = np.unique(numbers, return_inverse=True)
    seeds = np.zeros(len(distinct), dtype=np.uint64)
    strange = np.zeros(len(distinct), dtype=np.bool_)
    for place_of, number in enumerate(distinct.tolist()):
        scope = state.scopes.get(number)
        strange[place_of] = scope is None or (scope.namespace, scope.group) != owner.name
        seeds[place_of] = 0 if scope is None else scope.seed
    known = ~strange[inverse]
    found = []
    if not known.all():
        problem = f"slots {named(held[~known])} have blocks of scopes that are not of this row"
        found.append(Finding("scopes", place, problem))
    held, numbers, tag_seeds = held[known], numbers[known], seeds[inverse][known]
    words: U64 = table.keys(owner.width)[held]
    right = tags_of(words, tag_seeds) == table.tags[held]
    if not right.all():
        problem = f"slots {named(held[~right])} have other tags than their keys make"
        found.append(Finding("index", place, problem))
    at = state.index.find(table.tags[held], words, numbers)
    if not np.array_equal(at, held):
        problem = f"slots {named(held[at != held])} are not found by their keys"
        found.append(Finding("index", place, problem))
    return found


# -- extents --------------------------------------------------------------------------------------


def extents_held(state: State) -> list[Finding] | None:
    """Every extent is free, or of one row. None: there are too many for one look."""
    count = state.config.extents
    if count > EXTENTS_LOOKED_AT:
        return None
    rows = [*state.rows.values(), *state.retiring.values()]
    numbers = [*state.free_extents, *(extent for row in rows for extent in row.extents)]
    held = np.bincount(np.array(numbers, dtype=np.int64), minlength=count)
    return [
        Finding("extents", f"extents {named(wrong)}", problem)
        for wrong, problem in (
            (np.flatnonzero(held[:count] > 1), "they belong to several, or are free as well"),
            (np.flatnonzero(held[:count] == 0), "they belong to nobody, and are not free"),
            (count + np.flatnonzero(held[count:]), "the pool has none of these numbers"),
        )
        if len(wrong)
    ]
