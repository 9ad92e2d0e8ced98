"""Each kind of damage to the machine's state is named, and a whole machine is found whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvd.core import events as ev
from kvd.core.keys import RowId, SessionId, TenantId
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


DAMAGE: dict[Callable[[State], None], str] = {
    pool_tally: "accounts",
    tenant_tally: "accounts",
    tenant_bytes: "accounts",
    quota: "quota",
    class_ready: "accounts",
    class_evictable: "accounts",
    free_list: "accounts",
    free_twice: "accounts",
    ready_and_nobody_knows: "accounts",
    no_such_state: "slots",
    absent: "slots",
    leaked_pin: "accounts",
    leaked_pin_that_is_counted: "pins",
    lost_pin: "pins",
    pinned_free_slot: "pins",
    unpinned_copy: "pins",
    leaked_lease: "pins",
    wrong_tag: "index",
    wrong_key: "index",
    wrong_scope: "scopes",
    scope_of_a_neighbour: "scopes",
    out_of_the_index: "index",
    extent_twice: "extents",
    extent_lost: "extents",
    row_of_another_number: "rows",
    row_unknown_to_its_class: "rows",
    fingerprint: "namespaces",
    mover_of_nobody: "sessions",
    copy_of_nobody: "sessions",
    lease_of_nobody: "sessions",
    session_that_stays: "sessions",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_to_the_state_is_named(machine: Machine, damage: Callable[[State], None]) -> None:
    damage(machine.state)
    found = verified(machine)
    assert DAMAGE[damage] in {each.invariant for each in found}, found
    assert all(each.place and each.problem for each in found)


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
