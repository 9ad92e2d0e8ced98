"""The policy `auto`: a switch in the middle of work, what it costs, and what may cause one."""

from __future__ import annotations

from itertools import cycle, permutations

import numpy as np
import numpy.typing as npt
import pytest

from kvd.core.keys import Slots
from kvd.core.policy import POLICY_NAMES, AutoPolicy, PolicyMemory, Sight, make_policy
from kvd.core.policy import auto as module
from kvd.core.policy.auto import DUELLISTS
from kvd.core.policy.duel import MAX_SHADOW_BLOCKS, SHADOWED_AT_ONCE, Duel, Shadow

SLOTS = 512


def auto(capacity: int = 64, first: str = "turns") -> AutoPolicy:
    return AutoPolicy(lambda: capacity, PolicyMemory(SLOTS), make_policy, first)


def batch(*slots: int) -> Slots:
    return np.array(slots, np.int64)


def tags_of(slots: Slots) -> npt.NDArray[np.uint64]:
    return slots.astype(np.uint64) + np.uint64(7)


def all_may_go(slots: Slots) -> npt.NDArray[np.bool_]:
    return np.ones(slots.size, np.bool_)


def switch(policy: AutoPolicy, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the duel had found so, at the next eviction."""
    monkeypatch.setattr(Duel, "better_than", lambda _, live: to if live != to else None)
    assert policy.evict(0, all_may_go) is not None


def test_every_policy_takes_part() -> None:
    assert {*DUELLISTS, "auto"} == set(POLICY_NAMES)


@pytest.mark.parametrize(("before", "after"), list(permutations(DUELLISTS, 2)))
def test_switch_moves_no_block_and_what_was_there_leaves_first(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = auto(first=before)
    policy.insert(np.arange(40), tags_of(np.arange(40)), Sight(1, 1))
    policy.touch(batch(1, 2, 3), Sight(2, 2))
    order = policy.coldest(100).tolist()
    switch(policy, after, monkeypatch)
    assert policy.live_name == after
    assert policy.coldest(100).tolist() == order
    policy.insert(batch(50, 51), tags_of(batch(50, 51)), Sight(3, 3, parent=3))
    policy.touch(batch(5, 6, 5), Sight(4, 4))
    victims = policy.evict(38, all_may_go)
    assert victims is not None
    assert not {5, 6, 50, 51} & set(victims.tolist())
    assert sorted(policy.coldest(100).tolist()) == [5, 6, 50, 51]
    assert len(policy) == 4


@pytest.mark.parametrize("name", DUELLISTS)
def test_without_a_switch_blocks_leave_as_by_its_policy_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Duel, "better_than", lambda _, live: None)
    rng = np.random.default_rng(5)
    policies = (auto(first=name), make_policy(name, lambda: 64, PolicyMemory(SLOTS)))
    held: list[int] = []
    for step in range(1, 120):
        sight = Sight(step << 26, step // 3)
        fresh = rng.choice(np.setdiff1d(np.arange(SLOTS), held), 6, replace=False)
        used = rng.choice(held, 5) if held else batch()
        as_use = bool(step % 4)
        surplus = max(0, len(held) + fresh.size - 64)
        victims: list[Slots] = []
        for policy in policies:
            if step % 50 == 0:
                policy.forget_gone()
            evicted = policy.evict(surplus, lambda slots: slots % 7 > 0, sight.now_ns)
            assert evicted is not None
            victims.append(evicted)
            left = np.setdiff1d(used, victims[-1])
            policy.missed(tags_of(fresh % 40))
            policy.insert(fresh, tags_of(fresh % 40), sight)
            policy.touch(left, sight, as_use=as_use)
            policy.remove(left[:1])
        assert victims[0].tolist() == victims[1].tolist()
        gone = {*victims[0].tolist(), *left[:1].tolist()}
        held = [slot for slot in (*held, *fresh.tolist()) if slot not in gone]
        assert policies[0].coldest(SLOTS).tolist() == policies[1].coldest(SLOTS).tolist()
        assert len(policies[0]) == len(policies[1]) == len(held)


@pytest.mark.parametrize("seed", range(8))
def test_contract_holds_whatever_is_switched_when(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    names = cycle(rng.permutation(DUELLISTS).tolist())
    policy, known, switches = auto(), set[int](), 0
    monkeypatch.setattr(
        Duel,
        "better_than",
        lambda _, live: next(n for n in names if n != live) if rng.random() < 0.3 else None,
    )
    for step in range(300):
        sight = Sight(step * 10**9, step)
        free = [slot for slot in range(64) if slot not in known]
        if free:
            new = rng.permutation(free)[: int(rng.integers(1, 12))]
            policy.insert(new, rng.integers(1, 200, new.size).astype(np.uint64), sight)
            known |= set(new.tolist())
        used = rng.choice(sorted(known), int(rng.integers(0, 12)))
        policy.touch(used, sight, as_use=bool(rng.integers(2)))
        gone = rng.permutation(sorted(known))[: int(rng.integers(0, 4))]
        policy.remove(gone)
        known -= set(gone.tolist())
        pinned = rng.permutation(64)[: int(rng.integers(0, 50))]
        count = int(rng.integers(0, 16))
        victims = policy.evict(count, lambda slots, pins=pinned: ~np.isin(slots, pins))  # type: ignore[misc]
        if victims is None:
            assert count > len(known - set(pinned.tolist()))
        else:
            assert victims.size == count == len(set(victims.tolist()))
            assert set(victims.tolist()) <= known - set(pinned.tolist())
            known -= set(victims.tolist())
        switches += policy.take_switch() is not None
        assert len(policy) == len(known)
        assert sorted(policy.coldest(100).tolist()) == sorted(known)
    assert switches > 10, "no switch came in between, so nothing was shown"


def ask(policy: AutoPolicy, slot_of: dict[int, int], prompt: list[int], request: int) -> None:
    """A request of these blocks, in a pool of 64 slots."""
    sight = Sight(request * 10**9, request)
    here = batch(*(slot_of[block] for block in prompt if block in slot_of))
    missing = [block for block in prompt if block not in slot_of]
    policy.touch(here, sight)
    short = len(slot_of) + len(missing) - 64
    if short > 0:
        victims = policy.evict(short, lambda slots: ~np.isin(slots, here), sight.now_ns)
        assert victims is not None
        for block in [b for b, slot in slot_of.items() if slot in set(victims.tolist())]:
            del slot_of[block]
    free = [slot for slot in range(64) if slot not in slot_of.values()][: len(missing)]
    slot_of.update(zip(missing, free, strict=True))
    policy.insert(batch(*free), np.array(missing, np.uint64), sight)


def test_policy_that_finds_clearly_more_takes_over() -> None:
    """A few blocks come back behind many that never do: LRU finds nothing of them."""
    policy, slot_of, rng = auto(first="lru"), dict[int, int](), np.random.default_rng(3)
    fresh = 1000
    for request in range(1, 1500):
        ask(policy, slot_of, [int(rng.integers(1, 40))], 2 * request)
        ask(policy, slot_of, list(range(fresh, fresh + 4)), 2 * request + 1)
        fresh += 4
    assert policy.live_name != "lru"


def test_traffic_on_which_all_find_the_same_switches_nothing() -> None:
    policy, slot_of = auto(first="lru"), dict[int, int]()
    for request in range(1, 400):
        ask(policy, slot_of, list(range(4 * request, 4 * request + 4)), request)
    assert policy.live_name == "lru"
    assert policy.take_switch() is None


def test_traffic_of_one_class_sways_no_other_s_duel() -> None:
    memory = PolicyMemory(SLOTS)
    one, other = (AutoPolicy(lambda: 64, memory, make_policy, "lru") for _ in range(2))
    slots = np.arange(100, 164)
    other.insert(slots, tags_of(slots), Sight(1, 1))
    slot_of: dict[int, int] = {}
    rng, fresh = np.random.default_rng(3), 1000
    for request in range(1, 600):
        ask(one, slot_of, [int(rng.integers(1, 40))], 2 * request)
        ask(one, slot_of, list(range(fresh, fresh + 4)), 2 * request + 1)
        fresh += 4
    order = other.coldest(64).tolist()
    assert other.evict(10, all_may_go) is not None
    assert (other.live_name, other.take_switch()) == ("lru", None)
    assert other.coldest(64).tolist() == order[10:]


@pytest.mark.parametrize("slots", [1, 2, 255, 256, 10_000, 1_000_000, 100_000_000])
def test_shadows_are_bounded_however_large_the_class(slots: int) -> None:
    duel = Duel(("lru", "s3fifo"), lambda: slots, make_policy)
    assert duel.shadow_slots == 0
    duel.fit()
    assert 1 <= max(1, duel.shadow_slots) <= min(slots, MAX_SHADOW_BLOCKS)


def test_no_request_shows_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    duel = Duel(("lru",), lambda: 4 * SHADOWED_AT_ONCE, make_policy)
    duel.fit()
    duel._below = 1 << 16  # all blocks are in the sample
    duel._made_for = 2 * SHADOWED_AT_ONCE

    def show(_: Shadow, tags: npt.NDArray[np.uint64], __: Sight) -> int:
        shown.append(int(tags.size))
        return 0

    monkeypatch.setattr(Shadow, "show", show)
    tags = np.arange(1, 5000, dtype=np.uint64)
    duel.use(tags, np.zeros(tags.size, np.uint16), Sight(1, 1))
    duel.use(tags[:1], np.zeros(1, np.uint16), Sight(1, 2))
    assert shown == [SHADOWED_AT_ONCE]


def test_a_request_that_uses_its_blocks_for_ever_takes_no_more_memory() -> None:
    duel = Duel(("lru",), lambda: 64, make_policy)
    duel.fit()
    tags, marks = np.arange(1, 33, dtype=np.uint64), np.zeros(32, np.uint16)
    for _ in range(1000):
        duel.use(tags, marks, Sight(1, 1))
    assert sum(each.size for each in duel._under_way) == 64


def test_window_counts_what_each_of_its_requests_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One policy finds much at first, the other a little at last, as each window goes."""
    slots = 64
    duel = Duel(("lru", "s3fifo"), lambda: slots, make_policy)
    duel.fit()
    (first, _) = duel._shadows
    shows = [0, 0]

    def show(shadow: Shadow, tags: npt.NDArray[np.uint64], __: Sight) -> int:
        number = int(shadow is not first)
        shows[number] += 1
        begins = shows[number] % 2 == 1
        return (16 if begins else 0) if number == 0 else (0 if begins else 4)

    monkeypatch.setattr(Shadow, "show", show)
    half = np.arange(1, slots // 2 + 1, dtype=np.uint64)
    for request in range(1, 42):
        assert duel.better_than("lru") is None
        duel.use(half, np.zeros(half.size, np.uint16), Sight(request, request))
    assert shows == [40, 40], "each request is shown once the next one has come"
    assert duel.better_than("s3fifo") == "lru"


@pytest.mark.parametrize(("more", "noise", "winner"), [(1, 20, None), (1, 0, None), (3, 0, "lru")])
def test_only_more_than_chance_and_a_hundredth_wins(
    more: int, noise: int, winner: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One policy finds so many more in each window than the other, which finds 200 or so."""
    slots = 64
    duel = Duel(("s3fifo", "lru"), lambda: slots, make_policy)
    duel.fit()
    (_, better) = duel._shadows
    rng = np.random.default_rng(1)

    def show(shadow: Shadow, *_: object) -> int:
        return 200 + int(rng.integers(0, noise + 1)) + more * (shadow is better)

    monkeypatch.setattr(Shadow, "show", show)
    whole = np.arange(1, slots + 1, dtype=np.uint64)
    for request in range(1, 32):
        duel.use(whole, np.zeros(whole.size, np.uint16), Sight(request, request))
    assert duel.better_than("s3fifo") == winner
    assert duel.better_than("lru") is None


@pytest.mark.parametrize(("requests", "winner"), [(16, None), (17, None), (18, "lru")])
def test_what_a_switch_costs_must_have_been_missed_first(
    requests: int, winner: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks more in each window: after 17 they are more than half of 64, not before."""
    monkeypatch.setattr("kvd.core.policy.duel.WINDOW_KEPT", 1.0)
    slots = 64
    duel = Duel(("s3fifo", "lru"), lambda: slots, make_policy)
    duel.fit()
    (_, better) = duel._shadows
    monkeypatch.setattr(Shadow, "show", lambda shadow, *_: 10 + 2 * (shadow is better))
    whole = np.arange(1, slots + 1, dtype=np.uint64)
    for request in range(1, requests + 1):
        duel.use(whole, np.zeros(whole.size, np.uint16), Sight(request, request))
    assert duel.better_than("s3fifo") == winner


def test_segment_is_in_the_sample_again_when_it_comes_back_in_other_batches() -> None:
    tags = np.random.default_rng(1).integers(1, 1 << 62, 200, np.uint64)
    whole = Duel.marks_of(tags, -1)
    first = Duel.marks_of(tags[:77], -1)
    rest = Duel.marks_of(tags[77:], int(first[-1]))
    assert whole.tolist() == [*first.tolist(), *rest.tolist()]
    assert 5 < len(set(whole.tolist())) < 60


@pytest.mark.parametrize("first", DUELLISTS)
def test_cleared_class_begins_anew(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each policy remembers of blocks that left, the one from before too, and the duel's."""
    policy = auto(first=first)
    policy.insert(np.arange(40), tags_of(np.arange(40)), Sight(1, 1))
    switch(policy, next(name for name in DUELLISTS if name != first), monkeypatch)
    before, live, duel = policy._before, policy._live, policy._duel
    forgotten: list[object] = []

    def forget_gone(self: object) -> None:
        forgotten.append(self)

    for one in (before, live):
        monkeypatch.setattr(type(one), "forget_gone", forget_gone)
    assert duel.shadow_slots > 0
    policy.forget_gone()
    assert forgotten == [live, before]
    assert duel.shadow_slots == 0
    assert len(policy) == 40, "what is there stays"


def test_block_that_leaves_after_a_switch_leaves_whichever_policy_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = auto(first="lru")
    policy.insert(np.arange(10), tags_of(np.arange(10)), Sight(1, 1))
    switch(policy, "s3fifo", monkeypatch)
    policy.insert(batch(20, 21), tags_of(batch(20, 21)), Sight(2, 2))
    policy.remove(batch(3, 20, 4))
    assert sorted(policy.coldest(100).tolist()) == [0, 1, 2, 5, 6, 7, 8, 9, 21]
    assert len(policy) == 9
    policy.remove(batch(0, 1, 2, 5, 6, 7, 8, 9))
    assert policy.coldest(100).tolist() == [21]
    assert policy._before is None, "it has nothing left"


def test_many_blocks_of_before_that_may_not_go_are_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MANY_BLOCKS", 32)
    policy = auto(capacity=200, first="lru")
    policy.insert(np.arange(80), tags_of(np.arange(80)), Sight(1, 1))
    switch(policy, "arc", monkeypatch)
    policy.insert(np.arange(100, 140), tags_of(np.arange(100, 140)), Sight(2, 2))
    pinned, looks = {*range(80)}, []

    def may_go(slots: Slots) -> npt.NDArray[np.bool_]:
        looks.append(len(pinned.intersection(slots.tolist())))
        return np.array([slot not in pinned for slot in slots.tolist()], np.bool_)

    gone = [policy.evict(1, may_go) for _ in range(22)]
    assert all(slots is not None and slots[0] >= 100 for slots in gone)
    assert sum(looks) <= 2 * 3 * 80, "at the first, and after ten of them each"
    pinned.clear()
    gone = [policy.evict(1, may_go) for _ in range(11)]
    last = gone[-1]
    assert last is not None
    assert last[0] < 80, "it is asked again"
