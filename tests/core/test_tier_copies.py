"""What becomes of a copy whose end a tier tells wrongly, late or twice."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core import events as ev
from kvd.core.keys import TierId
from tests.core.test_tiers import stage


@pytest.mark.parametrize("length", [0, 1, 3])
def test_word_of_a_copy_of_another_length_means_that_it_failed(length: int) -> None:
    on = stage()
    on.store(1, 2)
    (order,) = on.writes
    well = np.ones(length, dtype=np.bool_)
    on.feed(ev.TierCopyEnded(order.tier, order.copy, well))
    assert (on.counters().written, on.counters().failed_writes) == (0, 2)
    on.feed(ev.TierCopyEnded(order.tier, order.copy, np.ones(2, dtype=np.bool_)))  # twice
    assert on.counters().written == 0
    on.writes.clear()
    on.order_up(1, 2)
    (read,) = on.reads
    on.feed(ev.TierCopyEnded(read.tier, read.copy, well))
    assert (on.counters().promoted, on.counters().failed_reads) == (0, 2)
    assert on.look(1, 2) == "MM"


def test_a_copy_that_nobody_knows_any_more_ends_without_a_word() -> None:
    on = stage()
    on.order_up(1)
    (read,) = on.reads
    on.feed(ev.TierGone(TierId(0)))
    on.take(on.bench.work_off())
    on.start()
    assert on.feed(ev.TierCopyEnded(read.tier, read.copy, np.ones(1, dtype=np.bool_))) == []
    assert on.look(1, request="later") == "P"
