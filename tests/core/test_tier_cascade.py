"""What engines expect of tiers, one statement a test (docs/engine-behaviours.md, 47 to 53)."""

from __future__ import annotations

import numpy as np

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import RequestId, SessionId
from kvd.core.model.tiers import WriteWhen
from tests.core.bench import SECOND, numbers_of
from tests.core.test_tiers import DISK, FAR, Stage, stage

SEVERAL = [1, 2, 3]


def pins(on: Stage, order: act.WriteToTier) -> list[int]:
    pinned: list[int] = on.bench.machine.state.slots.pins[order.slots].tolist()
    return pinned


def end(on: Stage, order: act.WriteToTier) -> None:
    done = np.ones(len(order.slots), dtype=np.bool_)
    on.feed(ev.TierCopyEnded(order.tier, order.copy, done))


def test_a_store_goes_to_every_tier_and_is_pinned_until_each_has_it() -> None:
    on = stage(DISK, FAR)
    on.store(*SEVERAL)
    one, other = on.writes
    assert {one.tier, other.tier} == {0, 1}
    assert numbers_of(one.keys) == numbers_of(other.keys) == SEVERAL
    assert pins(on, one) == [2, 2, 2]
    end(on, one)
    assert pins(on, other) == [1, 1, 1]
    end(on, other)
    assert pins(on, other) == [0, 0, 0]


def test_a_store_that_fails_is_written_nowhere() -> None:
    on = stage(DISK, FAR)
    started = on.take(on.bench.store(SEVERAL, 1))
    on.take(on.bench.finish(started, ev.TransferOutcome.FAILED))
    assert not on.writes
    on.store(*SEVERAL)
    assert [numbers_of(order.keys) for order in on.writes] == [SEVERAL, SEVERAL]


def test_what_a_request_stores_is_written_though_the_request_has_ended() -> None:
    on = stage()
    started = on.take(on.bench.store(SEVERAL, 1))
    on.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    on.take(on.bench.finish(started))
    assert [numbers_of(order.keys) for order in on.writes] == [SEVERAL]


def test_one_request_reads_once_from_each_tier() -> None:
    on = stage(DISK, FAR)
    on.bring_down(*SEVERAL, 4)
    on.held[0] = {held for held in on.held[0] if held[1] < 3}
    on.look(*SEVERAL, 4)
    on.answer()
    assert not on.reads, "nothing is read within the step"
    on.step()
    assert [(read.tier, numbers_of(read.keys)) for read in on.reads] == [(0, [1, 2]), (1, [3, 4])]
    on.step()
    assert len(on.reads) == 2


def test_a_store_that_offers_what_is_there_gives_it_to_tiers_that_lack_it() -> None:
    on = stage()
    on.store(1, 2)
    on.write(failing=(2,))
    on.store(1, 2, 3)
    assert [numbers_of(order.keys) for order in on.writes] == [[2], [3]]


def test_a_tier_that_waits_for_reuse_is_given_nothing_by_a_store() -> None:
    late = type(DISK)("late", write=WriteWhen.REUSE)
    on = stage(late)
    on.store(*SEVERAL)
    on.store(*SEVERAL)
    assert not on.writes


def test_a_failed_promotion_makes_the_request_miss_and_is_not_tried_again_for_it() -> None:
    on = stage()
    on.order_up(1)
    on.read(failing=(1,))
    for _ in range(3):
        assert on.look(1) == "M"
        on.answer()
        on.step()
    assert not on.reads


def test_what_a_tier_reads_is_not_used_by_that() -> None:
    on = stage()
    on.store(*SEVERAL)
    (order,) = on.writes
    stamps = on.bench.machine.state.slots.stamps
    before = stamps[order.slots].tolist()
    (owner,) = on.bench.machine.state.namespaces[order.name.namespace].classes
    coldest = owner.policy.coldest(16).tolist()
    on.bench.now_ns += SECOND
    end(on, order)
    assert stamps[order.slots].tolist() == before
    assert owner.policy.coldest(16).tolist() == coldest


def test_what_was_stored_meanwhile_keeps_nothing_that_another_tier_holds_from_coming() -> None:
    on = stage(DISK, FAR)
    on.bring_down(1, 2)
    for tier, number in ((0, 2), (1, 1)):  # each holds one of them
        on.held[tier] = {each for each in on.held[tier] if each[1] != number}
    assert on.look(1, 2) == "PP"
    on.answer()
    on.store(1)
    on.step()
    assert [(read.tier, numbers_of(read.keys)) for read in on.reads] == [(1, [2])]
    on.read()
    assert on.look(1, 2) == "HH"
    assert not on.bench.machine.state.below.stalled
