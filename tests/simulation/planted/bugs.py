"""Bugs to be planted in the daemon."""

from __future__ import annotations

from functools import partial

from tests.simulation.planted.bug import Bug, bug
from tests.simulation.planted.client_bugs import BATCHES, CLIENT

_core = partial(bug, "kvd.core")

CORE = (
    _core(
        "load of what is still being stored",
        "jobs.load",
        "return known and bool((state.slots.state[offer.slots] == READY).all())",
        "return known",
    ),
    _core(
        "load that does not hold its blocks",
        "jobs.load",
        "pinned = state.slots.distinct(offer.slots)",
        "pinned = offer.slots[:0]",
    ),
    _core(
        "stores together of what is there or on its way",
        "jobs.together",
        "obstructed: Bools = offer.slots != NOWHERE",
        "obstructed = np.zeros(len(offer.slots), dtype=np.bool_)",
    ),
    _core(
        "stores together of one key twice",
        "jobs.together",
        "obstructed |= _repeated(offer.tags)",
        "pass",
    ),
    _core(
        "stores together from blocks that are not whole",
        "jobs.together",
        "obstructed |= ~whole_rows(offer)",
        "pass",
    ),
    _core(
        "stores together of which the first alone ends",
        "jobs.transfer",
        "    for share in piece.shares:\n        share.job.blocks +=",
        "    for share in piece.shares[:1]:\n        share.job.blocks +=",
    ),
    _core(
        "stores together of which the first alone fails",
        "jobs.transfer",
        "    for share in piece.shares:\n        fail_job(share.job, reason)",
        "    for share in piece.shares[:1]:\n        fail_job(share.job, reason)",
    ),
    _core(
        "pending said to be a hit",
        "jobs.lookup",
        "_STATUS_OF_STATE[SlotState.RESERVED] = PENDING",
        "_STATUS_OF_STATE[SlotState.RESERVED] = HIT",
    ),
    _core(
        "eviction of what is held",
        "blocks.slot_lifecycle",
        "owner.policy.evict(count, lambda slots: pins.take(slots) == 0, turn.now_ns)",
        "owner.policy.evict(count, lambda slots: pins.take(slots) < 99, turn.now_ns)",
    ),
    _core(
        "leases that end early",
        "claims.lease",
        "oldest, few = turn.now_ns - state.config.lease_ttl_ns, _Few()",
        "oldest, few = turn.now_ns - state.config.lease_ttl_ns // 20, _Few()",
    ),
    _core(
        "promised rows taken at once",
        "room.reclaim",
        "if promised and turn.now_ns - claim.since_ns < PROMISED_NS:",
        "if False:",
    ),
    _core(
        "leases that end with an epoch stay",
        "upkeep.session",
        "    lease.end_all(state, session)\n    search.end_all(state, session)\n    waits.drop",
        "    search.end_all(state, session)\n    waits.drop",
    ),
    _core(
        "reset that keeps the epoch",
        "upkeep.session",
        "left, session.epoch = session.epoch, event.epoch",
        "left = session.epoch",
    ),
    _core(
        "store under way that survives a clear",
        "jobs.transfer",
        "if not failure and piece.kind is JobKind.STORE and _is_cleared(state, piece):",
        "if False:",
    ),
    _core(
        "clear that clears nothing",
        "upkeep.clear",
        "namespace.cleared_below = ScopeId(state.next_scope)",
        "namespace.cleared_below = namespace.cleared_below",
    ),
    _core(
        "failed store that is readable",
        "jobs.transfer",
        "    if failure:\n        fail_piece(turn, piece, failure)",
        "    if failure and job.kind is JobKind.LOAD:\n        fail_piece(turn, piece, failure)",
    ),
    _core(
        "readable before the last rank is done",
        "jobs.transfer",
        "    if not piece.transfers:\n        _end_piece(turn, piece)",
        "    if len(piece.transfers) < 2:\n        _end_piece(turn, piece)",
    ),
    _core(
        "slot free while a copy still writes it",
        "blocks.slot_lifecycle",
        "slots = slots[state.slots.pins[slots] == 0]",
        "slots = slots[state.slots.pins[slots] < 99]",
    ),
    _core(
        "row released before movers unmapped it",
        "room.reclaim",
        "if not row.mapped_by and not row.zeroing:",
        "if not row.zeroing:",
    ),
    _core(
        "row that a dead mover never gives back",
        "upkeep.session",
        "    for row in list(state.retiring):\n        row_unmapped(turn, row, event.mover)\n",
        "",
    ),
    _core(
        "quota that counts half",
        "model.size_class",
        "return self.used_bytes + more_bytes - self.quota_bytes",
        "return (self.used_bytes + more_bytes) // 2 - self.quota_bytes",
    ),
    _core(
        "repeated key that ends the daemon",
        "jobs.store",
        "others = pending[~waits.stored_by(state, offer.slots[pending], job)]",
        "others = pending",
        was_ours=True,
    ),
    _core(
        "engine starved for ever: it is never in need",
        "room.row_rights",
        "lacking = entitled_rows(state, owner) - owner.lasting_rows",
        "lacking = 0",
        was_ours=True,
    ),
    _core(
        "engine starved for ever: what is freed goes to who is quickest",
        "blocks.row_grants",
        "return 0 if state.claims else grantable_extents(state)",
        "return grantable_extents(state)",
        was_ours=True,
    ),
    _core(
        "rights without regard to payers",
        "room.reclaim",
        "return beyond_right or state.rights.may_push(asking, owner.namespace, extents, safe=safe)",
        "return beyond_right and state.rights.may_push("
        "asking, owner.namespace, extents, safe=safe)",
        was_ours=True,
    ),
    _core(
        "full disk that never heals: no row is granted again",
        "upkeep.operator",
        "    state.grant_pause.tick()\n",
        "",
        was_ours=True,
    ),
    _core(
        "steps of a copy's deadline that nobody looks at",
        "upkeep.operator",
        "    deadlines.enforce(turn)\n    session",
        "    session",
        was_ours=True,
    ),
    _core(
        "closed session whose copies run on",
        "upkeep.operator",
        "    session.end_lingering(turn)\n",
        "",
    ),
    _core(
        "hand-offs that never end",
        "upkeep.operator",
        "    hand_off.expire(turn)\n",
        "",
        was_ours=True,
    ),
    _core(
        "hand-off that keeps its pins",
        "claims.hand_off",
        "    lease.unclaim(state, owner, slots, np.array(list(claims.values()), dtype=np.int32))\n",
        "    pass\n",
    ),
    _core(
        "waits of a closed session stay",
        "upkeep.session",
        "    waits.drop(state, session)\n",
        "",
    ),
    _core(
        "engine blocks busy for ever",
        "jobs.transfer",
        "            mark_busy(session, part.size_class.group, part.engine_blocks, -1)\n",
        "            pass\n",
    ),
    _core(
        "policy not told of what was given up",
        "room.reclaim",
        "    owner.policy.remove(ready)\n",
        "",
    ),
    _core(
        "tags not shown",
        "blocks.slot_lifecycle",
        "    turn.orders.append(PublishTags(owner.namespace, tags))\n",
        "",
    ),
    _core(
        "tags of gone blocks shown",
        "blocks.slot_lifecycle",
        "    turn.orders.append(RetractTags(owner.namespace, tags))\n",
        "",
    ),
    _core(
        "removal that watchers are not told",
        "blocks.slot_lifecycle",
        "    _announce_removed(turn, owner, slots)\n\n\ndef",
        "\n\ndef",
    ),
    _core(
        "record of a gone block stays",
        "blocks.slot_lifecycle",
        "    _leave_index(turn, owner, slots, why)\n    turn.orders.append(WriteFree(slots))\n"
        "    state.slots.move(slots, SlotState.READY, SlotState.FREE)",
        "    _leave_index(turn, owner, slots, why)\n"
        "    state.slots.move(slots, SlotState.READY, SlotState.FREE)",
    ),
    _core(
        "pins that don't add up",
        "blocks.slot_lifecycle",
        "    pins += 1\n",
        "    np.maximum(pins, 1, out=pins)\n",
    ),
    _core(
        "restart that gives out slots that hold blocks",
        "upkeep.recovery",
        "    owner.free.put(slots[state.slots.state[slots] == FREE])\n",
        "    owner.free.put(slots)\n",
    ),
    _core(
        "restart that forgets whose bytes they are",
        "upkeep.recovery",
        "    owner.tenant.used_bytes += len(slots) * owner.block_bytes\n    state.index",
        "    state.index",
    ),
    _core(
        "damaged block that stays",
        "jobs.transfer",
        "            damage.remove(turn, part, damaged)",
        "            pass",
    ),
)


_driver = partial(bug, "kvd.runtime")

DRIVER = (
    _driver(
        "row given on without being zeroed",
        "driver",
        "await to_its_end(self.pool.zero_row, order)",
        "pass",
    ),
    _driver(
        "full disk that never heals: the core is not told of the row",
        "driver",
        "            self._refused.add(order.row)\n",
        "",
        was_ours=True,
    ),
    _driver(
        "refused row that is never taken back",
        "driver",
        "        if self._refused:\n            self._tell_refused_rows()\n",
        "",
        was_ours=True,
    ),
    _driver(
        "copy into a row that its mover was not told of",
        "driver",
        "elif not self._teller.tell_rows_of(order):",
        "elif False:",
    ),
    _driver(
        "zeroing that is not tried again",
        "driver",
        "                await asyncio.sleep(ZERO_AGAIN_SECONDS)\n",
        "                return\n",
        was_ours=True,
    ),
    _driver(
        "mover's end that the core never hears of",
        "fleet",
        "                self._post(gone)\n",
        "                pass\n",
        was_ours=True,
    ),
    _driver(
        "queue that is full and nobody told",
        "fleet",
        "            self.transfer_finished(order.mover, refused)\n",
        "            pass\n",
    ),
    _driver(
        "checksums noted for another shard",
        "fleet",
        "self._pool.note_checksums(submitted.slots, shard, finished.checksums)",
        "self._pool.note_checksums(submitted.slots, 0, finished.checksums)",
    ),
    _driver(
        "rows told to movers of other namespaces",
        "fleet",
        "            if attached.namespace == order.namespace:\n",
        "            if True:\n",
    ),
    _driver(
        "parts of another shard",
        "fleet",
        "extents, offsets = self._pool.locate(part.slots, shard)",
        "extents, offsets = self._pool.locate(part.slots, 0)",
    ),
    _driver(
        "mover that stays noted and keeps the daemon's step",
        "fleet",
        "            found.gone.set()\n",
        "            pass\n",
        was_ours=True,
    ),
    _driver(
        "what a tier lacks said to be read",
        "tiers",
        "done, missing = _is(answer, Outcome.DONE), _is(answer, Outcome.MISSING)",
        "done, missing = _is(answer, Outcome.DONE) | _is(answer, Outcome.MISSING), "
        "_is(answer, Outcome.MISSING)",
    ),
)


_pool = partial(bug, "kvd.pool")

POOL = (
    _pool(
        "record that stays READY",
        "slot_table",
        "        self._words[records, _STATE] &= ~_STATE_MASK\n",
        "        pass\n",
    ),
    _pool(
        "record that is believed though its sum is wrong",
        "slot_table",
        "mask: npt.NDArray[np.bool_] = right_length & (sums == body[:, _CHECKSUM])",
        "mask: npt.NDArray[np.bool_] = right_length | (sums == body[:, _CHECKSUM])",
    ),
    _pool(
        "row that the next daemon does not find",
        "pool",
        "            self._row_table.grant(row)\n",
        "",
    ),
    _pool(
        "row that stays granted in the table",
        "pool",
        "        self._row_table.release(row.extents)\n",
        "",
    ),
    _pool(
        "scope that the next daemon does not find",
        "pool",
        "        self._registry.add_scope(order)\n",
        "        pass\n",
    ),
    _pool(
        "page that lacks the last tag",
        "pool",
        "spilled = page.insert(order.tags)",
        "spilled = page.insert(order.tags[1:])",
    ),
    _pool(
        "page that keeps tags",
        "pool",
        "        page.remove(order.tags)\n",
        "",
    ),
    _pool(
        "extents that stay dirty at a start",
        "recovery",
        "        self.books.extents.zero_all(stray - self.orphaned_extents)\n",
        "",
    ),
)

CONTROL = (
    Bug(
        "message that applies twice",
        "kvd.control.sessions.verbs",
        "            if not live.book.admit(sequence):\n",
        "            if not live.book.admit(sequence) and sequence < 0:\n",
    ),
    Bug(
        "end of a stream that ends no session",
        "kvd.control.sessions.session",
        "        self._common.driver.close_session(self.live.id, gone=gone)\n",
        "",
    ),
    Bug(
        "worker whose end ends no mover",
        "kvd.control.registration.rendezvous",
        "        peer.on_end(lambda: self._carry_out(self._meeting.worker_ended(mover)))\n",
        "",
    ),
)

_log = partial(bug, "kvd.runtime")

EVENTS = (
    _log(
        "watcher that goes on though it fell behind",
        "event_log",
        "if wanted.has_grown() or cursor < self._first_kept:",
        "if wanted.has_grown() or cursor < 0:",
    ),
    _log(
        "watcher that falls behind by one change unseen",
        "event_log",
        "return self.sequence - len(self._kept)\n",
        "return self.sequence - len(self._kept) - 1\n",
    ),
    _log(
        "watcher that does not hear what a reload lets it see",
        "event_log",
        "if wanted.has_grown() or cursor",
        "if cursor",
    ),
    _log(
        "watcher that comes back after such a reload and goes on",
        "event_log",
        "and self._rights_changed_at <= after[1]",
        "and after[1]",
        was_ours=True,
    ),
    _log(
        "place of another incarnation where a watcher goes on",
        "event_log",
        "            and after[0] == self.incarnation\n",
        "",
    ),
    _log(
        "snapshot without what changed while it was read",
        "event_log",
        "            while cursor < self.sequence:\n                if cursor",
        "            while (cursor := self.sequence) < self.sequence:\n                if cursor",
    ),
    _log(
        "snapshot that ends without what a reload let its watcher see meanwhile",
        "event_log",
        "        while has_grown:\n            has_grown = False\n",
        "        for has_grown in (False,):\n",
        was_ours=True,
    ),
    _log(
        "snapshot without what was taken from its watcher and given back meanwhile",
        "event_log",
        "                has_grown |= wanted.has_grown()\n                if changes",
        "                if changes",
        was_ours=True,
    ),
    _log(
        "end of a snapshot that a reload made void where its watcher goes on",
        "event_log",
        "end = self._rights_changed_at - 1 if has_grown else cursor",
        "end = cursor",
        was_ours=True,
    ),
    _log(
        "piece of a snapshot that its watcher may not see any more",
        "event_log",
        "still = tuple(filter(wanted, changes))",
        "still = changes",
        was_ours=True,
    ),
    Bug(
        "message that names the place behind the next one, too",
        "kvd.control.convert",
        "unfinished = delivery.sequence if delivery.snapshot else previous",
        "unfinished = delivery.sequence",
    ),
    Bug(
        "watcher that hears of another tenant",
        "kvd.control.services.events",
        "return is_meant and self._namespaces.may_see_of(peer, tenant)",
        "return is_meant",
    ),
)

BUGS = (*CORE, *DRIVER, *POOL, *CONTROL, *EVENTS, *CLIENT, *BATCHES)
