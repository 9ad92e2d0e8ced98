"""What every eviction policy keeps, and that the array versions decide as plain ones would."""

from __future__ import annotations

import gc
import mmap
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.core.keys import Slots
from kvd.core.policy import POLICY_NAMES, ArcPolicy, EvictionPolicy, PolicyMemory, make_policy
from kvd.core.policy.ghosts import GHOSTS_MAX, Ghosts
from tests.contract.policy_references import REFERENCES, ReferenceArc

MAX_SLOTS = 4096


def batch(*slots: int) -> Slots:
    return np.array(slots, dtype=np.int64)


def span(first: int, count: int) -> Slots:
    return np.arange(first, first + count, dtype=np.int64)


def insert(policy: EvictionPolicy, slots: Slots, first_tag: int = 1000) -> None:
    policy.insert(slots, slots.astype(np.uint64) + np.uint64(first_tag))


def all_may_go(slots: Slots) -> npt.NDArray[np.bool_]:
    return np.ones(slots.size, dtype=np.bool_)


def none_may_go(slots: Slots) -> npt.NDArray[np.bool_]:
    return np.zeros(slots.size, dtype=np.bool_)


def all_but(*pinned: int) -> Callable[[Slots], npt.NDArray[np.bool_]]:
    return lambda slots: ~np.isin(slots, pinned)


def not_in(pinned: set[int]) -> Callable[[int], bool]:
    return lambda slot: slot not in pinned


def evicted(policy: EvictionPolicy, count: int) -> list[int]:
    victims = policy.evict(count, all_may_go)
    assert victims is not None
    return [int(slot) for slot in victims]


@pytest.fixture(params=POLICY_NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    """A policy whose class owns 100 slots."""
    return make_policy(request.param, lambda: 100, PolicyMemory(MAX_SLOTS))


def test_new_policy_has_nothing_to_evict(policy: EvictionPolicy) -> None:
    assert policy.evict(1, all_may_go) is None
    assert policy.coldest(5).size == 0


def test_evicting_nothing_is_an_empty_batch_even_when_all_are_pinned(
    policy: EvictionPolicy,
) -> None:
    insert(policy, span(0, 5))
    victims = policy.evict(0, none_may_go)
    assert victims is not None
    assert victims.size == 0


def test_every_known_slot_can_be_evicted_once(policy: EvictionPolicy) -> None:
    insert(policy, span(0, 60))
    policy.touch(span(10, 30))
    assert sorted(evicted(policy, 60)) == list(range(60))
    assert policy.evict(1, all_may_go) is None


def test_eviction_is_all_or_nothing(policy: EvictionPolicy) -> None:
    insert(policy, span(0, 10))
    before = policy.coldest(10).tolist()
    assert policy.evict(11, all_may_go) is None
    assert policy.evict(9, all_but(3, 7)) is None
    assert policy.coldest(10).tolist() == before
    assert sorted(evicted(policy, 10)) == list(range(10))


def test_pinned_slots_are_never_victims(policy: EvictionPolicy) -> None:
    insert(policy, span(0, 50))
    policy.touch(span(20, 10))
    victims = policy.evict(40, all_but(*range(0, 50, 5)))
    assert victims is not None
    assert sorted(victims.tolist()) == [slot for slot in range(50) if slot % 5]
    assert policy.evict(1, all_but(*range(50))) is None
    assert sorted(evicted(policy, 10)) == list(range(0, 50, 5))


def test_tail_of_a_batch_leaves_before_its_head(policy: EvictionPolicy) -> None:
    insert(policy, batch(5, 3, 9, 1))
    assert evicted(policy, 2) == [1, 9]
    assert evicted(policy, 2) == [3, 5]


def test_tail_of_a_touched_batch_leaves_before_its_head(policy: EvictionPolicy) -> None:
    insert(policy, batch(5, 3, 9, 1))
    policy.touch(batch(5, 3, 9, 1))
    order = evicted(policy, 4)
    assert order == [1, 9, 3, 5]


def test_batch_made_young_leaves_tail_first_behind_the_others(policy: EvictionPolicy) -> None:
    insert(policy, batch(5, 3))
    insert(policy, batch(9, 1))
    policy.touch(batch(5, 3), as_use=False)
    assert evicted(policy, 4) == [1, 9, 3, 5]


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_block_made_young_is_not_taken_for_one_used_again(name: str) -> None:
    policy = make_policy(name, lambda: 100, PolicyMemory(MAX_SLOTS))
    insert(policy, span(0, 50))
    policy.touch(span(0, 10))
    policy.touch(span(0, 10))
    for _ in range(3):
        policy.touch(span(10, 40), as_use=False)
    assert set(evicted(policy, 40)) == set(range(10, 50))


def test_a_scan_of_new_blocks_evicts_the_older_scan_first(policy: EvictionPolicy) -> None:
    insert(policy, span(0, 50))
    insert(policy, span(50, 50))
    assert set(evicted(policy, 50)) == set(range(50))


def test_removed_slots_are_neither_victims_nor_cold(policy: EvictionPolicy) -> None:
    insert(policy, span(0, 20))
    policy.touch(span(5, 5))
    policy.remove(batch(0, 7, 19))
    assert set(policy.coldest(100).tolist()) == set(range(20)) - {0, 7, 19}
    assert set(evicted(policy, 17)) == set(range(20)) - {0, 7, 19}


def test_a_slot_serves_again_after_it_left(policy: EvictionPolicy) -> None:
    for round_number in range(30):
        insert(policy, span(0, 100), first_tag=1000 * round_number)
        policy.touch(span(0, 50))
        assert sorted(evicted(policy, 100)) == list(range(100))


def test_coldest_names_known_slots_pinned_or_not_and_changes_nothing(
    policy: EvictionPolicy,
) -> None:
    insert(policy, span(0, 40))
    policy.touch(span(30, 10))
    first = policy.coldest(15).tolist()
    assert len(set(first)) == 15
    assert policy.coldest(15).tolist() == first
    assert policy.coldest(100).size == 40


def test_a_batch_may_touch_a_slot_twice(policy: EvictionPolicy) -> None:
    insert(policy, span(0, 10))
    policy.touch(batch(3, 4, 3, 3))
    assert sorted(evicted(policy, 10)) == list(range(10))


ILLEGAL_CALLS: dict[str, Callable[[EvictionPolicy], None]] = {
    "insert twice": lambda policy: insert(policy, batch(9, 10)),
    "insert a batch that names a slot twice": lambda policy: insert(policy, batch(11, 11)),
    "touch unknown": lambda policy: policy.touch(batch(3, 11)),
    "make unknown young": lambda policy: policy.touch(batch(3, 11), as_use=False),
    "remove unknown": lambda policy: policy.remove(batch(11)),
}


@pytest.mark.parametrize("call", ILLEGAL_CALLS.values(), ids=ILLEGAL_CALLS)
def test_slots_that_are_not_as_promised_are_a_broken_invariant(
    policy: EvictionPolicy, call: Callable[[EvictionPolicy], None]
) -> None:
    insert(policy, span(0, 10))
    with pytest.raises(AssertionError):
        call(policy)


def test_a_heap_of_pinned_slots_is_passed_over_once_and_not_at_every_call(
    policy: EvictionPolicy,
) -> None:
    pinned, calls = 1000, 500
    asked = 0

    def may_go(slots: Slots) -> npt.NDArray[np.bool_]:
        nonlocal asked
        asked += slots.size
        answer: npt.NDArray[np.bool_] = slots >= pinned
        return answer

    insert(policy, span(0, pinned))
    insert(policy, span(pinned, calls))
    for _ in range(calls):
        assert policy.evict(1, may_go) is not None
    # each call may look a few hundred slots ahead; each pinned slot comes round a few times
    assert asked < calls * 700 + 8 * pinned, f"{asked} slots asked about"


def test_state_does_not_grow_with_the_number_of_operations(policy: EvictionPolicy) -> None:
    def churn(rounds: int, first_tag: int) -> None:
        for number in range(rounds):
            insert(policy, span(0, 100), first_tag + 100 * number)
            policy.missed(np.arange(first_tag, first_tag + 100, dtype=np.uint64))
            for _ in range(10):
                policy.touch(span(0, 100))
            policy.remove(span(0, 50))
            assert policy.evict(50, all_may_go) is not None

    # From the start: what replaces a thing made before would count as growth otherwise.
    tracemalloc.start()
    churn(60, 0)  # the interpreter keeps some freed tuples, too
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    churn(60, 100_000)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 16384


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policies_of_thousands_of_classes_share_what_each_slot_needs(name: str) -> None:
    """Each once had arrays of its own for every slot of the pool: terabytes of addresses."""
    memory, policies = PolicyMemory(1 << 20), []
    before = address_space()
    for number in range(2000):
        policies.append(make_policy(name, lambda: 1 << 20, memory))
        insert(policies[-1], span(100 * number, 100))
    assert address_space() - before < 256 << 20


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_slot_of_one_policy_may_be_another_s_next(name: str) -> None:
    """As when a row is taken from one class and granted to another."""
    memory = PolicyMemory(MAX_SLOTS)
    first, second = (make_policy(name, lambda: 100, memory) for _ in range(2))
    insert(first, span(0, 100))
    first.touch(span(0, 50))
    taken = evicted(first, 30)
    insert(second, batch(*taken))
    assert first.coldest(200).size == 70
    assert not set(first.coldest(100).tolist()) & set(taken)
    assert sorted(second.coldest(100).tolist()) == sorted(taken)
    second.remove(batch(*taken))
    insert(first, batch(*taken))
    assert sorted(first.coldest(200).tolist()) == list(range(100))


@pytest.mark.parametrize("name", ["arc", "s3fifo", "turns"])
def test_what_is_gone_can_be_forgotten(name: str) -> None:
    """It comes back like a block that never was there."""
    tables = [make_policy(name, lambda: 100, PolicyMemory(MAX_SLOTS)) for _ in range(3)]
    for policy in tables[:2]:
        insert(policy, span(0, 100))
        evicted(policy, 100)
    tables[0].forget_gone()
    for policy in tables:
        insert(policy, span(0, 20))
        insert(policy, span(50, 50), first_tag=5000)
    forgot, remembers, never_had = (evicted(policy, 30) for policy in tables)
    assert forgot == never_had
    assert remembers != never_had


def test_table_of_ghosts_follows_a_class_that_grows_and_shrinks() -> None:
    capacity = 16
    ghosts = Ghosts(lambda: capacity)
    assert ghosts.bytes_used <= 256, "memory of a class that never evicted"
    sizes = []
    for capacity in (16, 2000, 3000, 16):
        tags = np.arange(capacity, dtype=np.uint64) * np.uint64(977) + np.uint64(capacity)
        ghosts.add(0, tags)
        found, _ = ghosts.find(tags)
        assert found.sum() > 0.98 * capacity
        sizes.append(ghosts.bytes_used // 16)
    assert sizes[1] == sizes[2] >= 4 * 2000
    assert sizes[0] == sizes[3] <= 1024


def test_table_of_the_most_ghosts_has_two_places_for_each_and_keeps_them() -> None:
    ghosts = Ghosts(lambda: 2 * GHOSTS_MAX)
    assert ghosts.limit == GHOSTS_MAX
    rng = np.random.default_rng(1)
    tags = rng.integers(0, 1 << 63, GHOSTS_MAX, dtype=np.uint64)
    for some in np.array_split(tags, 64):
        ghosts.add(0, some)
    assert ghosts.bytes_used == 2 * GHOSTS_MAX * 16
    found, _ = ghosts.find(tags)
    assert 0.99 * GHOSTS_MAX < found.sum() <= ghosts.count(0) + 1


class AgainstReference(RuleBasedStateMachine):
    """One policy beside its reference: same victims, same order, whatever the calls."""

    name = "lru"
    capacity = 16

    def __init__(self) -> None:
        super().__init__()
        self.policy = make_policy(self.name, lambda: self.capacity, PolicyMemory(MAX_SLOTS))
        self.reference = REFERENCES[self.name](self.capacity)
        self.free = list(range(self.capacity))
        self.tag_of: dict[int, int] = {}
        self.pinned: set[int] = set()

    def pick(self, data: st.DataObject, pool: list[int], unique: bool) -> list[int]:
        return data.draw(st.lists(st.sampled_from(pool), max_size=12, unique=unique))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        slots = self.pick(data, self.free, unique=True)
        unused = sorted(set(range(60)) - set(self.tag_of.values()))
        tags = data.draw(st.permutations(unused))[: len(slots)]
        self.policy.insert(batch(*slots), np.array(tags, np.uint64))
        self.reference.insert(list(zip(slots, tags, strict=True)))
        self.tag_of.update(zip(slots, tags, strict=True))
        self.free = [slot for slot in self.free if slot not in self.tag_of]

    @precondition(lambda self: self.tag_of)
    @rule(data=st.data(), as_use=st.booleans())
    def touch(self, data: st.DataObject, as_use: bool) -> None:
        slots = self.pick(data, list(self.tag_of), unique=False)
        self.policy.touch(batch(*slots), as_use=as_use)
        self.reference.touch(slots, as_use=as_use)

    @precondition(lambda self: self.tag_of)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slots = self.pick(data, list(self.tag_of), unique=True)[:3]
        self.policy.remove(batch(*slots))
        self.reference.remove(slots)
        self.forget(slots)

    @rule(tags=st.lists(st.integers(0, 59), max_size=12, unique=True))
    def miss(self, tags: list[int]) -> None:
        absent = sorted(set(tags) - set(self.tag_of.values()))
        self.policy.missed(np.array(absent, np.uint64))
        self.reference.missed(absent)

    @rule(pinned=st.sets(st.integers(0, 15), max_size=8))
    def pin(self, pinned: set[int]) -> None:
        self.pinned = pinned

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        victims = self.policy.evict(count, all_but(*self.pinned))
        expected = self.reference.evict(count, not_in(self.pinned))
        if expected is None:
            assert victims is None
            return
        assert victims is not None
        assert victims.tolist() == expected
        self.forget(expected)

    @invariant()
    def order_is_the_same(self) -> None:
        assert self.policy.coldest(100).tolist() == self.reference.coldest(100)
        assert set(self.reference.coldest(100)) == set(self.tag_of)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            del self.tag_of[slot]
        self.free += slots


class LruAgainstReference(AgainstReference):
    name = "lru"


class ArcAgainstReference(AgainstReference):
    name = "arc"

    @invariant()
    def target_is_the_same(self) -> None:
        assert isinstance(self.policy, ArcPolicy)
        assert isinstance(self.reference, ReferenceArc)
        assert self.policy.target == pytest.approx(self.reference.target)


class S3FifoAgainstReference(AgainstReference):
    name = "s3fifo"


class TurnsAgainstReference(AgainstReference):
    name = "turns"


BOUNDED = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLruAgainstReference = LruAgainstReference.TestCase
TestArcAgainstReference = ArcAgainstReference.TestCase
TestS3FifoAgainstReference = S3FifoAgainstReference.TestCase
TestTurnsAgainstReference = TurnsAgainstReference.TestCase
for case in (
    TestLruAgainstReference,
    TestArcAgainstReference,
    TestS3FifoAgainstReference,
    TestTurnsAgainstReference,
):
    case.settings = BOUNDED


@pytest.mark.parametrize("name", REFERENCES)
def test_large_batches_decide_as_the_reference_does(name: str) -> None:
    """Rings wrap, grow and are squeezed; hundreds of slots move at once."""
    rng = np.random.default_rng(7)
    capacity = 1000
    policy = make_policy(name, lambda: capacity, PolicyMemory(MAX_SLOTS))
    reference = REFERENCES[name](capacity)
    tag_of: dict[int, int] = {}
    for _ in range(250):
        wanted = rng.choice(4 * capacity, size=int(rng.integers(1, 500)), replace=False)
        slot_of = {tag: slot for slot, tag in tag_of.items()}
        hits = [slot_of[tag] for tag in wanted.tolist() if tag in slot_of]
        misses = [tag for tag in wanted.tolist() if tag not in slot_of]
        policy.touch(batch(*hits))
        reference.touch(hits)
        policy.missed(np.array(misses, np.uint64))
        reference.missed(misses)
        short = max(0, len(tag_of) + len(misses) - capacity)
        pinned = set(rng.choice(capacity, size=capacity // 10).tolist())
        victims = policy.evict(short, all_but(*pinned))
        expected = reference.evict(short, not_in(pinned))
        assert victims is not None
        assert victims.tolist() == expected
        for slot in victims.tolist():
            del tag_of[slot]
        free = [slot for slot in range(capacity) if slot not in tag_of][: len(misses)]
        policy.insert(batch(*free), np.array(misses, np.uint64))
        reference.insert(list(zip(free, misses, strict=True)))
        tag_of.update(zip(free, misses, strict=True))
    assert policy.coldest(capacity).tolist() == reference.coldest(capacity)
