"""A second opinion: what the machine's orders must mean, judged after every event by them alone.

It believes nothing of the machine's own tables. It holds each order against the ones before it:
records, tags, announcements, copies and ends of jobs. `kvd.core`'s tables are compared with each
other by tests/core/invariants.py, and with this by `compare`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.actions import Action
from kvd.core.events import JobKind, JobStatus
from kvd.core.keys import KeyBatch, MoverId, SessionId, TierId
from kvd.core.model.slots import SlotState
from kvd_proto.page import PageReader

HIT = 1
Record = tuple[int, bytes]  # scope, key
Found = tuple[int, str, str, int, bytes]  # namespace, epoch, account, group, key


@dataclass(slots=True)
class Copying:
    """A transfer or a tier's copy that was ordered and has not ended."""

    writes: bool
    slots: tuple[int, ...]
    mover: MoverId | None
    jobs: tuple[tuple[int, int], ...] = ()
    tier: TierId | None = None


@dataclass
class Lost:
    """What was damaged between two daemons: nobody may believe it."""

    slots: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)


@dataclass
class Ledger:
    """What one incarnation of the machine has ordered so far."""

    records: dict[int, Record] = field(default_factory=dict)  # READY, by slot
    rows: dict[int, act.GrantRow] = field(default_factory=dict)
    tags: dict[int, Counter[int]] = field(default_factory=dict)  # published, by namespace
    scopes: dict[int, tuple[int, str, str, int]] = field(default_factory=dict)
    findable: dict[Found, int] = field(default_factory=dict)  # slots
    announced: set[Found] = field(default_factory=set)
    copies: dict[tuple[str, int], Copying] = field(default_factory=dict)
    reading: Counter[int] = field(default_factory=Counter)  # by slot
    writing: Counter[int] = field(default_factory=Counter)
    jobs: dict[tuple[int, int], JobKind] = field(default_factory=dict)  # accepted, not ended
    sessions: dict[int, int] = field(default_factory=dict)  # by mover
    failed: set[tuple[int, int]] = field(default_factory=set)  # jobs, of which a copy was not made
    epochs: dict[int, tuple[int, str]] = field(default_factory=dict)  # of sessions
    ended_now: set[tuple[int, int]] = field(default_factory=set)
    changing: set[int] = field(default_factory=set)  # slots, by the last event's orders
    changing_rows: set[int] = field(default_factory=set)
    cleared: dict[int, int] = field(default_factory=dict)  # scopes below these numbers are gone
    read_back: list[int] = field(default_factory=list)
    slots_per_extent: int = 0
    extents: int = 0
    clearing: int = 0  # the namespace that the last event cleared
    clears: dict[int, int] = field(default_factory=dict)  # not told done: namespaces, by token
    clean: Any = None  # whether an extent holds zeros
    maps: Callable[[int], bool] = lambda _row: False  # whether a living mover maps a row
    spoilt: set[int] = field(default_factory=set)  # slots that the event said are damaged
    given_up: set[int] = field(default_factory=set)  # rows that are emptied in spite of leases
    excused: dict[Found, int] = field(default_factory=dict)  # when a promised block had to go
    now_ns: int = 0

    def observe(self, event: ev.Event, orders: list[Action]) -> None:
        """An event was handled, and these are its orders."""
        self.changing.clear()
        self.changing_rows.clear()
        self.clearing = 0
        self._before(event)
        for order in orders:
            if isinstance(order, act.Reply) and isinstance(event, ev.LookupRequested):
                self._check_lookup(event, order.payload)
            handle = _ORDERS.get(type(order))
            if handle is not None:
                handle(self, order)
        self._after(event, orders)

    def row_of(self, slot: int) -> act.GrantRow:
        """The row in which it lies."""
        rows = self.rows.values()
        return next(r for r in rows if r.first_slot <= slot < r.first_slot + r.slots)

    # -- events -------------------------------------------------------------------------------

    def _before(self, event: ev.Event) -> None:
        match event:
            case ev.TransferFinished():
                copying = self.copies.get(("transfer", event.transfer))
                if copying is not None:
                    self._spoilt(event.damaged)
                    if event.outcome is not ev.TransferOutcome.DONE:
                        self.failed.update(copying.jobs)
                self._end_copy(("transfer", event.transfer))
            case ev.MoverGone():
                for name in [n for n, c in self.copies.items() if c.mover == event.mover]:
                    self.failed.update(self.copies[name].jobs)
                    self._end_copy(name)
            case ev.TierGone():  # the end of what it did not take may be told later
                for name in [n for n, c in self.copies.items() if c.tier == event.tier]:
                    self._end_copy(name)
            case ev.RankAttached():
                self.sessions[event.mover] = int(event.session)
            case ev.TierCopyEnded():
                copying = self.copies.get(("tier", event.copy))
                if copying is not None and len(event.damaged) == len(copying.slots):
                    self._spoilt([copying.slots[n] for n in np.flatnonzero(event.damaged)])
                self._end_copy(("tier", event.copy))
            case ev.RowsRecovered():
                self._recovered(event)
            case ev.ScopesRecovered():
                for each in event.scopes:
                    self.scopes[each.scope] = (
                        event.namespace,
                        each.epoch,
                        each.account,
                        each.group,
                    )
            case ev.NamespaceCleared():
                self.clears[event.token] = event.namespace
                self._clear(event.namespace)

    def _spoilt(self, slots: Sequence[int]) -> None:
        """Their bytes are not what was stored: nobody may find them after this event."""
        self._excuse(set(slots))
        self.spoilt.update(slots)

    def _after(self, event: ev.Event, orders: list[Action]) -> None:
        for slot in self.spoilt:
            assert slot not in self.records, f"slot {slot} is damaged, and stays"
        self.spoilt.clear()
        match event:
            case ev.SessionOpened() | ev.EpochChanged():
                self._note_epoch(event, _reply(orders))
            case ev.StoreRequested() | ev.LoadRequested():
                self._check_jobs(event.session, [_reply(orders)])
            case ev.StoresRequested():
                self._check_jobs(event.session, [v for v in _reply(orders) if v is not None])
            case ev.RowsRecovered():
                self._note_read_back()
            case ev.RowRefused():
                if _reply(orders):
                    self.rows.pop(event.row, None)

    def _note_epoch(self, event: ev.SessionOpened | ev.EpochChanged, reply: Any) -> None:
        if isinstance(event, ev.SessionOpened):
            self.epochs[event.session] = (reply.namespace, reply.epoch.epoch)
        else:
            self.epochs[event.session] = (self.epochs[event.session][0], reply.epoch)

    def _check_lookup(self, event: ev.LookupRequested, answers: Any) -> None:
        """I1, I7: a HIT is a READY block of this very scope, and a READY block is no MISS."""
        namespace, epoch = self.epochs[event.session]
        for query, answer in zip(event.queries, answers, strict=True):
            keys = _keys(query.keys)
            assert len(answer.statuses) == len(keys), "an answer for other keys"
            for key, status in zip(keys, answer.statuses, strict=True):
                name = (namespace, epoch, query.context.account, query.group, key)
                slot = self.findable.get(name)
                if status & 3 == HIT:
                    assert slot is not None, f"HIT for a block that is not readable: {name}"
                elif status & 3 == 0:
                    assert slot is None, f"MISS for a block that lies in slot {slot}: {name}"
            assert answer.lease is None or any(s & 3 == HIT for s in answer.statuses), "a lease"

    def _check_jobs(self, session: SessionId, verdicts: list[act.Verdict]) -> None:
        """A job that is accepted was not known, or is a store's next piece (I11)."""
        for verdict in verdicts:
            name = (int(session), int(verdict.job))
            if verdict.accepted and name not in self.jobs and not self._ended_now(name):
                self.jobs[name] = verdict.kind
        self.ended_now.clear()

    def _ended_now(self, name: tuple[int, int]) -> bool:
        return name in self.ended_now

    def _recovered(self, event: ev.RowsRecovered) -> None:
        """What was read back; the orders that follow free what is of no use."""
        firsts = [row.row * self.slots_per_extent for row in event.rows]
        slots = np.repeat(firsts, [row.ready for row in event.rows]) + event.ordinals
        named = zip(slots.tolist(), event.scopes.tolist(), _keys(event.keys), strict=True)
        self.records.update((slot, (scope, key)) for slot, scope, key in named)
        self.read_back = slots.tolist()

    def _note_read_back(self) -> None:
        for slot in self.read_back:
            if slot in self.records:
                scope, key = self.records[slot]
                name = (*self.scopes[scope], key)
                assert name not in self.findable, f"{name} was read back twice"
                self.findable[name] = slot
                self.announced.add(name)
        self.read_back = []

    # -- orders -------------------------------------------------------------------------------

    def _grant(self, order: act.GrantRow) -> None:
        assert order.row not in self.rows, f"row {order.row} is granted twice"
        taken = {extent for row in self.rows.values() for extent in row.extents}
        assert not taken & set(order.extents), "an extent is granted twice"
        self.rows[order.row] = order
        self.changing_rows.add(order.row)
        self.given_up.discard(order.row)

    def _release(self, order: act.ReleaseRow) -> None:
        row = self.rows.pop(order.row)
        self.changing_rows.add(order.row)
        for slot in range(row.first_slot, row.first_slot + row.slots):
            assert slot not in self.records, f"slot {slot} is READY in a row that is released"
            assert not self.reading[slot], f"slot {slot} is read in a row that is released"
            assert not self.writing[slot], f"slot {slot} is written in a row that is released"
        assert not self.maps(order.row), f"row {order.row} is released, and a mover maps it (I3)"
        for extent in row.extents:
            assert self.clean is None or self.clean(extent), f"extent {extent} was not zeroed"

    def _scope(self, order: act.OpenScope) -> None:
        self.scopes[order.scope] = (order.namespace, order.epoch, order.account, order.group)

    def _write_ready(self, order: act.WriteReady) -> None:
        keys = _keys(order.keys)
        for slot, scope, key in zip(order.slots.tolist(), order.scopes.tolist(), keys, strict=True):
            assert not self.writing[slot], f"slot {slot} is READY while it is written (I2)"
            self._ready(slot, scope, key)

    def _ready(self, slot: int, scope: int, key: bytes) -> None:
        assert slot not in self.records, f"slot {slot} is READY twice"
        below = self.cleared.get(self.scopes[scope][0], 0) if scope in self.scopes else 0
        assert scope >= below, f"slot {slot} is READY in scope {scope}, which was cleared"
        self.changing.add(slot)
        self.records[slot] = (scope, key)
        if scope in self.scopes:
            name = (*self.scopes[scope], key)
            assert name not in self.findable, f"{name} lies in two slots"
            self.findable[name] = slot

    def _excuse(self, slots: set[int]) -> None:
        """These blocks may go though leases hold them."""
        if slots:
            gone = (self.records[slot] for slot in slots if slot in self.records)
            names = ((*self.scopes[scope], key) for scope, key in gone if scope in self.scopes)
            self.excused.update((name, self.now_ns) for name in names)

    def _write_free(self, order: act.WriteFree) -> None:
        if self.given_up:
            self._excuse(
                {s for s in order.slots.tolist() if s // self.slots_per_extent in self.given_up}
            )
        for slot in order.slots.tolist():
            record = self.records.pop(slot, None)
            self.changing.add(slot)
            if record is not None:
                name = (*self.scopes[record[0]], record[1])
                if self.findable.get(name) == slot:
                    del self.findable[name]

    def _clear(self, namespace: int) -> None:
        self.clearing = namespace
        for name in [n for n in self.findable if n[0] == namespace]:
            del self.findable[name]

    def _tell_done(self, order: act.TellDone) -> None:
        self.clears.pop(order.token, None)

    def _clear_scopes(self, order: act.ClearScopes) -> None:
        self.cleared[order.namespace] = order.below

    def _publish(self, order: act.PublishTags) -> None:
        tags = self.tags.setdefault(order.namespace, Counter())
        tags.update(order.tags.tolist())

    def _retract(self, order: act.RetractTags) -> None:
        tags = self.tags.setdefault(order.namespace, Counter())
        tags.subtract(order.tags.tolist())

    def _forget_namespace(self, order: act.ForgetNamespace) -> None:
        assert not any(name[0] == order.namespace for name in self.findable), "blocks stayed"
        self.tags.pop(order.namespace, None)

    def _start(self, order: act.StartTransfer) -> None:
        slots = tuple(slot for part in order.parts for slot in part.slots.tolist())
        writes = order.kind is JobKind.STORE
        for slot in slots:
            self._check_copy(slot, writes)
        session = self.sessions[order.mover]
        jobs = tuple((session, int(job)) for job in order.jobs)
        self._begin_copy(("transfer", order.transfer), Copying(writes, slots, order.mover, jobs))

    def _check_copy(self, slot: int, writes: bool) -> None:
        if writes:
            assert slot not in self.records, f"a copy writes to slot {slot}, which is READY (I3)"
            assert not self.reading[slot], f"a copy writes to slot {slot}, which is read (I3)"
        else:
            assert slot in self.records, f"a copy reads slot {slot}, which is not READY (I1)"
            assert not self.writing[slot], f"a copy reads slot {slot}, which is written (I1)"

    def _write_to_tier(self, order: act.WriteToTier) -> None:
        for slot in order.slots.tolist():
            self._check_copy(slot, False)
        copying = Copying(False, tuple(order.slots.tolist()), None, tier=order.tier)
        self._begin_copy(("tier", order.copy), copying)

    def _read_from_tier(self, order: act.ReadFromTier) -> None:
        for slot in order.slots.tolist():
            self._check_copy(slot, True)
            assert not self.writing[slot], f"two copies write to slot {slot}"
        copying = Copying(True, tuple(order.slots.tolist()), None, tier=order.tier)
        self._begin_copy(("tier", order.copy), copying)

    def _begin_copy(self, name: tuple[str, int], copying: Copying) -> None:
        assert name not in self.copies, f"{name} begins twice"
        self.copies[name] = copying
        (self.writing if copying.writes else self.reading).update(copying.slots)

    def _end_copy(self, name: tuple[str, int]) -> None:
        copying = self.copies.pop(name, None)
        if copying is None:
            return
        counts = self.writing if copying.writes else self.reading
        for slot in copying.slots:
            counts[slot] -= 1
            if not counts[slot]:
                del counts[slot]

    def _stored(self, order: act.AnnounceStored) -> None:
        if order.tier is not None:
            return  # what watchers know of a tier is a hint
        for name in _found(order):
            assert name not in self.announced, f"announced twice: {name} (I9)"
            self.announced.add(name)

    def _removed(self, order: act.AnnounceRemoved) -> None:
        for name in _found(order) if order.tier is None else ():
            assert name in self.announced, f"removed, not announced: {name} (I9)"
            self.announced.discard(name)

    def _cleared(self, order: act.AnnounceCleared) -> None:
        self.announced = {each for each in self.announced if each[0] != order.namespace}

    def _end_job(self, order: act.EndJob) -> None:
        name = (int(order.session), int(order.job))
        assert name not in self.failed or order.status is JobStatus.FAILED, f"{name} is not done"
        self.failed.discard(name)
        self.jobs.pop(name, None)
        self.ended_now.add(name)

    # -- the whole ----------------------------------------------------------------------------

    def compare(self, machine: Any, pool: Any) -> None:
        """The machine's tables, the pool's files and the index pages say what was ordered."""
        state = machine.state
        ready = set(np.flatnonzero(state.slots.state == SlotState.READY).tolist())
        assert ready == self.records.keys(), "other slots are READY than were ordered"
        assert self.announced == self.findable.keys(), "watchers were told of other blocks (I9)"
        for namespace, page in pool._pages.items():
            doomed = state.namespaces[namespace].doomed
            self._compare_page(namespace, page, state.slots.tags, doomed)

    def _compare_page(self, namespace: int, page: Any, tags: Any, doomed: int) -> None:
        """All readable blocks are on the page, but for those that it says it has no place for."""
        slots = [slot for name, slot in self.findable.items() if name[0] == namespace]
        reader = PageReader(page.read_only_fd)
        shown = reader.probe(tags[slots]) if slots else np.zeros(0, dtype=bool)
        assert int((~shown).sum()) <= page.spilled, "the index page lacks readable blocks"
        if not doomed:  # those of a clear go in pieces
            here = set(tags[slots].tolist())
            gone = [tag for tag in self.tags.get(namespace, ()) if tag not in here]
            seen = reader.probe(np.array(gone, dtype=np.uint64)) if gone else np.zeros(0, bool)
            assert not seen.any(), "the index page shows blocks that are gone (I9)"
        reader.close()

    def check_next(self, later: Ledger, *, all_noted: bool, lost: Lost) -> None:
        """After a kill: the next incarnation finds what was readable, and nothing else.

        But for what the last event was changing when the power went, what was damaged, and blocks
        of a clear that was not told done, where there was no room to note it.
        """
        undone = () if all_noted else self.clears.values()
        mine, theirs = dict(self.findable), dict(later.findable)
        for name, slot in theirs.items():
            assert slot not in lost.slots, f"the record of slot {slot} is damaged, and believed"
            if slot not in self.changing and name[0] != self.clearing:
                assert self.records.get(slot) == later.records[slot], f"slot {slot} came of nothing"
                readable = mine.get(name) == slot or name[0] in undone
                assert readable, f"{name} is served and was not readable (I2)"
        if all_noted:
            for name, slot in mine.items():
                if slot not in self.changing and slot not in lost.slots:
                    assert name in theirs, f"{name} was readable and is lost"
        self._check_next_rows(later, lost)

    def _check_next_rows(self, later: Ledger, lost: Lost) -> None:
        """Rows come of rows, and what is nobody's holds nothing of anybody."""
        for number, row in later.rows.items():
            assert number not in lost.rows, f"the header of row {number} is damaged, and believed"
            if number not in self.changing_rows:
                before = self.rows.get(number)
                assert before is not None, f"row {number} was released, and is there again"
                assert before.extents == row.extents, f"row {number} has other extents"
        held = {extent for row in later.rows.values() for extent in row.extents}
        for extent in range(later.extents):
            clean = extent in held or later.clean is None or later.clean(extent)
            assert clean, f"extent {extent} is nobody's after a restart, and not zeroed"


def _reply(orders: list[Action]) -> Any:
    return next((order.payload for order in orders if isinstance(order, act.Reply)), None)


def _keys(batch: KeyBatch) -> list[bytes]:
    if not len(batch):
        return []
    raw, size = batch.to_bytes(), batch.hash_bytes
    return [raw[i : i + size] for i in range(0, len(raw), size)]


def _found(order: act.AnnounceStored | act.AnnounceRemoved) -> list[Found]:
    return [
        (order.namespace, order.epoch, order.account, order.group, key) for key in _keys(order.keys)
    ]


_ORDERS: dict[type, Any] = {
    act.GrantRow: Ledger._grant,
    act.ReleaseRow: Ledger._release,
    act.OpenScope: Ledger._scope,
    act.ClearScopes: Ledger._clear_scopes,
    act.WriteReady: Ledger._write_ready,
    act.WriteFree: Ledger._write_free,
    act.PublishTags: Ledger._publish,
    act.RetractTags: Ledger._retract,
    act.ForgetNamespace: Ledger._forget_namespace,
    act.StartTransfer: Ledger._start,
    act.WriteToTier: Ledger._write_to_tier,
    act.ReadFromTier: Ledger._read_from_tier,
    act.AnnounceStored: Ledger._stored,
    act.AnnounceRemoved: Ledger._removed,
    act.AnnounceCleared: Ledger._cleared,
    act.EndJob: Ledger._end_job,
    act.TellDone: Ledger._tell_done,
}
