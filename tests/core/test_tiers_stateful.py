"""Whatever tiers say, do late or lose, every invariant holds and no block is another's."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import MoverId, ScopeName, SessionId, TierId
from kvd.core.model.tiers import Reach, TierTerms, WriteWhen
from tests.core.bench import BLOCK, MS, keys, numbers_of, only
from tests.core.drawn import accounts, key_lists, sessions
from tests.core.test_machine_stateful import MachineRules

TIERS = (
    TierTerms("disk", Reach.DISK, WriteWhen.THROUGH, seek_ns=500 * MS, max_write_bytes=40 * BLOCK),
    TierTerms("far", Reach.CLUSTER, WriteWhen.REUSE, 2, 64, seek_ns=900 * MS),
    TierTerms("cold", Reach.CLUSTER, WriteWhen.DEMOTION, max_write_bytes=8 * BLOCK),
)
Copy = act.WriteToTier | act.ReadFromTier
Held = tuple[str, ScopeName, int]  # fingerprint, name, key


class TierRules(MachineRules):
    """The machine's rules, with three tiers whose processes come, go, fail and forget."""

    tiers = TIERS

    def __init__(self) -> None:
        super().__init__()
        self.held_below: dict[int, set[Held]] = {n: set() for n in range(len(TIERS))}
        self.asked: list[act.AskTier] = []
        self.copies: dict[int, Copy] = {}
        self.clears: list[act.ClearTier] = []
        self.serving: dict[int, int] = {}

    def feed(self, event: ev.Event) -> list[act.Action]:
        held = {slot: key for slot, (_, key) in self.bench.pool.ready.items()}
        actions = super().feed(event)
        self.asked += only(actions, act.AskTier)
        self.clears += only(actions, act.ClearTier)
        for order in actions:
            if isinstance(order, act.WriteReady):
                held |= zip(order.slots.tolist(), numbers_of(order.keys), strict=True)
            if isinstance(order, act.WriteToTier | act.ReadFromTier):
                # As of here: a row that goes may give a block up that is being written, and pinned.
                self.begin_copy(order, held)
        return actions

    def begin_copy(self, order: Copy, held: dict[int, int]) -> None:
        slots = set(order.slots.tolist())
        assert len(slots) == len(order.keys), "a slot is copied twice"
        self.must_be_apart(order, slots)
        self.copies[order.copy] = order
        if isinstance(order, act.WriteToTier):
            for slot, key in zip(order.slots.tolist(), numbers_of(order.keys), strict=True):
                assert held.get(slot) == key, "another's bytes"
        else:
            missing = {self.named(order.name, key) for key in numbers_of(order.keys)}
            assert not slots & self.bench.pool.ready.keys(), "a read into a READY slot"
            assert missing, "a read of nothing"

    def must_be_apart(self, order: Copy, slots: set[int]) -> None:
        """What is read into is nobody else's."""
        fills = isinstance(order, act.ReadFromTier)
        for other in self.copies.values():
            if fills or isinstance(other, act.ReadFromTier):
                assert not slots & set(other.slots.tolist()), "two copies of one slot"
        if fills:
            for transfer in self.bench.transfers.values():
                theirs = {s for part in transfer.parts for s in part.slots.tolist()}
                assert not slots & theirs, "a slot is read into before its copy has ended"

    def named(self, name: ScopeName, key: int) -> Held:
        """A tier names blocks without the numbers that this incarnation gave."""
        fingerprint = next(f for f, n in self.numbers.items() if n == name.namespace)
        return fingerprint, name._replace(namespace=0), key  # type: ignore[arg-type]

    # -- tiers ---------------------------------------------------------------------------------

    @rule(pick=st.integers(0, 2))
    def tier_starts(self, pick: int) -> None:
        if pick not in self.serving:
            self.next_id += 1
            self.serving[pick] = self.next_id
            self.feed(ev.TierStarted(TierId(pick), MoverId(self.next_id)))

    @rule(pick=st.integers(0, 20), loses=st.booleans())
    def tier_dies(self, pick: int, loses: bool) -> None:
        if pick not in self.serving:
            return
        mover = self.serving.pop(pick)
        self.asked = [each for each in self.asked if each.tier != pick]
        self.clears = [each for each in self.clears if each.tier != pick]
        self.copies = {n: each for n, each in self.copies.items() if each.tier != pick}
        self.unmaps = [order for order in self.unmaps if order.mover != mover]
        if loses:
            self.held_below[pick].clear()
        self.feed(ev.TierGone(TierId(pick)))

    @precondition(lambda self: self.asked)
    @rule(
        pick=st.integers(0, 20),
        lies=st.sampled_from(["", "", "", "all", "short", "refused", "failed"]),
    )
    def tier_answers(self, pick: int, lies: str) -> None:
        order = self.asked.pop(pick % len(self.asked))
        there = self.held_below[order.tier]
        held = np.array([self.named(order.name, n) in there for n in numbers_of(order.keys)])
        if lies == "all":
            held[:] = True
        refused = lies == "refused"
        held &= not refused
        held = held[: -1 if lies == "short" else None]
        failed = lies == "failed"
        self.feed(ev.TierAnswered(order.tier, order.search, held, refused, failed))

    @precondition(lambda self: self.copies)
    @rule(pick=st.integers(0, 20), failing=st.integers(0, 7), short=st.booleans())
    def tier_copies(self, pick: int, failing: int, short: bool) -> None:
        order = self.copies.pop(sorted(self.copies)[pick % len(self.copies)])
        self.end_copy(order, failing, short and failing == 0)

    def end_copy(self, order: Copy, failing: int, short: bool) -> None:
        numbers = numbers_of(order.keys)
        done = np.ones(len(numbers), dtype=np.bool_)
        if failing < 4:
            done[failing::4] = False
        there = self.held_below[order.tier]
        names = [self.named(order.name, number) for number in numbers]
        if isinstance(order, act.ReadFromTier):
            done &= np.array([name in there for name in names])
        refused = failing == 3
        done &= not refused
        if short:
            done = done[:-1]
        elif isinstance(order, act.WriteToTier):
            there |= {name for name, well in zip(names, done, strict=True) if well}
        damaged = np.zeros(len(done), dtype=np.bool_)
        if isinstance(order, act.WriteToTier) and failing == 2 and not short:
            damaged = ~done
        missing = ~done if failing == 1 else done[:0]
        self.feed(ev.TierCopyEnded(order.tier, order.copy, done, damaged, refused, missing))

    @precondition(lambda self: self.clears)
    @rule()
    def tier_clears(self) -> None:
        order = self.clears.pop(0)
        kept = {each for each in self.held_below[order.tier] if each[0] != order.fingerprint}
        self.held_below[order.tier] = kept
        self.feed(ev.TierCleared(order.tier, order.fingerprint))

    @rule(which=sessions, numbers=key_lists, account=accounts, pick=st.integers(0, 2))
    def tier_forgets(self, which: int, numbers: list[int], account: str, pick: int) -> None:
        if which not in self.ids or pick not in self.serving:
            return
        state = self.bench.machine.state
        session = state.sessions[SessionId(self.ids[which])]
        below = state.namespaces[session.namespace].cleared_below
        name = ScopeName(session.namespace, session.epoch, account, 0, below)
        self.held_below[pick] -= {self.named(name, number) for number in numbers}
        self.feed(ev.TierForgot(TierId(pick), name, keys(*numbers)))

    @rule(pick=st.integers(0, 2))
    def tier_is_in_doubt(self, pick: int) -> None:
        if pick in self.serving:
            self.feed(ev.TierDoubted(TierId(pick)))

    def end_all_copies(self) -> None:
        while self.copies:
            self.end_copy(self.copies.popitem()[1], 7, short=False)

    @rule(
        which=sessions,
        numbers=key_lists,
        account=accounts,
        others=st.sampled_from([0, 16, 48, 96]),
        ends=st.booleans(),
    )
    def a_request_comes_back(
        self, which: int, numbers: list[int], account: str, others: int, ends: bool
    ) -> None:
        """What was written to the first tier and evicted is found, brought up, and readable."""
        self.come_back(which)
        self.tier_starts(0)
        self.store(which, numbers, account, 0, whole=False, shift=0, later=[])
        self.finish_all()
        self.end_all_copies()
        for first in range(100, 100 + others, 16):
            self.store(which, list(range(first, first + 16)), "", 0, False, 0, [])
            self.finish_all()
            self.movers_and_pool_catch_up()
        self.end_all_copies()
        self.end_request(which, "back")
        for _ in range(4):
            self.look_up(which, numbers, account, "back", ev.LeaseMode.PREFIX)
            while self.asked:
                self.tier_answers(0, "")
            self.feed(ev.StepEnded(SessionId(self.ids[which])))
            self.work_off()
            if ends:
                self.end_all_copies()
        self.end_request(which, "back")

    def everything_ends(self) -> None:
        for pick in list(self.serving):
            self.tier_dies(pick, loses=False)
        super().everything_ends()
        below = self.bench.machine.state.below
        assert not below.copies
        assert not below.sought_of
        assert not below.promoting.whole
        assert not any(tier.writing.whole for tier in below.tiers)


TestTiers = TierRules.TestCase
TestTiers.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
