"""A tier that is late: who waits for it, and how long."""

from __future__ import annotations

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import RequestId, SessionId
from kvd.core.model.by_deadline import GONE_KEPT, ByDeadline
from kvd.core.model.slots import SlotState
from kvd.core.model.tiers import Reach, TierTerms
from kvd.core.tiers import promotion, search
from tests.core.bench import SECOND, numbers_of, only
from tests.core.test_tiers import DISK, FAR, stage


def test_nobody_waits_for_a_copy_that_is_late() -> None:
    on = stage()
    on.bring_down(1, 2)
    on.look(1)
    on.answer()
    on.step()
    on.tick(SECOND // 2)
    assert on.look(1, 2, request="second") == "PP"
    on.answer()
    on.step()
    on.tick(SECOND // 2)
    assert on.look(1, 2, request="second") == "MP"  # the tier was late for another's request
    assert on.look(1, 2, request="third") == "MP"
    on.tick(SECOND // 2)
    assert on.look(1, 2, request="third") == "MM"
    on.read()
    assert on.look(1, 2, request="third") == "HH"


def test_a_store_waits_for_a_hung_read_some_seconds_and_no_more() -> None:
    on = stage()
    on.order_up(1)
    assert not only(on.take(on.bench.store([1], job=9, whole=True)), act.StartTransfer)
    on.tick(SECOND + promotion.GIVEN_UP_NS - 1)
    assert on.look(1, request="another") == "M"
    on.bench.now_ns += 1
    made = on.take(on.bench.feed(ev.TimerTicked()) + on.bench.work_off())
    (copied,) = only(made, act.StartTransfer)
    assert on.bench.machine.state.slots.state.tolist().count(SlotState.QUARANTINED) == 1
    (end,) = only(on.take(on.bench.finish([copied])), act.EndJob)
    assert end.status is ev.JobStatus.DONE
    on.read()  # at last: another has the block since long
    assert on.look(1) == "H"
    assert on.bench.machine.state.slots.state.tolist().count(SlotState.QUARANTINED) == 0


def test_who_waits_longer_keeps_nothing_of_others_from_being_forgotten() -> None:
    slow = TierTerms("slow", Reach.CLUSTER, seek_ns=60 * SECOND)
    on = stage(DISK, slow)
    expiring = on.bench.machine.state.below.expiring
    on.look(1, request="patient")  # of both tiers
    on.look(2, request="impatient", tiers=(Reach.DISK,))
    assert [sought.request for sought in expiring] == ["patient", "impatient"]
    on.tick(SECOND + search.BELIEVED_NS - 1)
    assert len(expiring) == 2
    on.tick(1)
    assert [sought.request for sought in expiring] == ["patient"]
    on.tick(59 * SECOND)
    assert not expiring


def test_a_read_that_may_take_longer_keeps_no_hung_one_from_being_given_up() -> None:
    slow = TierTerms("slow", Reach.CLUSTER, seek_ns=60 * SECOND)
    on = stage(DISK, slow)
    on.bring_down(1, 2)
    for number, request, tiers in ((1, "patient", ()), (2, "impatient", (Reach.DISK,))):
        on.look(number, request=request, tiers=tiers)
        on.answer()
        on.step()
    reading = on.bench.machine.state.below.reading
    assert len(reading) == len(on.reads) == 2
    on.tick(SECOND + promotion.GIVEN_UP_NS)
    assert [copy.sought and copy.sought.request for copy in reading] == ["patient"]
    on.read()
    assert not reading
    assert not on.bench.machine.state.below.promoting.whole


def test_a_hung_read_that_began_late_is_given_up_in_its_time() -> None:
    on = stage(TierTerms("slow", Reach.CLUSTER, seek_ns=60 * SECOND))
    on.bring_down(1, 2)
    on.look(1, request="old")
    late = on.asked.pop()
    on.tick(40 * SECOND)
    on.look(2, request="new")
    on.answer()
    on.step()
    on.asked.append(late)
    on.answer()
    on.step()
    reading = on.bench.machine.state.below.reading
    assert len(on.reads) == len(reading) == 2
    on.tick(20 * SECOND + promotion.GIVEN_UP_NS - 1)
    assert len(reading) == 2
    on.tick(1)
    assert [copy.sought and copy.sought.request for copy in reading] == ["new"]
    on.tick(40 * SECOND)
    assert not reading


def test_hung_reads_of_one_tier_do_not_keep_others_from_bringing_up_for_ever() -> None:
    on = stage(DISK, FAR, extents=8, promotion_share=0.25)  # a tenant has 16 blocks of it
    on.bring_down(*range(1, 41))
    on.held[1] = {held for held in on.held[0] if held[1] > 32}
    on.held[0] -= on.held[1]
    on.look(*range(1, 33), request="hung")
    on.answer()
    on.step()
    (hung,) = on.reads
    on.reads.clear()
    on.tick(SECOND + promotion.GIVEN_UP_NS)
    on.look(*range(33, 41), request="other")
    on.answer()
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == list(range(33, 41))
    assert read.tier == 1
    on.read()
    assert on.look(*range(33, 41), request="other") == "H" * 8
    on.reads.append(hung)
    on.read()
    assert not on.bench.machine.state.below.promoting.whole


def test_a_request_that_has_ended_waits_for_no_room() -> None:
    on = stage(extents=8, promotion_share=0.02)  # two blocks, of which a tenant has one
    on.bring_down(*range(1, 12))
    for number in range(1, 12):
        on.look(number, request=f"r{number}")
    on.answer()
    on.step()
    below = on.bench.machine.state.below
    assert [sought.request for sought in below.stalled] == [f"r{n}" for n in range(2, 12)]
    on.feed(ev.RequestsEnded(SessionId(1), tuple(RequestId(f"r{n}") for n in range(2, 11))))
    assert [sought.request for sought in below.stalled] == ["r11"]
    on.read()
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == [11]


def test_a_request_that_has_ended_waits_for_no_step() -> None:
    on = stage()
    on.bring_down(*range(1, 12))
    for number in range(1, 12):
        on.look(number, request=f"r{number}")
        on.answer()
        on.feed(ev.RequestsEnded(SessionId(1), (RequestId(f"r{number}"),)))
    assert not on.bench.machine.state.sessions[SessionId(1)].found_below


def test_what_is_late_is_found_in_the_order_of_deadlines_and_some_at_a_time() -> None:
    waiting: ByDeadline[str] = ByDeadline()
    for name, until_ns in (("c", 3), ("a", 1), ("z", 9), ("b", 1)):
        waiting.add(name, until_ns)
    assert waiting.late(0, 9) == []
    assert waiting.late(3, 2) == ["a", "b"]
    assert waiting.late(3, 9) == ["a", "b", "c"], "they stay until they are removed"
    assert waiting.remove("a")
    assert not waiting.remove("a")
    waiting.add("a", 4)
    assert waiting.late(3, 9) == ["b", "c"]
    assert waiting.late(4, 9) == ["b", "c", "a"]


def test_what_has_gone_takes_no_room_for_long() -> None:
    waiting: ByDeadline[int] = ByDeadline()
    waiting.add(-1, 0)
    for number in range(10 * GONE_KEPT):
        waiting.add(number, number)
        waiting.remove(number)
        assert len(waiting._heap) <= GONE_KEPT + 3
    assert waiting.late(1 << 60, 9) == [-1]
