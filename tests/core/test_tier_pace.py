"""A tier that is slow now is not asked for what could not arrive in time, and is tried again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvd.core import events as ev
from kvd.core.keys import MoverId, TenantId, TierId
from kvd.core.model.tiers import TierTerms
from kvd.core.tiers.pace import PROBE_NS, SILENT_NS
from tests.core.bench import MS, SECOND, spec
from tests.core.test_tiers import DISK, FAR, Stage, stage

NUMBERS = tuple(range(1, 5))
TENANT = TenantId("tenant")


def ready(*rules: TierTerms) -> Stage:
    """Blocks 1 to 4 lie below, and nothing has been sought yet."""
    on = stage(*rules)
    on.bring_down(*NUMBERS)
    return on


def ask(on: Stage, request: str, took_ns: int) -> str:
    """What a new request hears at first; if the tier is asked, it answers after that time."""
    heard = on.look(*NUMBERS, request=request)
    on.bench.now_ns += took_ns
    on.answer()
    return heard


def read_slowly(on: Stage, took_ns: int, times: int) -> None:
    """Requests whose blocks come after that time, and are evicted again."""
    for number in range(times):
        ask(on, f"slow {number}", MS)
        on.step()
        on.bench.now_ns += took_ns
        on.read()
        on.evict_all()


def pause(on: Stage) -> None:
    """Until the tier may be tried again."""
    on.bench.now_ns += PROBE_NS


def test_a_tier_that_answers_too_late_is_not_asked_and_its_blocks_are_misses_at_once() -> None:
    on = ready()
    assert [ask(on, f"r{number}", DISK.seek_ns) for number in range(3)] == ["PPPP"] * 3
    assert on.look(*NUMBERS, request="tries") == "PPPP"
    assert len(on.asked) == 1
    for number in range(5):
        assert on.look(*NUMBERS, request=f"now {number}") == "MMMM"
    assert len(on.asked) == 1
    assert on.counters().too_slow == 20


def test_a_few_late_answers_are_enough_and_one_alone_is_not() -> None:
    on = ready()
    assert ask(on, "first", DISK.seek_ns) == "PPPP"
    assert ask(on, "second", DISK.seek_ns) == "PPPP"
    late = 2
    while on.bench.machine.state.below.tiers[0].pace_for(TENANT).answer_ns <= DISK.seek_ns:
        ask(on, f"r{late}", DISK.seek_ns)
        late += 1
    assert late <= 5


def test_one_request_at_a_time_tries_it_and_a_good_answer_stands_alone() -> None:
    on = ready()
    for number in range(6):
        ask(on, f"slow {number}", DISK.seek_ns)
    pause(on)
    assert on.look(*NUMBERS, request="tries") == "PPPP"
    assert on.look(*NUMBERS, request="waits for nobody") == "MMMM"
    on.bench.now_ns += MS
    on.answer()
    assert on.look(*NUMBERS, request="afterwards") == "PPPP"
    assert on.bench.machine.state.below.tiers[0].pace_for(TENANT).answer_ns == MS


def test_a_tier_that_reads_too_slowly_is_not_asked_either() -> None:
    on = ready()
    read_slowly(on, 3 * DISK.seek_ns, 8)
    on.bench.now_ns += PROBE_NS
    assert ask(on, "tries", MS) == "PPPP"
    on.step()
    assert on.reads, "who tries reads as well"
    assert on.look(10, request="another") == "M"
    on.bench.now_ns += MS
    on.read()
    assert on.look(11, request="afterwards") == "P"


def test_while_a_copy_hangs_nothing_is_begun_that_would_wait_longer() -> None:
    on = ready()
    ask(on, "hangs", MS)
    on.step()
    (hanging,) = on.reads
    on.bench.now_ns += DISK.seek_ns + MS
    on.look(20, request="tries")
    assert on.look(21, request="another") == "M"
    on.read()
    assert on.look(22, request="not yet") in ("M", "P")
    assert hanging.copy not in on.bench.machine.state.below.tiers[0].pace_for(TENANT).reads


def test_what_was_found_is_not_read_once_it_would_come_too_late() -> None:
    on = ready()
    assert ask(on, "finds", MS) == "PPPP"
    pace = on.bench.machine.state.below.tiers[0].pace_for(TENANT)
    pace.read_ns = 2 * DISK.seek_ns
    pace.probe_ns = on.bench.now_ns + SECOND
    on.step()
    assert not on.reads
    assert on.look(*NUMBERS, request="finds") == "MMMM"
    assert on.counters().too_slow == 4


def test_the_next_tier_is_asked_at_once_where_the_first_is_slow() -> None:
    on = ready(DISK, FAR)
    on.bench.machine.state.below.tiers[0].pace_for(TENANT).answer_ns = 10 * DISK.seek_ns
    on.bench.machine.state.below.tiers[0].pace_for(TENANT).probe_ns = on.bench.now_ns + SECOND
    assert on.look(*NUMBERS) == "PPPP"
    assert [order.tier for order in on.asked] == [1]


def test_a_tier_that_owes_an_answer_is_asked_after_the_others() -> None:
    on = ready(DISK, FAR)
    on.held[1].clear()
    assert on.look(*NUMBERS, request="first") == "PPPP"
    on.bench.now_ns += SILENT_NS - 1
    on.look(*NUMBERS, request="soon after")
    on.bench.now_ns += 1
    assert on.look(*NUMBERS, request="later") == "PPPP"
    assert [order.tier for order in on.asked] == [0, 0, 1]
    hanging, on.asked = on.asked[:2], on.asked[2:]
    on.feed(ev.TierAnswered(TierId(1), on.asked.pop().search, np.zeros(4, dtype=np.bool_)))
    assert [order.tier for order in on.asked] == [0], "nowhere else: so it is waited for"
    on.asked += hanging
    on.answer()
    assert on.look(*NUMBERS, request="at last") == "PPPP"
    assert [order.tier for order in on.asked] == [0]


def test_where_all_tiers_owe_an_answer_each_is_asked_once() -> None:
    on = ready(DISK, FAR)
    on.look(*NUMBERS, request="first")
    on.bench.now_ns += SILENT_NS
    on.look(*NUMBERS, request="second")
    on.bench.now_ns += SILENT_NS
    assert on.look(*NUMBERS, request="third") == "PPPP"
    assert [order.tier for order in on.asked] == [0, 1, 0]


def test_what_one_tenant_waits_for_says_nothing_of_another() -> None:
    on = ready()
    on.bench.open(2, spec("ns 2", "other"))
    assert [ask(on, f"r{number}", DISK.seek_ns) for number in range(6)][:3] == ["PPPP"] * 3
    on.look(*NUMBERS, request="tries")
    assert on.look(*NUMBERS, request="slow") == "MMMM"
    assert on.look(*NUMBERS, request="beside", session=2) == "PPPP"
    tier = on.bench.machine.state.below.tiers[0]
    assert tier.paces[TENANT].answer_ns > DISK.seek_ns
    on.bench.now_ns += MS
    on.answer()
    assert tier.paces[TenantId("other")].answer_ns < MS


def test_while_one_tenants_copy_hangs_another_is_not_kept_from_the_tier() -> None:
    on = ready()
    on.bench.open(2, spec("ns 2", "other"))
    ask(on, "hangs", MS)
    on.step()
    on.bench.now_ns += DISK.seek_ns + MS
    on.look(20, request="tries")
    assert on.look(21, request="another") == "M"
    assert on.look(*NUMBERS, request="beside", session=2) == "PPPP"


def test_a_late_answer_leaves_nothing_of_a_tenant_that_is_forgotten() -> None:
    on, other = ready(), TenantId("other")
    on.feed(ev.QuotaSet(1, other, 0))
    on.bench.open(2, replace(spec("ns 2", "other"), unshared=True))
    assert on.look(*NUMBERS, session=2) == "PPPP"
    on.feed(ev.QuotaSet(2, other, 0, named=False))
    on.bench.leave(2, gone=True)
    on.tick(MS)
    assert other not in on.bench.machine.state.tenants
    on.answer()
    assert other not in on.bench.machine.state.below.tiers[0].paces


def test_another_process_is_another_pace() -> None:
    on = ready()
    on.bench.machine.state.below.tiers[0].pace_for(TENANT).answer_ns = 10 * DISK.seek_ns
    on.feed(ev.TierGone(TierId(0)))
    on.feed(ev.TierStarted(TierId(0), MoverId(9100)))
    assert on.look(*NUMBERS) == "PPPP"


@pytest.mark.parametrize("kind", ["question", "copy"])
def test_what_a_process_refuses_says_nothing_of_its_pace(kind: str) -> None:
    on = ready()
    pace = on.bench.machine.state.below.tiers[0].pace_for(TENANT)
    ask(on, "first", 100 * MS)
    before = pace.answer_ns, pace.read_ns
    if kind == "question":
        on.look(*NUMBERS, request="refused")
        (order,) = on.asked
        on.asked.clear()
        no = [False] * len(NUMBERS)
        on.feed(ev.TierAnswered(TierId(0), order.search, np.array(no), refused=True))
        assert on.look(*NUMBERS, request="refused") == "MMMM"
    else:
        on.step()
        (read,) = on.reads
        on.reads.clear()
        no = [False] * len(NUMBERS)
        on.feed(ev.TierCopyEnded(TierId(0), read.copy, np.array(no), refused=True))
        assert on.look(*NUMBERS, request="first") == "MMMM"
    assert (pace.answer_ns, pace.read_ns) == before
    assert on.counters().refused == 4
    assert not pace.reads


def test_a_read_that_fails_at_once_makes_a_tier_no_faster() -> None:
    on = ready()
    pace = on.bench.machine.state.below.tiers[0].pace_for(TENANT)
    pace.read_ns = 100 * MS
    ask(on, "fails", MS)
    on.step()
    on.read(failing=NUMBERS)
    assert pace.read_ns == 100 * MS
