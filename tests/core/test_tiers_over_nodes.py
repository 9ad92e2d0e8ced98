"""What one node hands off, another finds: in a tier that they share, as soon as it is there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import RequestId, SessionId, TierId
from kvd.core.model.tiers import Sought, WriteWhen
from kvd.core.tiers import search
from tests.core.bench import BLOCK, MS, SECOND, keys, numbers_of, only
from tests.core.test_tiers import DISK, FAR, Stage, stage

LATER = replace(FAR, write=WriteWhen.DEMOTION)


def hand_off(on: Stage, *numbers: int) -> None:
    context = ev.RequestContext(RequestId("prefill"))
    on.feed(ev.HandOffRequested(SessionId(1), context, 0, keys(*numbers), 60 * SECOND))


def await_blocks(on: Stage, *numbers: int, request: str = "decode") -> str:
    """Look up what another node computes."""
    context = ev.RequestContext(RequestId(request), awaits=True)
    query = ev.Query(context, 0, keys(*numbers), ev.LeaseMode.PREFIX)
    (reply,) = only(on.feed(ev.LookupRequested(SessionId(1), (query,))), act.Reply)
    return "".join("MHPR"[status & 3] for status in reply.payload[0].statuses)


def arrive(on: Stage, *numbers: int) -> None:
    """Another node writes these, under the name by which they are asked for."""
    (order,) = on.asked
    on.held[order.tier].update((order.name, number) for number in numbers)


def pass_time(on: Stage, ns: int) -> None:
    on.bench.now_ns += ns


def test_what_is_handed_off_is_written_where_nodes_share_whatever_the_rule() -> None:
    on = stage(replace(DISK, write=WriteWhen.DEMOTION), LATER)
    on.store(1, 2, 3)
    assert not on.writes
    hand_off(on, 1, 2, 3, 4)
    (write,) = on.writes
    assert (write.tier, numbers_of(write.keys)) == (1, [1, 2, 3])
    on.write()


def test_what_a_shared_tier_had_is_offered_again_in_case_it_gave_it_up() -> None:
    on = stage(LATER)
    on.store(1, 2, 3)
    hand_off(on, 1, 2)
    on.write()
    hand_off(on, 1, 2, 3)
    assert [(numbers_of(write.keys), write.again) for write in on.writes] == [
        ([3], False),
        ([1, 2], True),
    ]
    assert held(on) == 3  # until it says that it has them
    hand_off(on, 1, 2)
    assert len(on.writes) == 2  # they are on their way
    on.write(failing=(2,))
    assert held(on) == 1
    hand_off(on, 2)
    assert [write.again for write in on.writes] == [False]


def test_watchers_hear_once_of_what_a_shared_tier_has() -> None:
    on = stage(LATER)
    on.store(1, 2)
    hand_off(on, 1, 2)
    on.write()
    hand_off(on, 1, 2)
    (again,) = on.writes
    actions = on.feed(ev.TierCopyEnded(again.tier, again.copy, np.ones(2, dtype=np.bool_)))
    assert not only(actions, act.AnnounceStored)


def test_what_is_too_much_to_offer_again_at_once_follows() -> None:
    on = stage(replace(LATER, max_write_bytes=2 * BLOCK))
    on.store(1, 2, 3, 4)
    hand_off(on, 1, 2, 3, 4)
    while on.writes:
        on.write()
    hand_off(on, 1, 2, 3, 4)
    offered: list[int] = []
    while on.writes:
        assert all(write.again for write in on.writes)
        offered += [number for write in on.writes for number in numbers_of(write.keys)]
        on.write()
    assert offered == [1, 2, 3, 4]
    assert held(on) == 0


def held(on: Stage) -> int:
    """Blocks that hand-offs hold here."""
    return len(on.bench.machine.state.handed_off)


def test_what_nodes_share_is_held_here_no_longer() -> None:
    on = stage(LATER)
    on.store(1, 2, 3)
    hand_off(on, 1, 2, 3)
    assert held(on) == 3
    on.write(failing=(2,))
    assert held(on) == 1  # until it is loaded here, or the deadline
    hand_off(on, 1, 2, 3)
    assert held(on) == 3
    assert numbers_of(on.writes[0].keys) == [2]
    hand_off(on, 2)  # it is on its way there
    assert held(on) == 3
    on.write()
    assert held(on) == 0
    counters = on.bench.machine.state.counters
    assert (counters.handed_off, counters.hand_off_taken) == (5, 5)


def test_what_only_this_node_has_below_is_held() -> None:
    on = stage(DISK)
    on.store(1, 2)
    on.write()
    hand_off(on, 1, 2)
    assert held(on) == 2


def test_what_is_still_being_stored_follows_and_what_fails_does_not() -> None:
    on = stage(LATER)
    stored, failing = on.bench.store((1, 2)), on.bench.store((3, 4))
    hand_off(on, 1, 2, 3, 4)
    assert not on.writes
    on.take(on.bench.finish(stored))
    on.take(on.bench.finish(failing, ev.TransferOutcome.FAILED))
    on.store(5)
    assert [numbers_of(write.keys) for write in on.writes] == [[1, 2]]


def test_a_request_that_awaits_blocks_asks_again_until_they_are_there() -> None:
    on = stage(DISK, FAR)
    assert await_blocks(on, 1, 2) == "PP"
    on.answer()
    assert await_blocks(on, 1, 2) == "PP"
    assert not on.asked  # it was asked a moment ago
    pass_time(on, search.AWAITED_AGAIN_NS)
    assert await_blocks(on, 1, 2) == "PP"
    assert [order.tier for order in on.asked] == [1]  # where nodes share
    arrive(on, 1)
    on.answer()
    on.step()
    on.read()
    pass_time(on, 2 * search.AWAITED_AGAIN_NS)
    assert await_blocks(on, 1, 2) == "HP"
    assert numbers_of(on.asked[0].keys) == [2]
    arrive(on, 2)
    on.answer()
    on.step()
    on.read()
    assert await_blocks(on, 1, 2) == "HH"


def test_what_another_node_wrote_comes_up_for_an_account_that_is_new_here() -> None:
    on = stage(FAR)
    assert on.look(1, 2, account="new") == "PP"
    arrive(on, 1, 2)
    on.answer()
    on.step()
    on.read()
    assert on.look(1, 2, account="new") == "HH"


def test_it_asks_less_and_less_often_and_misses_at_its_deadline() -> None:
    on = stage(FAR)
    began = on.bench.now_ns
    times: list[int] = []
    while "P" in await_blocks(on, 1):
        if on.asked:
            times.append(on.bench.now_ns - began)
        on.answer()
        pass_time(on, 5 * MS)
    assert times == [ms * MS for ms in (0, 20, 60, 140, 300, 620)]
    assert on.bench.now_ns - began == FAR.seek_ns
    assert await_blocks(on, 1) == "M"


def test_others_miss_at_once_and_so_does_it_where_no_tier_is_shared() -> None:
    on = stage(DISK)
    await_blocks(on, 1)
    on.answer()
    assert await_blocks(on, 1) == "M"
    on = stage(DISK, FAR)
    on.look(1)
    on.answer()
    assert on.look(1) == "M"


def test_a_shared_tier_that_goes_and_comes_back_is_asked_again() -> None:
    on = stage(FAR)
    await_blocks(on, 1)
    on.feed(ev.TierGone(TierId(0)))
    on.take(on.bench.work_off())
    on.asked.clear()
    pass_time(on, 100 * MS)
    assert await_blocks(on, 1) == "M"  # nobody could tell now
    on.start(0)
    pass_time(on, 100 * MS)
    assert await_blocks(on, 1) == "P"
    (order,) = on.asked
    assert order.tier == 0


def test_nothing_is_kept_for_a_request_that_has_ended() -> None:
    on = stage(FAR)
    await_blocks(on, 1)
    on.answer()
    (sought,) = on.bench.machine.state.below.expiring
    assert isinstance(sought, Sought)
    assert sought.waiting
    on.feed(ev.RequestsEnded(SessionId(1), (RequestId("decode"),)))
    assert not sought.waiting
    assert not on.bench.machine.state.below.expiring
