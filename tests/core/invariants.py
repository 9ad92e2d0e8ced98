"""What must be true of the machine after every event. For tests; reads everything.

The numbers are those of DESIGN section 8. I1, I2, I4 and I6 speak of bytes and processes and
are tested where those live. I9 (events = index) is checked from the actions, in tests/core.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, count
from typing import TYPE_CHECKING

import numpy as np

from kvd.core.claims.hand_off import MAX_CLAIMS_PER_TENANT, MAX_HAND_OFFS_PER_TENANT
from kvd.core.events import JobKind
from kvd.core.jobs.waits import MAX_TENANT_WAITING_BYTES, MAX_WAITING_BYTES
from kvd.core.keys import ScopeId, Slots
from kvd.core.machine import Machine
from kvd.core.model.backlog import CallOff
from kvd.core.model.index import NOWHERE
from kvd.core.model.job import Filling, Piece, Wait
from kvd.core.model.size_class import Tally
from kvd.core.model.slots import SlotState
from kvd.core.model.tiers import MAX_BEHIND_BLOCKS, SEARCH_BLOCKS, CopyKind, Tier
from kvd.core.policy import AutoPolicy
from kvd.core.upkeep import verify
from kvd.core.upkeep.verify import Finding
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.tags import tags_of
from tests.core.share_invariants import check_rights, check_shares

if TYPE_CHECKING:
    from kvd.core.model.size_class import SizeClass
    from kvd.core.model.state import State


NO_SLOTS = np.empty(0, dtype=np.int64)
VERIFIED_EVERY = 4  # checks: it looks at much the same, and takes half as long again
_CHECKS = count()


def check(machine: Machine) -> None:
    """Raise AssertionError with what is wrong, if anything is."""
    state = machine.state
    _check_extents(state)
    for owner in state.classes.values():
        by_state = _slots_by_state(state, owner)
        _check_slots(state, owner, by_state)
        _check_policy(state, owner, by_state)
    _check_absent(state)
    _check_pins(state)
    _check_hand_offs(state)
    _check_index(state)
    _check_tenants(state)
    _check_tallies(state)
    _check_jobs(state)
    _check_backlog(state)
    _check_waits(state)
    _check_busy_blocks(state)
    _check_sessions(state)
    _check_disuse(state)
    check_shares(state)
    check_rights(state)
    _check_tiers(state)
    if next(_CHECKS) % VERIFIED_EVERY == 0:
        assert verified(machine) == [], "what `kvd verify` says"


def verified(machine: Machine) -> list[Finding]:
    """What `kvd verify` finds in the core's state."""
    state = machine.state
    found = [
        *verify.sums(state),
        *verify.sessions(state),
        *(verify.pins(state) or ()),
        *(verify.extents_held(state) or ()),
    ]
    for namespace in state.namespaces.values():
        found += verify.namespace_sums(state, namespace)
        for owner in namespace.classes:
            for piece in verify.class_counts(state, owner):
                found += piece or ()
    for row in state.rows.values():
        found += verify.row_itself(state, row)
        found += verify.blocks(state, verify.some_blocks(state, row, 0, row.slots))
    return found


def _check_extents(state: State) -> None:
    """I10: every extent is free, in one granted row, or in one row that is being taken back."""
    held = Counter(state.free_extents)
    for row in [*state.rows.values(), *state.retiring.values()]:
        held.update(row.extents)
    assert held == Counter(range(state.config.extents)), "extents leaked or owned twice"
    state.free_extents.check()
    orphaned = sum(len(row.extents) for row in state.rows.values() if row.orphaned)
    assert state.usable_extents == state.config.extents - orphaned, "extents that can be had"
    for number, row in state.rows.items():
        assert row.row == number == row.extents[0], "a row is filed under another number"
        assert row.size_class.rows.get(number) is row, "a row's class doesn't know it"
    lost = [row for owner in state.classes.values() for row in owner.emptying.values()]
    assert {row.row for row in lost} == state.emptying.keys(), "rows that are being emptied"
    for row in state.emptying.values():
        assert state.rows[row.row] is row, "a row that is gone is being emptied"
        assert row.emptying, "a row that is being emptied doesn't know it"
    for row in state.retiring.values():
        assert row.row not in row.size_class.rows, "a class still owns a row taken from it"
        assert row.zeroing or row.mapped_by, "a row waits for nobody"
        serving = {tier.mover for tier in state.below.tiers if tier.is_serving}
        known = state.movers.keys() | serving
        assert row.mapped_by <= known, "a row waits for a mover that is gone"


def _slots_by_state(state: State, owner: SizeClass) -> dict[SlotState, Slots]:
    spans = sorted((row.span for row in owner.rows.values()), key=lambda span: span.start)
    slots = np.concatenate([NO_SLOTS, *(np.arange(span.start, span.stop) for span in spans)])
    states = state.slots.state[slots]
    return {wanted: slots[states == wanted] for wanted in SlotState}


def _check_slots(state: State, owner: SizeClass, by_state: dict[SlotState, Slots]) -> None:
    """I10: free + reserved + ready + quarantined = capacity, and the counts are true."""
    free, reserved = by_state[SlotState.FREE], by_state[SlotState.RESERVED]
    ready, quarantined = by_state[SlotState.READY], by_state[SlotState.QUARANTINED]
    assert owner.capacity == sum(row.slots for row in owner.rows.values()), "capacity is wrong"
    total = len(free) + len(reserved) + len(ready) + len(quarantined)
    assert total == owner.capacity, f"{total} slots have a state, {owner.capacity} exist"
    given_out = np.sort(owner.free.all())
    expected = _given_out(owner, free)
    assert np.array_equal(given_out, expected), "the free slots aren't those free"
    assert owner.reserved == len(reserved), "count of reserved slots"
    assert owner.ready == len(ready), "count of ready slots"
    assert owner.quarantined == len(quarantined), "count of quarantined slots"
    pins = state.slots.pins
    assert owner.evictable == int((pins[ready] == 0).sum()), "count of evictable slots"
    assert not pins[free].any(), "a free slot is pinned"
    assert bool((pins[quarantined] > 0).all()), "a quarantined slot waits for nobody"
    assert bool((pins[reserved] > 0).all()), "a reserved slot is copied by nobody"
    assert not state.slots.leases[free].any(), "a claim on a free slot"


def _given_out(owner: SizeClass, free: Slots) -> Slots:
    """Free slots without those of rows that the class loses."""
    for row in owner.emptying.values():
        free = free[(free < row.first_slot) | (free >= row.first_slot + row.slots)]
    return free


def _check_absent(state: State) -> None:
    exists = np.zeros(state.slots.size, dtype=np.bool_)
    for row in state.rows.values():
        assert not exists[row.span].any(), "two rows share a slot"
        exists[row.span] = True
    absent = state.slots.state == SlotState.ABSENT
    assert np.array_equal(exists, ~absent), "a slot exists without a row"
    assert not state.slots.pins[absent].any(), "a slot without a row is pinned"


def _check_policy(state: State, owner: SizeClass, by_state: dict[SlotState, Slots]) -> None:
    """I3: the policy orders what is READY, and what will be."""
    if state.recovered:
        return
    known = np.sort(owner.policy.coldest(owner.capacity + 1))
    held = [by_state[SlotState.READY], by_state[SlotState.RESERVED]]
    assert np.array_equal(known, np.sort(np.concatenate(held))), (
        "the policy knows other blocks than those ready and reserved"
    )


def _check_pins(state: State) -> None:
    """I5, I10: pins = leases + hand-offs + transfers, nothing else."""
    handed_off = np.zeros(state.slots.size, dtype=np.int32)
    for hand_off in state.hand_offs.values():
        for held in hand_off.held.values():
            handed_off[list(held)] += 1
    reserved = state.slots.state == SlotState.RESERVED
    assert np.array_equal(state.slots.leases[reserved], handed_off[reserved]), (
        "a lease on a block that is not readable"
    )
    leases = handed_off
    for ended in state.backlog.leases:
        leases[ended.slots] += 1
    for session in state.sessions.values():
        for lease in session.leases.values():
            leases[lease.slots] += 1
    assert np.array_equal(leases, state.slots.leases), "counts of claims"
    pins = leases
    for transfer in state.transfers.values():
        for part in transfer.piece.parts:
            pins[part.pinned] += 1
    for copy in state.below.copies.values():
        for part in copy.parts:
            pins[part.pinned] += 1
    for row in state.rows.values():
        pins[row.withheld] += 1
        pins[row.copied_into] += 1
        pins[row.left] += 1
    assert np.array_equal(pins, state.slots.pins), "pins are not claims + transfers"


def _check_hand_offs(state: State) -> None:
    """I5: each hand-off holds something that may be found, its deadline bounds it, and the table
    by slot says the same.
    """
    by_slot: dict[int, list[int]] = defaultdict(list)
    claims: Counter[str] = Counter()
    held_bytes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    assert set(state.hand_off_ends) == set(state.hand_offs.values()), "hand-offs by their ends"
    for (session, request), hand_off in state.hand_offs.items():
        assert (hand_off.session, hand_off.request) == (session, request), "a hand-off's name"
        assert hand_off.held, "a hand-off of nothing stays"
        count[state.namespaces[hand_off.namespace].tenant.tenant] += 1
        for group, held in hand_off.held.items():
            owner = state.classes[hand_off.namespace, group]
            states = state.slots.state[list(held)]
            assert held, "a hand-off of nothing in a group"
            assert bool(((states == SlotState.READY) | (states == SlotState.RESERVED)).all()), (
                "a hand-off of a block that nobody can find"
            )
            scopes = {state.scopes[ScopeId(n)] for n in state.slots.scopes[list(held)].tolist()}
            of = {(scope.namespace, scope.group) for scope in scopes}
            assert of == {(owner.namespace, owner.group)}, "a hand-off of another group's block"
            claims[owner.tenant.tenant] += len(held)
            for slot in held:
                held_bytes[owner.tenant.tenant] += 0 if by_slot[slot] else owner.block_bytes
                by_slot[slot].append(id(hand_off))
    known = {slot: sorted(map(id, holders)) for slot, holders in state.handed_off.items()}
    assert known == {slot: sorted(ids) for slot, ids in by_slot.items()}, "hand-offs by slot"
    for tenant in state.tenants.values():
        assert tenant.hand_offs == count[tenant.tenant] <= MAX_HAND_OFFS_PER_TENANT
        assert tenant.handed_off_bytes == held_bytes[tenant.tenant], "bytes that are handed off"
        assert tenant.hand_off_claims == claims[tenant.tenant] <= MAX_CLAIMS_PER_TENANT


def _check_index(state: State) -> None:
    """I3, I7: the index finds exactly the READY and RESERVED blocks, each in its own scope."""
    states = state.slots.state
    held = np.flatnonzero((states == SlotState.READY) | (states == SlotState.RESERVED))
    assert np.array_equal(np.sort(state.index.slots()), held), "index = READY + RESERVED"
    assert len(state.index) == len(held), "count of the index"
    for row in state.rows.values():
        owner = row.size_class
        inside = held[(held >= row.first_slot) & (held < row.first_slot + row.slots)]
        words = state.slots.keys(owner.width)[inside]
        scopes = state.slots.scopes[inside]
        for number in np.unique(scopes).tolist():
            scope = state.scopes[ScopeId(number)]
            assert (scope.namespace, scope.group) == (owner.namespace, owner.group), (
                "a block lies in another namespace's row"
            )
            mine = scopes == number
            tags = tags_of(words[mine], scope.seed)
            assert np.array_equal(tags, state.slots.tags[inside[mine]]), "a tag is wrong"
            found = state.index.find(tags, words[mine], number)
            assert NOWHERE not in found, "a block can't be found"
            assert np.array_equal(found, inside[mine]), "one key has two blocks"


def _check_tenants(state: State) -> None:
    """I8: the quota holds, and the accounts are true."""
    for tenant in state.tenants.values():
        owned = [c for c in state.classes.values() if c.tenant is tenant]
        assert set(tenant.evictable) == {c for c in owned if c.evictable}, "who could evict"
        used = sum((c.reserved + c.ready + c.quarantined) * c.block_bytes for c in owned)
        assert tenant.used_bytes == used, "a tenant's bytes in use"
        over = bool(tenant.quota_bytes) and used > tenant.quota_bytes
        asked = state.backlog.shrinks.get(tenant.tenant)
        wanted = asked is not None and (tenant.shrinking or asked.room_bytes > 0)
        assert asked is None or wanted, "a tenant within its quota is to shrink"
        assert not over or tenant.shrinking, f"{tenant.tenant} uses more than its quota"
        leased = 0
        for owner in owned:
            for row in owner.rows.values():
                leased += int((state.slots.leases[row.span] > 0).sum()) * owner.block_bytes
        assert tenant.leased_bytes == leased, "a tenant's bytes under leases"
        leases = chain(state.backlog.leases, *(s.leases.values() for s in state.sessions.values()))
        claims = sum(len(each.slots) for each in leases if each.size_class.tenant is tenant)
        assert tenant.leased_claims == claims, "a tenant's leased blocks"


def _check_tallies(state: State) -> None:
    """Sums that are kept are those of the counts, which `_check_slots` compares with the slots."""
    classes = list(state.classes.values())
    _check_tally(state.tally, classes)
    chosen = Counter(c.policy.live_name for c in classes if isinstance(c.policy, AutoPolicy))
    counted = {name: count for name, count in state.live_policies.items() if count}
    assert counted == chosen, "classes by what auto has chosen"
    for tenant in state.tenants.values():
        _check_tally(tenant.tally, [c for c in classes if c.tenant is tenant])
    for namespace in state.namespaces.values():
        _check_tally(namespace.tally, namespace.classes)


def _check_tally(tally: Tally, classes: Sequence[SizeClass]) -> None:
    for name in ("capacity", "reserved", "ready", "quarantined", "evictable"):
        counts = [getattr(c, name) for c in classes]
        assert getattr(tally, name) == sum(counts), "a sum over size classes"
        nbytes = sum(count * c.block_bytes for count, c in zip(counts, classes, strict=True))
        assert getattr(tally, f"{name}_bytes") == nbytes, "a sum over size classes"


def _pieces(state: State) -> list[Piece]:
    return list({id(t.piece): t.piece for t in state.transfers.values()}.values())


def _check_jobs(state: State) -> None:
    """I5, I11: each transfer belongs to a live job, each live job has something to wait for."""
    running: Counter[int] = Counter()
    called_off = state.backlog.transfers
    ending = {t.transfer for each in called_off if each.how is CallOff.END for t in each.transfers}
    assert all(each.transfers for each in called_off), "nothing is to be called off"
    for due in (state.in_time, state.late):
        assert due.keys() <= state.transfers.keys(), "a deadline of a transfer that has ended"
        submitted = [transfer.submitted_ns for transfer in due.values()]
        assert submitted == sorted(submitted), "a deadline before an earlier one"
    assert not state.in_time.keys() & state.late.keys(), "a transfer with two deadlines"
    for number, transfer in state.transfers.items():
        assert transfer.piece.transfers.get(number) is transfer, "a transfer without its piece"
        mover = state.movers.get(transfer.mover)
        if mover is None:
            assert number in ending, "a transfer of a mover that is gone"
            continue
        assert mover.transfers.get(number) is transfer, "a mover that doesn't know its transfer"
    for piece in _pieces(state):
        for share in piece.shares:
            running[id(share.job)] += 1
            live = state.sessions[piece.session].jobs.get(share.job.job)
            assert live is share.job, "a transfer of a job that has ended"
            assert (share.job.session, share.job.kind) == (piece.session, piece.kind)
        if len(piece.shares) > 1:
            assert piece.kind is JobKind.STORE, "jobs that share a load"
            shared = sum(len(part.slots) for part in piece.parts)
            assert sum(share.blocks for share in piece.shares) == shared, "shares of a piece"
        if piece.kind is JobKind.STORE and not piece.failed:
            for part in piece.parts:
                assert bool((state.slots.state[part.slots] == SlotState.RESERVED).all()), (
                    "a store copies into a slot that is not reserved"
                )
    for session in state.sessions.values():
        for job in session.jobs.values():
            assert job.pieces == running[id(job)], "count of a job's pieces"
            assert job.is_open or job.pieces or job.followed, "a job waits for nothing"


def _check_backlog(state: State) -> None:
    """I10: ended leases are counted, and whoever had them is known."""
    leases = state.backlog.leases
    of_sessions = Counter(each.session for each in leases)
    of_namespaces = Counter(each.size_class.namespace for each in leases)
    assert of_sessions.keys() <= state.sessions.keys(), "an ended lease of nobody"
    for session in state.sessions.values():
        assert session.ended_leases == of_sessions[session.session], "a session's ended leases"
    for namespace in state.namespaces.values():
        ended = of_namespaces[namespace.namespace]
        assert namespace.ended_leases == ended, "a namespace's ended leases"


def _check_waits(state: State) -> None:
    """Who waits for a piece waits for what it stores; the others are about to go on."""
    stores: dict[int, Filling] = {
        piece.number: piece for piece in _pieces(state) if piece.kind is JobKind.STORE
    }
    stores |= {c.number: c for c in state.below.copies.values() if c.kind is CopyKind.READ}
    assert stores == state.fillings, "fillings by number"
    followed: Counter[int] = Counter()
    waiting: Counter[str] = Counter()
    known: list[Wait] = list(state.released)
    for piece in stores.values():
        known += piece.waits
        assert not (piece.failed and piece.waits), "a wait for a piece that failed"
    for session in state.sessions.values():
        for wait in session.waits:
            followed[id(wait.job)] += len(wait.offer.slots)
            assert wait.job.session == session.session, "a wait of another session's job"
            if wait.leader is not None:
                assert wait in wait.leader.waits, "a leader that doesn't know who waits"
                own = isinstance(wait.leader, Piece) and wait.leader.has(wait.job)
                assert not own, "a job waits for itself"
                slots = wait.offer.slots
                assert bool((state.slots.state[slots] == SlotState.RESERVED).all())
                assert bool((state.slots.fillings[slots] == wait.leader.number).all())
        mine = sum(wait.nbytes for wait in session.waits)
        assert session.waiting_bytes == mine <= MAX_WAITING_BYTES, "bytes that wait"
        waiting[state.namespaces[session.namespace].tenant.tenant] += mine
        for job in session.jobs.values():
            assert job.followed == followed.pop(id(job), 0), "count of followed keys"
    assert not followed, "a job that has ended waits"
    all_waits = {wait for session in state.sessions.values() for wait in session.waits}
    assert set(known) == all_waits, "a wait that nobody will carry on with"
    assert len(known) == len(all_waits), "a wait stands twice"
    for tenant in state.tenants.values():
        assert tenant.waiting_bytes == waiting[tenant.tenant] <= MAX_TENANT_WAITING_BYTES


def _check_paces(state: State, tier: Tier) -> None:
    reads: dict[str, list[int]] = {}
    for number, copy in tier.copies.items():
        if copy.kind is CopyKind.READ:
            reads.setdefault(copy.parts[0].size_class.tenant.tenant, []).append(number)
    timed = {tenant: list(pace.reads) for tenant, pace in tier.paces.items() if pace.reads}
    assert timed == reads, "copies whose time is taken"
    assert tier.paces.keys() <= state.tenants.keys(), "a tenant that is known"


def _check_tiers(state: State) -> None:
    """I10: shares are of running copies; what is sought is counted and found by its tag."""
    below = state.below
    running: dict[int, Counter[str]] = {tier.tier: Counter() for tier in below.tiers}
    promoting: Counter[str] = Counter()
    lost = set(map(id, below.lost))
    for number, copy in below.copies.items():
        assert copy.copy == number
        (part,) = copy.parts
        known = copy.tier.copies.get(number) is copy
        assert known is not (id(copy) in lost), "a copy stands nowhere, or twice"
        tenant = part.size_class.tenant.tenant
        cleared = part.scope < state.namespaces[part.size_class.namespace].cleared_below
        assert cleared or part.scope in state.scopes, "the scope of a running copy is forgotten"
        if copy.kind is CopyKind.WRITE:
            running[copy.tier.tier][tenant] += copy.nbytes
        else:
            assert copy.failed or copy in below.reading, "a read is neither awaited nor given up"
            if copy in below.reading:
                promoting[tenant] += copy.nbytes
            expected = SlotState.QUARANTINED if copy.failed else SlotState.RESERVED
            assert bool((state.slots.state[part.slots] == expected).all()), "what is brought up"
    # The last one may be larger than what was left.
    largest = max((owner.block_bytes for owner in state.classes.values()), default=1)
    for tier in below.tiers:
        assert tier.writing.taken == running[tier.tier], "bytes on their way down"
        assert tier.writing.whole == sum(running[tier.tier].values())
        assert tier.writing.whole < tier.terms.max_write_bytes + largest
        waiting: Counter[str] = Counter()
        for owner, slots, _ in tier.behind:
            waiting[owner.tenant.tenant] += len(slots)
        assert tier.behind_blocks.taken == waiting, "blocks that wait to be written"
        assert tier.behind_blocks.whole == sum(waiting.values()) <= MAX_BEHIND_BLOCKS
        assert tier.is_serving or not (tier.copies or tier.searches), "a tier without a process"
        _check_paces(state, tier)
    assert below.promoting.taken == promoting, "bytes on their way up"
    assert below.promoting.whole == sum(promoting.values())
    assert below.promoting.whole < state.pool_bytes * state.config.promotion_share + largest
    blocks: Counter[str] = Counter()
    for session in state.sessions.values():
        mine = 0
        for request, of_request in session.sought.items():
            assert of_request, "a request that seeks nothing is remembered"
            for (account, group), sought in of_request.items():
                assert (sought.request, sought.name.account, sought.name.group) == (
                    request,
                    account,
                    group,
                )
                assert not sought.is_over
                mine += len(sought.blocks) + len(sought.searches) * SEARCH_BLOCKS
                for tag, (search, row) in sought.blocks.items():
                    assert int(tags_of(search.words[row : row + 1], sought.seed)[0]) == tag
        assert session.is_open or not mine, "a closed session seeks blocks"
        assert session.sought_blocks == mine, "what is sought"
        blocks[state.namespaces[session.namespace].tenant.tenant] += mine
    assert below.sought_of == {tenant: n for tenant, n in blocks.items() if n}


def _check_busy_blocks(state: State) -> None:
    """Engine blocks marked as in flight are those of running stores and of waits."""
    busy: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for piece in _pieces(state):
        if piece.kind is JobKind.STORE:
            for part in piece.parts:
                blocks = part.engine_blocks[part.engine_blocks != NULL_ENGINE_BLOCK]
                busy[piece.session, part.size_class.group].update(blocks.tolist())
    for session in state.sessions.values():
        for wait in session.waits:
            blocks = wait.offer.engine_blocks
            blocks = blocks[blocks != NULL_ENGINE_BLOCK]
            busy[session.session, wait.offer.size_class.group].update(blocks.tolist())
    for session in state.sessions.values():
        for group, counts in session.busy.items():
            marked = {int(b): int(counts[b]) for b in np.flatnonzero(counts)}
            expected = dict(busy.pop((session.session, group), {}))
            assert marked == expected, "engine blocks in flight"
    assert not any(busy.values()), "engine blocks in flight are not marked"


def _check_sessions(state: State) -> None:
    for mover in state.movers.values():
        session = state.sessions[mover.session]
        assert session.movers.get(mover.rank) is mover, "a rank's mover is another"
    for number in state.backlog.lingering:
        assert state.sessions[number].is_winding_up, "a session that lingers is not closed"
    for session in state.sessions.values():
        waits = session.jobs or session.movers or session.ended_leases
        assert session.is_open or session.is_winding_up, "a forgotten session is known"
        assert session.is_open or waits, "a closed session stays"
        assert session.is_open or not session.leases, "a closed session holds leases"
        idle = session.is_winding_up and not session.jobs
        lingering = [m for m in session.movers.values() if idle and m.is_serving]
        assert not lingering, "a mover of a session that is over was not told to end"
        for request, leases in session.by_request.items():
            assert leases, "a request is listed without leases"
            assert all(session.leases[n].request == request for n in leases), "a lease's request"
        used = [used for each in session.prefixes.values() for used in each.used.values()]
        remembered = sum(len(each.slots) for each in used)
        assert session.remembered.blocks == remembered, "blocks remembered of requests"
        assert sum(map(len, session.by_request.values())) == len(session.leases), "leases"


def _check_scopes(state: State) -> None:
    """I7: a name is that of one scope, in force or cleared; of the latter nothing is found."""
    live: dict[int, dict[str, set[ScopeId]]] = defaultdict(dict)
    cleared: dict[int, set[ScopeId]] = defaultdict(set)
    for number, scope in state.scopes.items():
        name = (scope.namespace, scope.epoch, scope.account, scope.group)
        if number < state.namespaces[scope.namespace].cleared_below:
            cleared[scope.namespace].add(number)
            assert state.scope_ids.get(name, number) >= number, "a name of an older scope"
        else:
            live[scope.namespace].setdefault(scope.epoch, set()).add(number)
            assert state.scope_ids[name] == number, "a scope is filed under another name"
    assert set(state.scope_ids.values()) <= state.scopes.keys(), "a scope that is forgotten"
    for of, namespace in state.namespaces.items():
        assert namespace.scopes == live.pop(of, {}), "a namespace's scopes"
        clear = state.backlog.clears.get(of)
        left = [] if clear is None else [number for some in clear.scopes for number in some]
        assert len(left) == len(set(left)), "a scope is to be forgotten twice"
        assert set(left) == cleared.pop(of, set()), "cleared scopes"
        doomed = 0
        for owner in namespace.classes:
            for row in owner.rows.values():
                ready = state.slots.state[row.span] == SlotState.READY
                before = state.slots.scopes[row.span] < namespace.cleared_below
                doomed += int(np.count_nonzero(ready & before))
        assert namespace.doomed == doomed, "blocks that were cleared"
    assert not live, "scopes of a namespace that is forgotten"
    assert not cleared, "cleared scopes of a namespace that is forgotten"
    assert state.backlog.clears.keys() <= state.namespaces.keys(), "a clear of what is forgotten"


def _check_disuse(state: State) -> None:
    """I10: every namespace and every own epoch has a session, or is on its way out in time."""
    expiring = state.expiring
    used = {session.namespace for session in state.sessions.values()}
    assert expiring.namespaces.keys() == state.namespaces.keys() - used, "unused namespaces"
    assert expiring.ending.keys() <= expiring.namespaces.keys(), "a namespace in use is taken apart"
    _check_scopes(state)
    epochs = {(session.namespace, session.epoch) for session in state.sessions.values()}
    own = set()
    for number, namespace in state.namespaces.items():
        assert state.by_fingerprint[namespace.spec.fingerprint] is namespace, "a fingerprint"
        assert all(state.classes[number, c.group] is c for c in namespace.classes), "a size class"
        own |= {(number, epoch) for epoch in namespace.own_epochs}
    assert len(state.by_fingerprint) == len(state.namespaces), "a forgotten fingerprint"
    assert sum(len(n.classes) for n in state.namespaces.values()) == len(state.classes)
    assert expiring.epochs.keys() == own - epochs, "own epochs that nobody is in"
    pieces = {transfer.piece for transfer in state.transfers.values()}
    parts = [part for piece in pieces for part in piece.parts]
    parts += [part for copy in state.below.copies.values() for part in copy.parts]
    in_flight = Counter(scope for part in parts for scope in part.scopes)
    for part in (part for piece in pieces if not piece.failed for part in piece.parts):
        theirs = np.unique(state.slots.scopes[part.slots]).tolist()
        assert theirs == sorted(part.scopes), "a copy of blocks of other scopes"
    in_flight.update(wait.scope for s in state.sessions.values() for wait in s.waits)
    assert state.in_flight == in_flight, "scopes in flight"
    for claim in state.claims:
        known = state.classes.get(claim.owner.name) is claim.owner
        assert known, "a row is claimed for a namespace that is forgotten"
