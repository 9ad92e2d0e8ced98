"""What is told of a broken invariant: the last events of its slots and its job."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvd.core import events as ev
from kvd.core.blocks import slot_lifecycle
from kvd.core.keys import Slots
from kvd.core.model import story
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.slots import SlotState
from kvd.core.model.story import BrokenSlots, Story
from kvd.core.model.turn import Turn
from tests.core.bench import small


def some(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_story_of_a_slot_names_each_event_that_changed_it_and_no_other() -> None:
    told = Story()
    told.begin(1, "First", None)
    told.changed("came", some(1, 2))
    told.begin(2, "Second", None)
    told.changed("went", some(3))
    told.begin(3, "Third", None)
    told.changed("left", some(2))
    told.begin(4, "Fourth", None)
    assert told.tell(some(2)) == ["1 First: came [2]", "3 Third: left [2]"]


def test_story_of_a_job_has_its_events_also_where_other_slots_are_in_doubt() -> None:
    told = Story()
    told.begin(1, "Stored", (1, 7))  # type: ignore[arg-type]
    told.changed("came", some(1))
    told.begin(2, "Stored", (1, 8))  # type: ignore[arg-type]
    told.changed("came", some(2))
    told.begin(3, "Finished", (1, 7))  # type: ignore[arg-type]
    assert told.tell(some(5)) == [
        "1 Stored of session 1, job 7: none of these slots",
        "3 Finished of session 1, job 7: none of these slots",
    ]


def test_only_the_last_events_slots_and_lines_are_kept() -> None:
    told = Story()
    for number in range(story.MAX_NOTES + 10):
        told.begin(number, "Event", None)
        told.changed("came", some(1))
    assert len(told._notes) == story.MAX_NOTES
    assert told._notes[0].now_ns == 10
    assert len(told.tell(some(1))) == story.MAX_LINES
    many = np.arange(story.MAX_SLOTS_NOTED + 1)
    for number in range(story.MAX_NOTES):
        told.begin(number, "Event", None)
        for _ in range(3):
            told.changed("came", many)
    held = sum(len(slots) for note in told._notes for _, slots in note.changes)
    assert story.MAX_NOTED // 2 < held <= story.MAX_NOTED
    assert told.tell(some(story.MAX_SLOTS_NOTED)) == []


def test_event_that_changes_more_than_is_kept_leaves_room_for_the_next() -> None:
    told = Story()
    told.begin(1, "Large", None)
    for _ in range(2 * story.MAX_NOTED // story.MAX_SLOTS_NOTED):
        told.changed("came", np.arange(story.MAX_SLOTS_NOTED))
    assert told._noted <= story.MAX_NOTED
    told.begin(2, "Small", None)
    told.changed("came", some(1))
    assert told.tell(some(1))[-1] == "2 Small: came [1]"


def test_what_a_note_holds_does_not_change_with_the_callers_array() -> None:
    told = Story()
    told.begin(1, "Event", None)
    slots = some(4)
    told.changed("came", slots)
    slots[0] = 5
    assert told.tell(some(4)) == ["1 Event: came [4]"]


def test_machine_tells_how_the_slots_came_to_where_they_are() -> None:
    bench = small()
    bench.open()
    bench.stored([1, 2])
    state = bench.machine.state
    ready = np.flatnonzero(state.slots.state == SlotState.READY)
    with pytest.raises(BrokenSlots, match="a pin was taken away twice") as broken:
        slot_lifecycle.unpin(state, next(iter(state.classes.values())), ready[:1])
    lines = bench.machine.story(broken.value)
    slot = int(ready[0])
    assert lines[0] == f"slot {slot} now: READY, pins 0 (leases 0), scope 1"
    when = bench.now_ns
    assert lines[1:] == [
        f"{head}: {changes}"
        for head, changes in (
            (
                f"{when} StoreRequested of session 1, job 1",
                f"ABSENT -> FREE [{slot}]; FREE -> RESERVED [{slot}]; pinned [{slot}]",
            ),
            (
                f"{when} TransferFinished of session 1, job 1",
                f"unpinned [{slot}]; RESERVED -> READY [{slot}]; unpinned [{slot}]",
            ),
        )
    ]


def test_slots_of_an_event_are_named_once_and_none_of_those_before() -> None:
    told = Story()
    told.begin(1, "First", None)
    told.changed("came", some(9))
    told.begin(2, "Second", None)
    assert told.touched_now().tolist() == []
    told.changed("came", some(5, 3))
    told.changed("went", some(3, 4))
    assert told.touched_now().tolist() == [3, 4, 5]
    assert told.changes == 3


def test_a_step_that_is_our_own_fault_names_the_slots_that_are_wrong_and_no_other() -> None:
    """And a pinned block stays, whoever wants it gone."""
    bench = small()
    bench.open()
    bench.stored([1, 2, 3])
    bench.lookup([2], lease=ev.LeaseMode.PREFIX)
    state = bench.machine.state
    turn, owner = Turn(state, bench.now_ns), next(iter(state.classes.values()))
    ready = np.flatnonzero(state.slots.state == SlotState.READY)
    pinned = ready[state.slots.pins[ready] > 0]
    unpinned = ready[state.slots.pins[ready] == 0]
    why = WhyGone(Fate.EVICTED)
    steps: list[tuple[str, Slots, Callable[[], object]]] = [
        (
            "a pinned block was evicted",
            pinned,
            lambda: slot_lifecycle.forget_ready(turn, owner, ready, why),
        ),
        (
            "an unpinned block needs no quarantine",
            unpinned,
            lambda: slot_lifecycle.quarantine_ready(turn, owner, ready, why),
        ),
        (
            "a pin was taken away twice",
            unpinned,
            lambda: slot_lifecycle.unpin(state, owner, ready),
        ),
        (
            "a slot was not RESERVED",
            ready,
            lambda: state.slots.move(ready, SlotState.RESERVED, SlotState.READY),
        ),
    ]
    for words, slots, step in steps:
        with pytest.raises(BrokenSlots, match=f"^{words}") as broken:
            step()
        assert broken.value.slots.tolist() == slots.tolist()
    assert turn.orders == []
    assert bench.statuses([1, 2, 3]) == "HHH"
