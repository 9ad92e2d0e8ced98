"""Watchers hear what tiers hold: when it was written, found, sought in vain, and lost."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import NamespaceId, TierId
from tests.core.bench import MS, SECOND, keys, numbers_of, only
from tests.core.test_tiers import DISK, FAR, Stage, stage

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
