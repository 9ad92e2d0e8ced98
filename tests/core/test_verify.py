"""Each kind of damage to the machine's state is named, and a whole machine is found whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvd.core import events as ev
from kvd.core.keys import NamespaceId, RowId, SessionId, TenantId
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.slots import SlotState
from kvd.core.model.state import SessionState, State
from kvd.core.upkeep import verify
from tests.core.bench import BLOCK, EXTENT, SECRET, Bench, spec
from tests.core.invariants import verified


@pytest.fixture
def machine() -> Machine:
    """Six readable blocks, two of them leased, and a store and a load under way."""
    bench = Bench(MachineConfig(8, EXTENT, tag_secret=SECRET, spare_bytes=0))
    bench.open(1)
    bench.open(2, spec("other", "neighbour", block_bytes=2 * BLOCK))
    bench.finish(bench.store([1, 2, 3, 4, 5, 6]))
    bench.finish(bench.store([1, 2], session=2))
    bench.lookup([1, 2], lease=ev.LeaseMode.PREFIX)
    bench.store([7, 8, 9])
    bench.load([3, 4])
    assert verified(bench.machine) == []
    return bench.machine


def slots_in(state: State, wanted: SlotState) -> list[int]:
    found: list[int] = np.flatnonzero(state.slots.state == wanted).tolist()
    return found


def pool_tally(state: State) -> None:
    state.tally.ready += 1


def tenant_tally(state: State) -> None:
    state.tenants[TenantId("tenant")].tally.capacity_bytes -= BLOCK


def tenant_bytes(state: State) -> None:
    state.tenants[TenantId("tenant")].used_bytes += BLOCK


def quota(state: State) -> None:
    state.tenants[TenantId("tenant")].quota_bytes = BLOCK


def class_ready(state: State) -> None:
    next(iter(state.classes.values())).ready -= 1


def class_evictable(state: State) -> None:
    next(iter(state.classes.values())).evictable += 1


def free_list(state: State) -> None:
    next(iter(state.classes.values())).free.take(1)


def free_twice(state: State) -> None:
    free = next(iter(state.classes.values())).free
    free.put(free.all()[:1])


def ready_and_nobody_knows(state: State) -> None:
    state.slots.state[slots_in(state, SlotState.FREE)[0]] = SlotState.READY


def no_such_state(state: State) -> None:
    state.slots.state[slots_in(state, SlotState.FREE)[0]] = 77


def absent(state: State) -> None:
    state.slots.state[slots_in(state, SlotState.FREE)[0]] = SlotState.ABSENT


def leaked_pin(state: State) -> None:
    state.slots.pins[slots_in(state, SlotState.READY)[5]] += 1


def leaked_pin_that_is_counted(state: State) -> None:
    leaked_pin(state)
    next(iter(state.classes.values())).count(evictable=-1)


def lost_pin(state: State) -> None:
    state.slots.pins[slots_in(state, SlotState.READY)[0]] -= 1


def pinned_free_slot(state: State) -> None:
    state.slots.pins[slots_in(state, SlotState.FREE)[0]] = 1


def unpinned_copy(state: State) -> None:
    state.slots.pins[slots_in(state, SlotState.RESERVED)[0]] = 0


def leaked_lease(state: State) -> None:
    state.slots.leases[slots_in(state, SlotState.READY)[5]] += 1


def wrong_tag(state: State) -> None:
    state.slots.tags[slots_in(state, SlotState.READY)[0]] ^= np.uint64(1 << 9)


def wrong_key(state: State) -> None:
    state.slots.keys(4)[slots_in(state, SlotState.READY)[0], 0] ^= np.uint64(4)


def wrong_scope(state: State) -> None:
    state.slots.scopes[slots_in(state, SlotState.READY)[0]] = 999


def scope_of_a_neighbour(state: State) -> None:
    ready = slots_in(state, SlotState.READY)
    state.slots.scopes[ready[0]] = state.slots.scopes[ready[-1]]


def out_of_the_index(state: State) -> None:
    state.index.remove(np.array(slots_in(state, SlotState.READY)[:1]))


def extent_twice(state: State) -> None:
    state.free_extents.put(next(iter(state.rows)))


def extent_lost(state: State) -> None:
    state.free_extents.take()


def row_of_another_number(state: State) -> None:
    number, row = next(iter(state.rows.items()))
    row.row = RowId(number + 1)


def row_unknown_to_its_class(state: State) -> None:
    row = next(iter(state.rows.values()))
    del row.size_class.rows[row.row]


def fingerprint(state: State) -> None:
    state.by_fingerprint.clear()


def mover_of_nobody(state: State) -> None:
    next(iter(state.movers.values())).rank = 5


def copy_of_nobody(state: State) -> None:
    next(iter(state.transfers.values())).piece.transfers.clear()


def lease_of_nobody(state: State) -> None:
    next(iter(state.sessions.values())).by_request.clear()


def session_that_stays(state: State) -> None:
    session = state.sessions[SessionId(2)]
    session.state = SessionState.CLOSED
    session.movers.clear()


def session_that_holds_leases(state: State) -> None:
    state.sessions[SessionId(1)].state = SessionState.CLOSED


def session_of_no_namespace(state: State) -> None:
    state.sessions[SessionId(2)].namespace = NamespaceId(9)


def class_of_another_name(state: State) -> None:
    state.classes.clear()


def row_of_a_class_of_another_name(state: State) -> None:
    owner = next(iter(state.rows.values())).size_class
    state.classes[owner.name] = state.classes[NamespaceId(2), 0]


def extent_of_no_pool(state: State) -> None:
    row = next(iter(state.rows.values()))
    row.extents = (*row.extents, 9)


def class_capacity(state: State) -> None:
    next(iter(state.classes.values())).capacity += 1


def class_reserved(state: State) -> None:
    next(iter(state.classes.values())).reserved += 1


def class_quarantined(state: State) -> None:
    next(iter(state.classes.values())).quarantined += 1


def pool_reserved(state: State) -> None:
    state.tally.reserved += 1


def pool_quarantined(state: State) -> None:
    state.tally.quarantined += 1


ROW, GROUP = "row 0 (namespace 1, group 0)", "namespace 1, group 0"
DAMAGE: dict[Callable[[State], None], list[tuple[str, str, str]]] = {
    pool_tally: [
        ("accounts", "the pool's sums", "ready is said to be 9, its parts come to 8"),
        ("index", "the index", "11 blocks are in it, of 12 that are ready or reserved"),
        ("pins", "all slots", "5 ready slots are pinned, and something holds 4"),
    ],
    tenant_tally: [
        (
            "accounts",
            "the pool's sums",
            "capacity_bytes is said to be 131072, its parts come to 126976",
        ),
        (
            "accounts",
            "tenant 'tenant'",
            "capacity_bytes is said to be 61440, its parts come to 65536",
        ),
    ],
    tenant_bytes: [
        ("accounts", "tenant 'tenant'", "40960 bytes are said to be in use, 36864 are"),
    ],
    quota: [
        ("quota", "tenant 'tenant'", "36864 bytes are in use, with a quota of 4096"),
    ],
    class_ready: [
        ("accounts", "namespace 1", "ready is said to be 6, its parts come to 5"),
        ("accounts", "namespace 1", "ready_bytes is said to be 24576, its parts come to 20480"),
        ("accounts", GROUP, "ready slots are said to be 5, and are 6"),
    ],
    class_evictable: [
        ("accounts", "namespace 1", "evictable is said to be 2, its parts come to 3"),
        ("accounts", "namespace 1", "evictable_bytes is said to be 8192, its parts come to 12288"),
        ("accounts", GROUP, "evictable slots are said to be 3, and are 2"),
    ],
    free_list: [
        ("accounts", GROUP, "slots 9 are free, or on the list of free ones, but not both"),
    ],
    free_twice: [
        ("accounts", GROUP, "a slot is twice on the list of free ones"),
    ],
    ready_and_nobody_knows: [
        ("accounts", GROUP, "ready slots are said to be 6, and are 7"),
        ("accounts", GROUP, "evictable slots are said to be 2, and are 3"),
        ("accounts", GROUP, "slots 9 are free, or on the list of free ones, but not both"),
        ("scopes", ROW, "slots 9 have blocks of scopes that are not of this row"),
    ],
    no_such_state: [
        ("accounts", GROUP, "slots 9 are free, or on the list of free ones, but not both"),
        ("slots", ROW, "slots 9 are in a state that there is not"),
    ],
    absent: [
        ("accounts", GROUP, "slots 9 are free, or on the list of free ones, but not both"),
        ("slots", ROW, "slots 9 have no state, in a row that is granted"),
    ],
    leaked_pin: [
        ("accounts", GROUP, "evictable slots are said to be 2, and are 1"),
    ],
    leaked_pin_that_is_counted: [
        ("pins", "all slots", "5 ready slots are pinned, and something holds 4"),
    ],
    lost_pin: [
        ("pins", "slots 0", "the pins that they are said to have are not those that hold them"),
        ("accounts", GROUP, "evictable slots are said to be 2, and are 3"),
        ("pins", ROW, "slots 0 have more claims than pins"),
    ],
    pinned_free_slot: [
        ("pins", ROW, "slots 9 are free and pinned"),
    ],
    unpinned_copy: [
        ("pins", "slots 6", "the pins that they are said to have are not those that hold them"),
        ("pins", ROW, "slots 6 are reserved or quarantined for nobody"),
    ],
    leaked_lease: [
        ("pins", ROW, "slots 5 have more claims than pins"),
    ],
    wrong_tag: [
        ("index", ROW, "slots 0 have other tags than their keys make"),
    ],
    wrong_key: [
        ("index", ROW, "slots 0 have other tags than their keys make"),
    ],
    wrong_scope: [
        ("scopes", ROW, "slots 0 have blocks of scopes that are not of this row"),
    ],
    scope_of_a_neighbour: [
        ("scopes", ROW, "slots 0 have blocks of scopes that are not of this row"),
    ],
    out_of_the_index: [
        ("index", "the index", "10 blocks are in it, of 11 that are ready or reserved"),
        ("index", ROW, "slots 0 are not found by their keys"),
    ],
    extent_twice: [
        ("extents", "extents 0", "they belong to several, or are free as well"),
    ],
    extent_lost: [
        ("extents", "extents 2", "they belong to nobody, and are not free"),
    ],
    row_of_another_number: [
        ("rows", "row 1 (namespace 1, group 0)", "it is filed under another number"),
        ("rows", "row 1 (namespace 1, group 0)", "its group doesn't know it"),
    ],
    row_unknown_to_its_class: [
        ("accounts", GROUP, "capacity slots are said to be 16, and are 0"),
        ("accounts", GROUP, "reserved slots are said to be 3, and are 0"),
        ("accounts", GROUP, "ready slots are said to be 6, and are 0"),
        ("accounts", GROUP, "evictable slots are said to be 2, and are 0"),
        (
            "accounts",
            GROUP,
            "slots 9, 10, 11, 12, 13, 14, 15 are free, or on the list of free ones, but not both",
        ),
        ("rows", ROW, "its group doesn't know it"),
    ],
    fingerprint: [
        ("namespaces", "namespace 1", "its fingerprint is another's"),
        ("namespaces", "namespace 2", "its fingerprint is another's"),
    ],
    mover_of_nobody: [
        ("sessions", "mover 100", "session 1 doesn't know it as its rank 5"),
    ],
    copy_of_nobody: [
        ("sessions", "copy 3", "its job doesn't know it"),
    ],
    lease_of_nobody: [
        ("sessions", "session 1", "its requests hold 0 leases, of 1"),
    ],
    session_that_stays: [
        ("sessions", "mover 200", "session 2 doesn't know it as its rank 0"),
        ("sessions", "session 2", "it is over, and is not forgotten"),
    ],
    session_that_holds_leases: [
        ("sessions", "session 1", "it is over, and holds leases"),
    ],
    session_of_no_namespace: [
        ("sessions", "session 2", "its namespace 9 is not known"),
    ],
    class_of_another_name: [
        ("namespaces", "namespace 1", "a group of it is not filed under its name"),
        ("namespaces", "namespace 2", "a group of it is not filed under its name"),
        ("rows", ROW, "it is of a group that is not known"),
        ("rows", "row 1 (namespace 2, group 0)", "it is of a group that is not known"),
    ],
    row_of_a_class_of_another_name: [
        ("namespaces", "namespace 1", "a group of it is not filed under its name"),
        ("rows", ROW, "it is of a group that is not known"),
    ],
    extent_of_no_pool: [
        ("extents", "extents 9", "the pool has none of these numbers"),
    ],
    class_capacity: [
        ("accounts", "namespace 1", "capacity is said to be 16, its parts come to 17"),
        ("accounts", "namespace 1", "capacity_bytes is said to be 65536, its parts come to 69632"),
        ("accounts", GROUP, "capacity slots are said to be 17, and are 16"),
    ],
    class_reserved: [
        ("accounts", "namespace 1", "reserved is said to be 3, its parts come to 4"),
        ("accounts", "namespace 1", "reserved_bytes is said to be 12288, its parts come to 16384"),
        ("accounts", GROUP, "reserved slots are said to be 4, and are 3"),
    ],
    class_quarantined: [
        ("accounts", "namespace 1", "quarantined is said to be 0, its parts come to 1"),
        ("accounts", "namespace 1", "quarantined_bytes is said to be 0, its parts come to 4096"),
        ("accounts", GROUP, "quarantined slots are said to be 1, and are 0"),
    ],
    pool_reserved: [
        ("accounts", "the pool's sums", "reserved is said to be 4, its parts come to 3"),
        ("index", "the index", "11 blocks are in it, of 12 that are ready or reserved"),
        ("pins", "all slots", "4 reserved slots are pinned, and something holds 3"),
    ],
    pool_quarantined: [
        ("accounts", "the pool's sums", "quarantined is said to be 1, its parts come to 0"),
        ("pins", "all slots", "1 quarantined slots are pinned, and something holds 0"),
    ],
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_to_the_state_is_named_with_its_place_and_figures(
    machine: Machine, damage: Callable[[State], None]
) -> None:
    damage(machine.state)
    assert [tuple(found) for found in verified(machine)] == DAMAGE[damage]


def test_a_group_of_many_rows_is_counted_in_pieces_while_nothing_changes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "ROWS_COUNTED_AT_ONCE", 1)
    state = machine.state
    owner = next(iter(state.classes.values()))
    owner.rows[RowId(7)] = next(iter(owner.rows.values()))  # two, so two pieces
    pieces = list(verify.class_counts(state, owner))
    assert pieces[:-1] == [None, None]
    assert any("capacity slots are said to be" in each.problem for each in pieces[-1] or ())
    counting = verify.class_counts(state, owner)
    assert next(counting) is None
    state.story.changed("a slot", np.array([1]))
    assert list(counting) == [], "counts that changed meanwhile were compared"


def test_what_is_too_much_for_one_look_is_not_compared(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLAIMS_LOOKED_AT", "CLAIMED_BLOCKS_LOOKED_AT"):
        with monkeypatch.context() as patched:
            patched.setattr(verify, name, 1)
            assert verify.pins(machine.state) is None
    monkeypatch.setattr(verify, "EXTENTS_LOOKED_AT", 7)
    assert verify.extents_held(machine.state) is None
    monkeypatch.setattr(verify, "EXTENTS_LOOKED_AT", 8)
    assert verify.extents_held(machine.state) == []


def test_free_slots_of_a_large_group_are_not_compared(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_list(machine.state)
    owner = next(iter(machine.state.classes.values()))
    monkeypatch.setattr(verify, "FREE_SLOTS_LOOKED_AT", owner.capacity - 1)
    assert verified(machine) == []
    monkeypatch.setattr(verify, "FREE_SLOTS_LOOKED_AT", owner.capacity)
    assert verified(machine) != []


def test_a_finding_names_a_few_slots_and_counts_the_others() -> None:
    assert verify.named(np.arange(3)) == "0, 1, 2"
    assert verify.named(np.arange(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
