"""Damage among everything else: what a load found damaged is gone, and only that."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks.namespaces import is_cleared
from tests.core.bench import finished, numbers_of, only
from tests.core.drawn import key_lists, sessions
from tests.core.test_hand_offs_stateful import HandOffRules


class DamageRules(HandOffRules):
    """The rules of the whole machine, hand-offs, and bytes that change in the pool."""

    @rule(pick=st.integers(0, 100), places=st.sets(st.integers(0, 15), min_size=1, max_size=3))
    def find_damage(self, pick: int, places: set[int]) -> None:
        """A load finds that some of its blocks don't hold what was stored."""
        loads = sorted(n for n, o in self.bench.transfers.items() if o.kind is ev.JobKind.LOAD)
        if not loads:
            return
        order = self.bench.transfers.pop(loads[pick % len(loads)])
        slots = [slot for part in order.parts for slot in part.slots.tolist()]
        damaged = tuple(slots[place] for place in places if place < len(slots))
        there = {slot for slot in damaged if slot in self.bench.pool.ready and self.is_held(slot)}
        failed = finished(order, ev.TransferOutcome.FAILED)
        news = only(self.feed(replace(failed, damaged=damaged)), act.AnnounceRemoved)
        assert sum(len(each.keys) for each in news) >= len(there), "not the damaged ones went"
        assert not there & self.bench.pool.ready.keys(), "a damaged block is still READY"
        for each in news:
            self.lose(each)

    def is_held(self, slot: int) -> bool:
        """Whether anybody may be told of the block: not since a clear, which told its end."""
        state = self.bench.machine.state
        scope = state.scope_of(slot)
        return not is_cleared(state, state.scopes[scope].namespace, scope)

    def lose(self, news: act.AnnounceRemoved) -> None:
        """Nobody is promised these blocks any more."""
        gone = set(numbers_of(news.keys)) if news.group == 0 else set()
        fingerprint = self.bench.machine.state.namespaces[news.namespace].spec.fingerprint
        for _, where, account, numbers in self.held.values():
            if (where, account) == (f"{fingerprint}/{news.epoch}", news.account):
                numbers[:] = [number for number in numbers if number not in gone]
        lost = {(int(news.namespace), news.epoch, news.account, number) for number in gone}
        for _, blocks in self.promised.values():
            blocks.difference_update(lost)

    @rule(which=sessions, numbers=key_lists, places=st.sets(st.integers(0, 15), max_size=2))
    def store_load_and_find_damage(self, which: int, numbers: list[int], places: set[int]) -> None:
        """So that there is something to find in most runs."""
        self.come_back(which)
        self.finish_all()
        self.store(which, numbers, "", 0, False, 0, [])
        self.finish_all()
        self.look_up(which, numbers, "", "q", ev.LeaseMode.ALL)
        there = [n for n in numbers if n in self.resident(which, "")]
        if there:
            self.load(which, there, "", False)
        self.find_damage(0, places)


DamageRules.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestDamage = DamageRules.TestCase
