"""From where a block came: told with each hit, until it is loaded."""

from __future__ import annotations

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import RequestId, SessionId
from kvd.core.model.tiers import Reach
from tests.core.bench import keys, only
from tests.core.test_tiers import DISK, FAR, Stage, stage

HOST, FROM_DISK, FROM_FAR = 0, int(Reach.DISK), int(Reach.CLUSTER)


def sources(on: Stage, *numbers: int, request: str = "r") -> list[int]:
    """What a lookup of these says; no byte where all is from host memory."""
    context = ev.RequestContext(RequestId(request))
    query = ev.Query(context, 0, keys(*numbers), ev.LeaseMode.PREFIX)
    (reply,) = only(on.feed(ev.LookupRequested(SessionId(1), (query,))), act.Reply)
    return list(reply.payload[0].sources)


def bring_up(on: Stage, *numbers: int) -> None:
    on.look(*numbers)
    on.answer()
    on.step()
    on.read()


def test_a_hit_says_which_tier_brought_it_up_until_it_is_loaded() -> None:
    on = stage()
    on.bring_down(1, 2)
    bring_up(on, 1, 2)
    on.store(3)
    assert sources(on, 1, 2, 3) == [FROM_DISK, FROM_DISK, HOST]
    assert sources(on, 1, 3, request="other") == [FROM_DISK, HOST]
    on.take(on.bench.finish(on.take(on.bench.load((1,)))))
    assert sources(on, 1, 2, 3, request="third") == [HOST, FROM_DISK, HOST]


def test_what_never_left_host_memory_has_no_sources() -> None:
    on = stage()
    on.store(1, 2)
    assert sources(on, 1, 2) == []


def test_what_is_not_there_yet_has_no_source() -> None:
    on = stage()
    on.bring_down(1)
    assert sources(on, 1) == []
    on.answer()
    on.step()
    assert sources(on, 1) == [], "its slot is reserved, and not read yet"


def test_each_block_names_its_own_tier() -> None:
    on = stage(DISK, FAR)
    on.bring_down(1, 2)
    on.held[0] = {held for held in on.held[0] if held[1] != 2}
    bring_up(on, 1, 2)
    assert sources(on, 1, 2) == [FROM_DISK, FROM_FAR]


def test_a_slot_of_another_block_tells_nothing_of_the_one_before() -> None:
    on = stage()
    on.bring_down(1)
    bring_up(on, 1)
    on.evict_all()
    first = 10_000 + on.bench.fed * 100
    on.store(*range(first, first + 16))
    assert sources(on, *range(first, first + 16)) == []


def test_a_request_that_may_read_from_host_memory_alone_asks_no_tier() -> None:
    on = stage(DISK, FAR)
    on.bring_down(1)
    assert on.look(1, tiers=(1,)) == "M"
    assert not on.asked
    assert on.look(1, request="far", tiers=(1, 3)) == "P"
    assert [asked.tier for asked in on.asked] == [1]
