"""A class whose policy is `auto` switches in the middle of work, and everybody can see it."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import actions as act
from kvd.core.events import LeaseMode
from kvd.core.keys import NamespaceId
from kvd.core.policy.duel import Duel
from tests.core.bench import small
from tests.core.replaying import replay


def test_switch_is_an_order_a_count_and_a_figure_and_loses_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = small(extents=1, policy="auto")
    bench.open()
    bench.stored(range(16))
    assert bench.machine.statistics().policies == {"turns": 1}
    monkeypatch.setattr(Duel, "better_than", lambda _, live: "arc" if live == "turns" else None)
    bench.stored(range(100, 104))
    notes = [a for done in bench.history for a in done if isinstance(a, act.NotePolicySwitch)]
    assert notes == [act.NotePolicySwitch(NamespaceId(1), 0, "turns", "arc")]
    assert str(notes[0]) == "namespace 1, group 0: evicts by arc now, which finds more than turns"
    figures = bench.machine.statistics()
    assert figures.counters.policy_switches == 1
    assert figures.policies == {"arc": 1}
    assert bench.statuses([*range(16), *range(100, 104)]) == "H" * 12 + "M" * 4 + "H" * 4
    replay(bench)


def test_lease_holds_over_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = small(extents=1, policy="auto", lease_share=1.0)
    bench.open()
    bench.stored(range(16))
    answer = bench.lookup(range(4), lease=LeaseMode.PREFIX)
    assert answer.lease is not None
    monkeypatch.setattr(Duel, "better_than", lambda _, live: "s3fifo" if live == "turns" else None)
    for first in range(100, 160, 6):
        bench.stored(range(first, first + 6))
    assert bench.statuses(range(4)) == "HHHH"
    bench.release(answer.lease)


class _Unwalked(dict[Any, Any]):
    """Of which some may be taken, and nobody goes through all: there are tens of thousands."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody goes through all size classes")

    keys = values = items = __iter__


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_figures_go_through_no_size_class(policy: str) -> None:
    bench = small(extents=1, policy=policy)
    bench.open()
    bench.stored(range(16))
    bench.machine.state.classes = _Unwalked(bench.machine.state.classes)
    figures = bench.machine.statistics()
    assert figures.policies == ({"turns": 1} if policy == "auto" else {})
    assert figures.slots.ready == 16
