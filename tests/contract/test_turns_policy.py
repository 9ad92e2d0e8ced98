"""The policy `turns`: what a sight says, what is learnt, and that time may do as it likes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.core.keys import Slots
from kvd.core.policy import Evictable, PolicyMemory, Sight, hazard
from kvd.core.policy.hazard import BINS, CLASSES, COHORTS, EDGES, Hazards, Seen, bins_of, scores
from kvd.core.policy.turn_ghosts import MAX_GHOST_PLACES, TurnGhosts
from kvd.core.policy.turns import (
    FIRST_TURNS,
    LONGEST_SILENCE_NS,
    MOST_TURNS,
    STAMP_SHIFT,
    TurnsPolicy,
)
from tests.contract.turns_reference import ReferenceTurns, turn_of

SECOND = 1_000_000_000
MAX_SLOTS = 4096


def batch(*slots: int) -> Slots:
    return np.array(slots, dtype=np.int64)


def tags(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def all_may_go(slots: Slots) -> np.ndarray:
    return np.ones(slots.size, dtype=np.bool_)


def others_than(own: Iterable[int]) -> Evictable:
    held = batch(*own)
    return lambda slots: ~np.isin(slots, held)


def made(capacity: int = 100) -> TurnsPolicy:
    return TurnsPolicy(lambda: capacity, PolicyMemory(MAX_SLOTS))


class Conversations(RuleBasedStateMachine):
    """Requests with sights, beside the plain version: same victims, whatever the clock says."""

    capacity = 40

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = made(self.capacity), ReferenceTurns(self.capacity)
        self.now_ns = self.request = 0
        self.slot_of: dict[int, int] = {}
        self.free = list(range(self.capacity))
        self.sessions: list[list[int]] = []
        self.next_tag = 1
        self.pinned: set[int] = set()

    @rule(step=st.one_of(st.integers(0, 100), st.integers(-(10**5), 10**8)))
    def pass_time(self, step: int) -> None:
        self.now_ns = max(1, self.now_ns + step * SECOND // 10)

    @rule(pinned=st.sets(st.integers(0, 39), max_size=6))
    def pin(self, pinned: set[int]) -> None:
        self.pinned = pinned

    @rule(which=st.integers(0, 1000), grown=st.integers(1, 12), touches=st.integers(1, 3))
    def ask(self, which: int, grown: int, touches: int) -> None:
        """A session's turn: a new one, or one that goes on."""
        self.request += 1
        if which % 3 == 0 or not self.sessions:
            shared = self.sessions[which % len(self.sessions)][:1] if self.sessions else []
            self.sessions.append(list(shared))
        session = self.sessions[which % len(self.sessions)]
        session.extend(range(self.next_tag, self.next_tag + grown))
        self.next_tag += grown
        del session[30:]
        found = [tag for tag in session if tag in self.slot_of]
        for _ in range(touches):
            self.touch([self.slot_of[tag] for tag in found], as_use=True)
        missing = [tag for tag in session if tag not in self.slot_of]
        own = {self.slot_of[tag] for tag in found}
        if not self.make_room(len(missing) - len(self.free), own):
            return
        before = session[: session.index(missing[0])] if missing else []
        parent = self.slot_of[before[-1]] if before else -1
        slots = [self.free.pop() for _ in missing]
        sight = Sight(self.now_ns, self.request, parent)
        self.policy.insert(batch(*slots), tags(*missing), sight)
        self.reference.insert(list(zip(slots, missing, strict=True)), sight)
        self.slot_of.update(zip(missing, slots, strict=True))
        self.touch([self.slot_of[tag] for tag in session], as_use=False)

    def touch(self, slots: list[int], *, as_use: bool) -> None:
        sight = Sight(self.now_ns, self.request)
        self.policy.touch(batch(*slots), sight, as_use=as_use)
        self.reference.touch(slots, sight, as_use=as_use)

    def make_room(self, count: int, kept: set[int]) -> bool:
        held = batch(*kept, *self.pinned)
        victims = self.policy.evict(max(0, count), lambda slots: ~np.isin(slots, held), self.now_ns)
        expected = self.reference.evict(max(0, count), lambda slot: slot not in held, self.now_ns)
        if expected is None:
            assert victims is None
            return False
        assert victims is not None
        assert victims.tolist() == expected
        self.forget(expected)
        return True

    @precondition(lambda self: self.slot_of)
    @rule(which=st.integers(0, 1000))
    def remove(self, which: int) -> None:
        slots = sorted(self.slot_of.values())
        slot = slots[which % len(slots)]
        self.policy.remove(batch(slot))
        self.reference.remove([slot])
        self.forget([slot])

    def forget(self, slots: list[int]) -> None:
        self.slot_of = {tag: slot for tag, slot in self.slot_of.items() if slot not in slots}
        self.free += slots

    @invariant()
    def order_is_the_same(self) -> None:
        assert self.policy.coldest(100).tolist() == self.reference.coldest(100)


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_long_run_of_conversations_decides_as_the_plain_version_does(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough for scores that differ from one another; the plain version joins no cohorts."""
    monkeypatch.setattr(hazard, "COHORTS", 4096)
    rng = np.random.default_rng(seed)
    machine = Conversations()
    for _ in range(400):
        machine.pass_time(int(rng.exponential(20)))
        machine.ask(int(rng.integers(0, 1000)), int(rng.integers(1, 8)), 1)
        machine.order_is_the_same()
    learnt = np.array(machine.reference.scores)
    assert learnt.max() > 1.5 * learnt.min() > 0, "nothing was learnt, so nothing was compared"


def turns_of(policy: TurnsPolicy, *slots: int) -> list[int]:
    return [turn_of(policy, slot) for slot in slots]


def test_blocks_that_one_request_brings_are_of_one_generation_however_many_batches() -> None:
    policy = made()
    policy.insert(batch(0, 1), tags(1, 2), Sight(SECOND, 1))
    policy.insert(batch(2, 3), tags(3, 4), Sight(2 * SECOND, 1, parent=1))
    assert turns_of(policy, 0, 1, 2, 3) == [1, 1, 1, 1]


def test_session_is_as_many_turns_old_as_it_had_requests() -> None:
    policy = made()
    slots: list[int] = []
    for turn in range(1, MOST_TURNS + 4):
        if slots:
            policy.touch(batch(*slots), Sight(turn * SECOND, turn))
        slots += [2 * turn, 2 * turn + 1]
        parent = slots[-3] if len(slots) > 2 else -1
        new = slots[-2:]
        policy.insert(batch(*new), tags(*new), Sight(turn * SECOND, turn, parent))
        assert set(turns_of(policy, *slots)) == {min(turn, MOST_TURNS)}


def test_request_that_touches_often_uses_once() -> None:
    policy = made()
    policy.insert(batch(0, 1), tags(1, 2), Sight(SECOND, 1))
    for _ in range(5):
        policy.touch(batch(0, 1), Sight(2 * SECOND, 2))
    assert turns_of(policy, 0, 1) == [2, 2]
    policy.touch(batch(0, 1), Sight(3 * SECOND, 3), as_use=False)
    assert turns_of(policy, 0, 1) == [2, 2]
    policy.touch(batch(0, 1), Sight(3 * SECOND, 3))
    assert turns_of(policy, 0, 1) == [3, 3]


def test_block_named_twice_around_an_older_one_stands_where_its_turns_say() -> None:
    policy = made()
    policy.insert(batch(0, 1), tags(1, 2), Sight(SECOND, 1))
    for request in (2, 3):
        policy.touch(batch(1), Sight(SECOND, request))
    policy.touch(batch(0, 1, 0), Sight(SECOND, 4))
    assert turns_of(policy, 0, 1) == [4, 4]
    policy.touch(batch(0, 1), Sight(SECOND, 5))
    assert len(policy) == 2
    victims = policy.evict(2, all_may_go, 2 * SECOND)
    assert victims is not None
    assert victims.tolist() == [1, 0]


def test_head_never_has_fewer_turns_than_its_tail() -> None:
    policy = made()
    policy.insert(batch(5, 6), tags(5, 6), Sight(SECOND, 1))
    for request in (2, 3):
        policy.touch(batch(5, 6), Sight(SECOND, request))
    policy.insert(batch(4), tags(4), Sight(SECOND, 4))
    policy.touch(batch(4, 5, 6), Sight(SECOND, 5))
    assert turns_of(policy, 4, 5, 6) == [4, 4, 4]


def test_block_that_comes_back_has_its_turns_again() -> None:
    policy = made()
    policy.insert(batch(0, 1), tags(1, 2), Sight(SECOND, 1))
    policy.touch(batch(0, 1), Sight(SECOND, 2))
    assert policy.evict(2, all_may_go, 2 * SECOND) is not None
    policy.insert(batch(7, 8, 9), tags(1, 2, 3), Sight(3 * SECOND, 3))
    assert turns_of(policy, 7, 8, 9) == [3, 3, 2]


def test_cleared_class_forgets_ghosts_and_what_it_learnt() -> None:
    policy = made()
    policy.insert(batch(0, 1), tags(1, 2), Sight(SECOND, 1))
    assert policy.evict(2, all_may_go, 2 * SECOND) is not None
    policy.forget_gone()
    policy.insert(batch(7, 8), tags(1, 2), Sight(3 * SECOND, 3))
    assert turns_of(policy, 7, 8) == [1, 1]
    policy.touch(batch(7, 8), Sight(4 * SECOND, 4))


@pytest.mark.parametrize("now_ns", [1, 10 * SECOND, 10**18])
def test_clock_that_jumps_or_goes_back_makes_nothing_young_or_old(now_ns: int) -> None:
    policy = made()
    for number in range(10):
        policy.insert(batch(number), tags(number + 1), Sight((20 + number) * SECOND, number + 1))
    policy.touch(batch(0), Sight(now_ns, 50))
    victims = policy.evict(10, all_may_go, now_ns)
    assert victims is not None
    assert victims.tolist() == [*range(1, 10), 0]


def test_bins_hold_the_ages_between_their_edges() -> None:
    ages = np.array([0, 1, 2, 3, 4, 5, 6, 7, 1000, 2**30, 2**32 - 2])
    expected = np.searchsorted(EDGES, ages, side="right") - 1
    assert bins_of(ages).tolist() == np.minimum(expected, BINS - 1).tolist()


def test_scores_say_how_soon_blocks_of_that_age_come_back() -> None:
    returned, watched = np.zeros((2, CLASSES, BINS))
    watched[:, :20] = 1e6
    returned[3, 10:14] = 1e5  # comes back at that age
    returned[0, 2] = 1e3
    found = scores(returned, watched)
    assert found[3, 8] > 10 * found[0, 8]
    assert (np.diff(found) <= 0).all(), "what is older stands before it and would stay for it"
    assert found[3, 16] < found[3, 12] / 10, "it is past"


def test_cohorts_are_joined_without_losing_a_block_and_old_ones_first() -> None:
    hazards = Hazards()
    for now in range(1, 10 * COHORTS):
        hazards.begin(now, np.array([now % CLASSES]), 0)
    assert hazards.under_way == 10 * COHORTS - 1
    stamps = np.arange(1, 10 * COHORTS)
    ones = np.zeros(stamps.size, np.int64)
    hazards.end(10 * COHORTS, Seen(stamps, stamps % CLASSES, ones), returned=False)
    assert hazards.under_way == 0


@pytest.mark.parametrize(("slots", "places"), [(1000, 4096), (10**9, MAX_GHOST_PLACES)])
def test_ghosts_take_eight_bytes_a_place_and_no_more_places_than_their_bound(
    slots: int, places: int
) -> None:
    capacity = [slots]
    ghosts = TurnGhosts(lambda: capacity[0])
    assert ghosts.bytes_used <= 16
    assert not ghosts.fit(), "there was nothing to forget"
    assert ghosts.bytes_used == 8 * places
    capacity[0] *= 3
    assert ghosts.fit()
    assert ghosts.bytes_used <= 8 * MAX_GHOST_PLACES


def test_ghost_of_another_block_at_the_same_place_is_neither_found_nor_lost() -> None:
    ghosts = TurnGhosts(lambda: 100)
    ghosts.fit()
    here, elsewhere = tags(1 << 60), tags(2 << 60)
    other = here ^ tags(1 << 21)  # the same place, another check
    assert ghosts.add(here, batch(5)).tolist() == []
    assert [found.tolist() for found in ghosts.take(other)] == [[], []]
    assert [found.tolist() for found in ghosts.take(elsewhere)] == [[], []]
    assert [found.tolist() for found in ghosts.take(tags(2 << 60, 1 << 60))] == [[1], [5]]
    assert [found.tolist() for found in ghosts.take(here)] == [[], []], "it was taken"


def test_ghost_that_takes_another_s_place_says_whose_word_is_lost() -> None:
    ghosts = TurnGhosts(lambda: 100)
    ghosts.fit()
    here = tags(1 << 60)
    other = here ^ tags(1 << 21)
    ghosts.add(here, batch(5))
    assert ghosts.add(other, batch(6)).tolist() == [5]
    assert [found.tolist() for found in ghosts.take(here)] == [[], []]
    assert [found.tolist() for found in ghosts.take(other)] == [[0], [6]]
    assert ghosts.add(np.concatenate([here, other]), batch(7, 8)).tolist() == [7], "of one batch"
    assert [found.tolist() for found in ghosts.take(other)] == [[0], [8]]


def test_ghosts_are_kept_while_the_class_grows_or_shrinks_a_little() -> None:
    capacity = [1600]
    ghosts = TurnGhosts(lambda: capacity[0])
    ghosts.fit()
    kept = ghosts.bytes_used
    for size in (1600, 3200, 100):  # twice as large, and 16 times smaller
        capacity[0] = size
        ghosts.add(tags(1 << 60), batch(5))
        assert not ghosts.fit()
        assert ghosts.bytes_used == kept
        assert ghosts.take(tags(1 << 60))[1].tolist() == [5]
    for size in (3201, 200):
        capacity[0] = size
        ghosts.add(tags(1 << 60), batch(5))
        assert ghosts.fit()
        assert ghosts.take(tags(1 << 60))[1].tolist() == []


def test_silence_longer_than_the_longest_counts_as_that() -> None:
    policy = made()
    policy.insert(batch(0), tags(1), Sight(SECOND, 1))
    policy.evict(0, all_may_go, SECOND + 100 * LONGEST_SILENCE_NS)
    assert policy.stamp == LONGEST_SILENCE_NS >> STAMP_SHIFT


def learnt(times: int, weight: int) -> Hazards:
    """Of two classes: blocks that came back, and others that left."""
    hazards = Hazards()
    classes = np.array([0, 3, 3])
    hazards.begin(1, classes, weight)
    seen = Seen(np.ones(3, np.int64), classes, np.full(3, weight))
    hazards.end(40, seen.only(np.array([True, True, False])), returned=True)
    hazards.end(90, seen.only(np.array([False, False, True])), returned=False)
    for _ in range(times):
        hazards.request_came(100)
    assert hazards.under_way == 0
    return hazards


def test_what_was_learnt_counts_half_after_so_many_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hazard, "HALVED_EVERY", 2 * hazard.SCORED_EVERY)
    fresh, halved = learnt(hazard.SCORED_EVERY, 0), learnt(2 * hazard.SCORED_EVERY, 0)
    assert np.abs(np.array(fresh.scores) - np.array(halved.scores)).max() > 0
    assert halved.scores == learnt(hazard.SCORED_EVERY, 1).scores
    assert learnt(4 * hazard.SCORED_EVERY, 0).scores == learnt(hazard.SCORED_EVERY, 2).scores


def test_scores_are_made_anew_now_and_then_only() -> None:
    assert learnt(hazard.SCORED_EVERY - 1, 0).scores == Hazards().scores
    assert learnt(hazard.SCORED_EVERY, 0).scores != Hazards().scores


def test_each_turn_that_is_counted_has_a_queue() -> None:
    assert len(FIRST_TURNS) == CLASSES
    policy = made()
    policy.insert(batch(0), tags(1), Sight(SECOND, 1))
    for request in range(2, MOST_TURNS + 3):
        policy.touch(batch(0), Sight(SECOND, request))
        assert turns_of(policy, 0) == [min(request, MOST_TURNS)]
        assert policy.coldest(1).tolist() == [0]


def test_a_block_with_which_many_prompts_begin_is_learnt_from_whatever_its_tag() -> None:
    """It is the only one of so many turns, beside documents that come back now and then."""
    policy, rng = made(40), np.random.default_rng(1)
    unsampled = next(tag for tag in range(1, 100) if tag * 0x9E3779B97F4A7C15 >> 16 & 3)
    slot_of: dict[int, int] = {}
    free, found, asked = list(range(40)), 0, 0
    for request in range(1, 4000):
        if request % 2:
            prompt = [unsampled, 10**6 + 2 * request, 10**6 + 2 * request + 1]
            asked += 1
            found += unsampled in slot_of
        else:
            document = 1000 * (request // 400 * 60 + int(rng.integers(60)) + 1)
            prompt = [*range(document, document + 4)]
        there = [tag for tag in prompt if tag in slot_of]
        if there:
            policy.touch(batch(*(slot_of[tag] for tag in there)), Sight(request * SECOND, request))
        missing = [tag for tag in prompt if tag not in slot_of]
        more = max(0, len(missing) - len(free))
        gone = policy.evict(more, others_than(slot_of[tag] for tag in there), request * SECOND)
        assert gone is not None
        slot_of = {tag: slot for tag, slot in slot_of.items() if slot not in gone.tolist()}
        free += gone.tolist()
        if missing:
            parent = slot_of[there[-1]] if there else -1
            slots = [free.pop() for _ in missing]
            policy.insert(batch(*slots), tags(*missing), Sight(request * SECOND, request, parent))
            slot_of.update(zip(missing, slots, strict=True))
    assert found > 0.99 * asked
