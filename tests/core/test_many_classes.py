"""What an event costs doesn't grow with the number of classes, namespaces or sessions."""

from __future__ import annotations

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import row_grants
from kvd.core.blocks.row_grants import MAX_SPARE_ROWS_AT_ONCE
from kvd.core.keys import SessionId
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import State
from kvd.core.room import eviction
from kvd.core.upkeep import operator
from tests.core.bench import BLOCK, SECOND, Bench, only, small, spec, verdict


def roomy(groups: int, **options: object) -> Bench:
    """A pool in which every group may have a row ahead of need."""
    return small(extents=16 * groups, spare_bytes=16 * BLOCK, **options)


def test_one_event_grants_few_rows_ahead_of_need_and_ticks_grant_the_others() -> None:
    bench = roomy(groups=64)
    opened = bench.feed(ev.SessionOpened(SessionId(1), spec(groups=64), "", 1))
    granted = [len(only(opened, act.GrantRow))]
    while granted[-1]:
        granted.append(len(only(bench.feed(ev.TimerTicked()), act.GrantRow)))
    assert max(granted) == MAX_SPARE_ROWS_AT_ONCE
    assert sum(granted) == 64


def test_ticks_look_at_some_classes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "CLASSES_A_TICK", 5)
    bench = roomy(groups=12)
    bench.open(namespace=spec(groups=12))
    looked_at: list[int] = []
    spare_slots = row_grants._spare_slots

    def counted(state: State, owner: SizeClass) -> int:
        looked_at.append(owner.group)
        return spare_slots(state, owner)

    monkeypatch.setattr(row_grants, "_spare_slots", counted)
    for _ in range(3):
        bench.feed(ev.TimerTicked())
    assert looked_at == list(range(12))


def test_room_is_known_without_asking_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = small(extents=2)
    for number in range(1, 5):
        bench.open(number, spec(f"ns {number}"))
    bench.stored(range(32))
    asked: list[SizeClass] = []
    storable = eviction._storable

    def counted(state: State, owner: SizeClass) -> int:
        asked.append(owner)
        state.classes.clear()
        return storable(state, owner)

    known = dict(bench.machine.state.classes)
    monkeypatch.setattr(eviction, "_storable", counted)
    assert bench.machine.room(bench.machine.namespaces()[3]) == (1,)
    bench.machine.state.classes.update(known)
    assert len(asked) == 1


def test_one_event_weighs_some_classes_for_a_quota_and_the_next_ones_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eviction, "CLASSES_WEIGHED", 2)
    bench = small(extents=8)
    for number, blocks in enumerate((4, 3, 2, 0), start=1):
        bench.open(number, spec(f"ns {number}"))
        bench.now_ns += SECOND
        if blocks:
            bench.stored(range(blocks), number)
    bench.quota(9 * BLOCK)
    assert verdict(bench.store(range(8), 4)).reason == "QUOTA"
    assert bench.machine.statistics().slots.ready == 9
    bench.work_off()
    bench.stored(range(8), 4)
    assert bench.machine.statistics().slots.ready == 9
