"""Tenants that share what may be on its way from tiers, and to them."""

from __future__ import annotations

import numpy as np

from kvd.core import events as ev
from kvd.core.model.tiers import TierTerms
from kvd.core.tiers.writing import CAUGHT_UP_AT_ONCE
from tests.core.bench import BLOCK, numbers_of, spec
from tests.core.test_tiers import Stage, stage


def shared(
    *rules: TierTerms, tenants: int = 2, extents: int = 8, promotion_share: float = 0.25
) -> Stage:
    """Session n is the n-th tenant's, each with a namespace."""
    on = stage(*rules, extents=extents, promotion_share=promotion_share)
    for number in range(2, tenants + 1):
        on.bench.open(number, spec(f"ns {number}", f"tenant {number}"))
    return on


def find_all(on: Stage) -> None:
    """The tier holds all that it is asked for, and the engines' steps end."""
    while on.asked:
        order = on.asked.pop(0)
        held = np.ones(len(order.keys), dtype=np.bool_)
        on.feed(ev.TierAnswered(order.tier, order.search, held))
    for session in on.bench.machine.state.sessions:
        on.feed(ev.StepEnded(session))
    on.take(on.bench.work_off())


def test_who_waits_for_room_goes_on_though_anothers_reads_hang() -> None:
    on = shared()  # 32 blocks may be on their way
    for number in range(30):
        on.look(*range(100 * number, 100 * number + 16), request=f"r{number}")
    find_all(on)
    on.reads.clear()  # they hang
    on.look(*range(16), request="little", session=2)
    find_all(on)
    for first in (0, 8):
        (read,) = on.reads
        assert numbers_of(read.keys) == list(range(first, first + 8))
        on.read()
        on.take(on.bench.work_off())
    assert on.look(*range(16), request="little", session=2) == "H" * 16


def test_who_waits_for_room_of_others_has_a_turn_among_them() -> None:
    on = shared(tenants=4, promotion_share=2 / 128)  # two blocks, of which a tenant has one
    for number in range(30):
        for session in (1, 2, 3):
            on.look(number, request=f"r{number}", session=session)
    find_all(on)
    assert len(on.reads) == 2, "nothing is left for the third"
    on.look(7, request="little", session=4)
    find_all(on)
    for _ in range(4):
        on.read()
        on.take(on.bench.work_off())
    assert on.look(7, request="little", session=4) == "H"


def test_what_waits_to_be_written_has_a_turn_beside_much_of_another_tenant() -> None:
    on = shared(TierTerms("disk", max_write_bytes=16 * BLOCK), extents=16)
    on.store(*range(8))
    on.writes.clear()  # it hangs
    for number in range(100, 100 + 4 * CAUGHT_UP_AT_ONCE):
        on.store(number)
    on.store(*range(8), session=2)
    for numbers in (range(4), range(4, 8)):
        (write,) = on.writes
        assert numbers_of(write.keys) == list(numbers)
        on.write()
