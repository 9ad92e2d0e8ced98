"""Watchers hear what tiers hold: when it was written, found, sought in vain, and lost."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import KeyBatch, NamespaceId, ScopeName, TierId
from kvd.core.model import marks
from kvd.core.model.marks import TagMarks
from kvd.core.tiers import residence
from tests.core.bench import MS, SECOND, keys, numbers_of, only
from tests.core.test_tiers import DISK, FAR, ROW, Stage, stage

NAMESPACE = NamespaceId(1)
KNOWN = (1, 2, 3, 4)


def told(on: Stage, tier: int = 0) -> set[int]:
    """What a watcher knows that the tier holds, of the blocks that these tests are about."""
    return {told[-1] for told in on.bench.pool.told if told[0] == tier} & set(KNOWN)


def forget_some(on: Stage, *numbers: int, tier: int = 0) -> None:
    """The tier drops these by itself: they leave by its policy."""
    on.held[tier] = {held for held in on.held[tier] if held[1] not in numbers}


def test_a_block_is_told_of_when_it_is_written_and_not_before() -> None:
    on = stage()
    on.store(1, 2)
    assert told(on) == set()
    on.write(failing=(2,))
    assert told(on) == {1}


def test_a_block_that_left_host_memory_is_told_as_gone_there_alone() -> None:
    on = stage()
    on.bring_down(1, 2)
    announced = {block[-1] for block in on.bench.pool.announced[NAMESPACE]}
    assert not {1, 2} & announced
    assert told(on) == {1, 2}


def test_what_a_tier_no_longer_holds_is_told_when_it_is_sought() -> None:
    on = stage()
    on.bring_down(1, 2)
    forget_some(on, 2)
    on.look(1, 2, 3)
    on.answer()
    assert told(on) == {1}


def test_what_nobody_was_told_of_is_sought_without_a_word() -> None:
    on = stage()
    on.bring_down(1)
    on.look(2, 3, 4)
    before = set(on.bench.pool.told)
    (asked,) = on.asked
    actions = on.feed(ev.TierAnswered(asked.tier, asked.search, np.zeros(3, dtype=np.bool_)))
    assert not only(actions, act.AnnounceRemoved)
    assert on.bench.pool.told == before


def test_what_another_node_wrote_is_told_once_when_it_is_found() -> None:
    on = stage(FAR)
    on.bring_down(1)
    (name,) = {held[0] for held in on.held[0] if held[1] == 1}
    on.held[0].add((name, 2))
    on.look(1, 2, request="a")
    on.answer()
    assert told(on) == {1, 2}
    on.look(1, 2, request="b")
    (asked,) = on.asked
    actions = on.feed(ev.TierAnswered(asked.tier, asked.search, np.ones(2, dtype=np.bool_)))
    assert not only(actions, act.AnnounceStored), "told again"


def test_a_tier_without_a_process_holds_nothing_until_it_is_told_of_anew() -> None:
    on = stage(DISK, FAR)
    on.bring_down(1, 2)
    actions = on.feed(ev.TierGone(TierId(0)))
    assert [lost.tier for lost in only(actions, act.AnnounceTierLost)] == [0]
    assert (told(on, 0), told(on, 1)) == (set(), {1, 2})
    on.start(0)
    on.look(1, 2)
    on.answer()
    assert told(on, 0) == {1, 2}, "found there again"


def test_a_tier_that_held_nothing_is_lost_without_a_word() -> None:
    on = stage()
    assert not only(on.feed(ev.TierGone(TierId(0))), act.AnnounceTierLost)


def test_what_was_cleared_while_it_was_written_is_not_told() -> None:
    on = stage()
    on.store(1)
    on.feed(ev.NamespaceCleared(5, NAMESPACE))
    on.take(on.bench.work_off())
    on.write()
    assert told(on) == set()


def test_an_answer_of_before_a_clear_is_not_told() -> None:
    on = stage()
    on.bring_down(1)
    on.look(1)
    on.feed(ev.NamespaceCleared(5, NAMESPACE))
    assert told(on) == set()
    on.answer()
    assert told(on) == set()


def test_a_tier_may_tell_by_itself_what_it_dropped() -> None:
    on = stage()
    on.store(1, 2)
    on.write()
    name = next(iter(on.held[0]))[0]
    on.feed(ev.TierForgot(TierId(0), name, keys(1, 3)))
    assert told(on) == {2}
    on.feed(ev.TierForgot(TierId(0), name, keys(1, 3)))
    assert told(on) == {2}


def test_of_an_account_or_group_the_other_hears_nothing() -> None:
    on = stage()
    on.bring_down(1, account="a")
    on.bring_down(1, account="b")
    forget_some(on, 1)
    on.look(1, account="a")
    on.answer()
    accounts = {told[3] for told in on.bench.pool.told if told[-1] == 1}
    assert accounts == {"b"}


@pytest.mark.parametrize("with_tiers", [False, True])
def test_a_snapshot_has_of_tiers_what_host_memory_holds_as_well(with_tiers: bool) -> None:
    on = stage()
    on.bring_down(1)
    on.store(2, 3)
    on.write(failing=(3,))
    on.store(4)  # on its way to the tier
    found = {
        (number, tier)
        for piece in on.bench.machine.resident(NAMESPACE, with_tiers=with_tiers)
        for _, _, _, batch, tier in piece
        for number in numbers_of(batch)
        if number in KNOWN
    }
    host = {(2, None), (3, None), (4, None)}
    assert found == (host | {(2, 0)} if with_tiers else host)


def test_a_late_answer_after_the_deadline_is_told_all_the_same() -> None:
    on = stage()
    on.bring_down(1)
    forget_some(on, 1)
    on.look(1)
    on.tick(SECOND + MS)
    on.answer()
    assert told(on) == set()


def test_no_answer_is_not_told_as_absence() -> None:
    on = stage()
    on.bring_down(1)
    on.look(1)
    (asked,) = on.asked
    nothing = np.zeros(1, dtype=np.bool_)
    on.feed(ev.TierAnswered(asked.tier, asked.search, nothing, failed=True))
    assert told(on) == {1}
    assert on.look(1) == "M", "nobody waits for it any more"
    assert (on.counters().unanswered, on.counters().misses) == (1, 0)


def test_an_answer_of_another_length_is_not_told_as_absence() -> None:
    on = stage()
    on.bring_down(1, 2)
    on.look(1, 2)
    (asked,) = on.asked
    on.feed(ev.TierAnswered(asked.tier, asked.search, np.zeros(1, dtype=np.bool_)))
    assert told(on) == {1, 2}


def test_what_the_tier_did_not_say_is_not_told_as_absence() -> None:
    on = stage()
    on.bring_down(1, 2, 3)
    on.look(1, 2, 3)
    (asked,) = on.asked
    held, unknown = np.array([True, False, False]), np.array([False, False, True])
    on.feed(ev.TierAnswered(asked.tier, asked.search, held, unknown=unknown))
    assert told(on) == {1, 3}
    assert on.look(3) == "M", "nobody waits for it any more"
    found = on.counters()
    assert (found.hits, found.misses, found.unanswered) == (1, 1, 1)


def begin_to_read(on: Stage, *numbers: int) -> act.ReadFromTier:
    on.look(*numbers)
    on.answer()
    on.step()
    (read,) = on.reads
    return read


def test_what_is_missing_when_it_is_read_is_told_as_gone() -> None:
    on = stage(FAR)
    on.bring_down(1, 2)
    read = begin_to_read(on, 1, 2)
    done, missing = np.array([True, False]), np.array([False, True])
    on.feed(ev.TierCopyEnded(read.tier, read.copy, done, missing=missing))
    assert told(on) == {1}


def test_what_could_not_be_read_is_not_told_as_gone() -> None:
    on = stage(FAR)
    on.bring_down(1, 2)
    read = begin_to_read(on, 1, 2)
    on.feed(ev.TierCopyEnded(read.tier, read.copy, np.zeros(2, dtype=np.bool_)))
    assert told(on) == {1, 2}


def name_of(on: Stage, number: int) -> ScopeName:
    return next(held[0] for held in on.held[0] if held[1] == number)


def test_what_has_left_is_written_again_before_host_memory_gives_it_up() -> None:
    on = stage()
    on.store(1, 2)
    on.write()
    on.feed(ev.TierForgot(TierId(0), name_of(on, 1), keys(1)))
    on.store(1, 2)
    assert [numbers_of(order.keys) for order in on.writes] == [[1]]


def test_what_left_before_it_was_written_once_more_is_known_to_be_there() -> None:
    on = stage()
    on.store(1)
    on.write()
    on.feed(ev.TierForgot(TierId(0), name_of(on, 1), keys(1)))
    on.store(1)
    on.feed(ev.TierForgot(TierId(0), name_of(on, 1), keys(1)))  # said once too often
    on.write()
    assert told(on) == {1}
    on.store(1)
    assert not on.writes, "written though it is there"


def test_nobody_is_told_that_blocks_have_left_which_nobody_can_know() -> None:
    on = stage()
    on.store(1)
    on.write()
    name = name_of(on, 1)
    for wrong in (
        name._replace(namespace=NamespaceId(99)),
        name._replace(generation=name.generation + 1),
    ):
        assert not on.feed(ev.TierForgot(TierId(0), wrong, keys(1)))
    short = KeyBatch.from_bytes(b"12345" * 3, 5)
    assert not on.feed(ev.TierForgot(TierId(0), name, short))
    assert told(on) == {1}


def test_what_left_is_told_of_though_another_block_that_left_shared_its_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marks, "MARKS", 8)
    on = stage()
    on.store(*range(1, 20))
    on.write()
    for number in range(1, 20):
        actions = on.feed(ev.TierForgot(TierId(0), name_of(on, number), keys(number)))
        (removed,) = only(actions, act.AnnounceRemoved)
        assert numbers_of(removed.keys) == [number]


def test_a_block_that_is_named_twice_in_one_word_is_told_once() -> None:
    on = stage()
    on.store(1)
    on.write()
    actions = on.feed(ev.TierForgot(TierId(0), name_of(on, 1), keys(1, 1, 1)))
    (removed,) = only(actions, act.AnnounceRemoved)
    assert numbers_of(removed.keys) == [1]


@pytest.mark.parametrize("word", [ev.TierGone, ev.TierDoubted])
def test_what_a_tier_may_have_lost_is_offered_to_it_again(
    word: type[ev.TierGone | ev.TierDoubted],
) -> None:
    on = stage()
    on.store(1, 2)
    on.write()
    actions = on.feed(word(TierId(0)))
    assert [each.tier for each in only(actions, act.AnnounceTierLost)] == [0]
    on.take(on.bench.work_off())
    if word is ev.TierGone:
        on.start(0)
    assert told(on) == set()
    on.store(1, 2)
    assert [numbers_of(order.keys) for order in on.writes] == [[1, 2]]
    on.write()
    assert told(on) == {1, 2}


def test_doubt_goes_over_rows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residence, "DOUBTED_ROWS_AT_ONCE", 1)
    on = stage()
    on.store(*range(1, 1 + 3 * ROW))
    on.write()
    state = on.bench.machine.state
    bits = []
    on.feed(ev.TierDoubted(TierId(0)))
    for _ in range(len(state.rows)):
        bits.append(int(state.slots.below[: 4 * ROW].sum()))
        on.feed(ev.WorkContinued())
    assert bits == sorted(set(bits), reverse=True), "each piece takes some"
    assert not state.slots.below[: 4 * ROW].any()
    assert not on.bench.machine.has_work()


def test_many_blocks_are_told_of_one_by_one() -> None:
    """Few of a million share a mark."""
    table = TagMarks()
    tags = np.random.default_rng(1).integers(0, 1 << 63, 1 << 20).astype(np.uint64)
    table.set(tags[::2])
    assert table.has(tags[::2]).all()
    assert table.has(tags[1::2]).mean() < 0.01
    table.clear(tags[::4])
    assert not table.has(tags[::4]).any()
    assert table.has(tags[2::4]).mean() > 0.99
