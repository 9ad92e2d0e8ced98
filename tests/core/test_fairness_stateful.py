"""In a pool that is always full everybody who asks for room is served, within a bound on waiting.

A class at full rate stores all the time and has the youngest blocks. Others of one to four shards
come, ask at their own pace, and go. Movers unmap and the pool zeroes late, copies take their time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import MoverId, SessionId
from kvd.core.machine import MachineConfig
from kvd.core.model import row_claims
from kvd.core.room import row_rights
from tests.core.bench import (
    EXTENT,
    MS,
    SECOND,
    SECRET,
    Bench,
    finished,
    only,
    spec,
    verdict,
)

STEP = 25 * MS
BUSY = 1
SLOTS = EXTENT // 4096
# What a search, a tick and steps of the clock add to it, generously.
SLACK = 500 * MS


@dataclass
class Asker:
    """An engine that wants `blocks` new blocks stored, every `every_ns`, and again until it can."""

    session: int
    shards: int
    every_ns: int
    blocks: int
    next_ns: int = 0
    asked_ns: int = -1  # since when it has waited
    served: int = 0
    waits: list[int] = field(default_factory=list)


@dataclass
class FullPool:
    """Advances a machine, its movers and its pool in steps of time; every order takes a while."""

    bench: Bench
    latency_ns: int
    due: list[tuple[int, ev.Event]] = field(default_factory=list)
    next_key: int = 0

    def feed(self, event: ev.Event) -> None:
        self.note(self.bench.feed(event))

    def note(self, actions: list[act.Action]) -> None:
        late = self.bench.now_ns + self.latency_ns
        for order in only(actions, act.StartTransfer):
            self.due.append((late, finished(order, ev.TransferOutcome.DONE)))
        for unmap in only(actions, act.UnmapRow):
            self.due.append((late, ev.RowUnmapped(unmap.mover, unmap.row)))
        for zero in only(actions, act.ZeroRow):
            self.due.append((late, ev.RowZeroed(zero.row)))

    def open(self, session: int, shards: int, payer: str = "", groups: int = 1) -> None:
        known = spec(f"ns{session}", shards=shards, groups=groups)
        actions = self.bench.feed(
            ev.SessionOpened(SessionId(session), known, "", shards, payer=payer)
        )
        self.note(actions)
        for rank in range(shards):
            mover = MoverId(100 * session + rank)
            self.feed(ev.RankAttached(SessionId(session), mover, rank, rank, True))

    def store(self, session: int, blocks: int, group: int = 0) -> bool:
        numbers = range(self.next_key, self.next_key + blocks)
        self.next_key += blocks
        actions = self.bench.store(numbers, session, group=group)
        self.note(actions)
        return verdict(actions).accepted

    def step(self) -> None:
        self.bench.now_ns += STEP
        now, self.due = (
            [e for e in self.due if e[0] <= self.bench.now_ns],
            [e for e in self.due if e[0] > self.bench.now_ns],
        )
        for _, event in now:
            if isinstance(event, ev.TransferFinished):
                self.bench.transfers.pop(event.transfer, None)
            self.feed(event)
        if self.bench.now_ns % (250 * MS) < STEP:
            self.feed(ev.TimerTicked())


def longest_wait(extents: int, shards: list[int], latency_ns: int) -> int:
    """The bound that `claims` promises: one turn of all, or one retirement each, in parallel."""
    retirement = 3 * latency_ns  # a copy, the movers, the zeroing
    turns = -(-sum(shards) // extents)
    turn = row_rights.SAFE_NS if sum(shards) > extents else 0
    batches = -(-len(shards) // row_claims.CLAIMS_SERVED)
    return turns * (turn + max(shards) * retirement) + batches * retirement + SLACK


askers = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.sampled_from([25 * MS, 100 * MS, 1000 * MS]),
        st.sampled_from([1, 4, SLOTS]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    extents=st.integers(4, 12),
    drawn=askers,
    latency_ms=st.sampled_from([0, 25, 100]),
    policy=st.sampled_from(["lru", "arc", "s3fifo"]),
    leaves=st.booleans(),
)
def test_everybody_who_asks_is_served_within_the_bound(
    extents: int,
    drawn: list[tuple[int, int, int]],
    latency_ms: int,
    policy: str,
    leaves: bool,
) -> None:
    config = MachineConfig(extents, EXTENT, policy=policy, tag_secret=SECRET, spare_bytes=0)
    pool = FullPool(Bench(config, check_every=101), latency_ms * MS)
    pool.open(BUSY, 1)
    while pool.store(BUSY, SLOTS):  # until all of the pool is its own
        if not pool.bench.machine.state.free_extents:
            break
        pool.step()
    slow = [Asker(n, *each) for n, each in enumerate(drawn, start=2)]
    bound = longest_wait(extents, [1, *(a.shards for a in slow)], latency_ms * MS)
    for asker in slow:
        pool.open(asker.session, asker.shards)
    until = pool.bench.now_ns + bound + 2 * SECOND
    while pool.bench.now_ns < until:
        pool.step()
        pool.store(BUSY, 4)
        for asker in slow:
            ask(pool, asker, bound)
        if leaves and pool.bench.now_ns > until - bound and len(slow) > 1:
            leave(pool, slow.pop())
    for asker in slow:
        assert asker.served, "nobody is left out"


GREEDY = 500  # the first of its sessions


def longest_wait_of_a_payer(
    extents: int, shards: dict[int, int], greedy_widest: int, latency_ns: int
) -> int:
    """The bound that `claims` promises to payers of one class each: a turn of payers.

    A turn of each is that of one row, which may have to be gathered and to become unsafe first.
    How many classes any of them has is no part of it.
    """
    widest = max(greedy_widest, *shards.values())
    turn = row_rights.SAFE_NS + 3 * latency_ns * widest
    rounds = -(-(sum(shards.values()) + greedy_widest) // extents)
    return rounds * (len(shards) + 1) * turn + SLACK


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    extents=st.integers(8, 16),
    drawn=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([25 * MS, 1000 * MS]), st.just(SLOTS)),
        min_size=1,
        max_size=3,
    ),
    sessions=st.integers(1, 4),
    groups=st.sampled_from([1, 4, 8]),
    wide=st.booleans(),
    latency_ms=st.sampled_from([0, 25, 100]),
)
def test_every_payer_is_served_within_a_turn_of_payers_whatever_one_of_them_opens(
    extents: int,
    drawn: list[tuple[int, int, int]],
    sessions: int,
    groups: int,
    wide: bool,
    latency_ms: int,
) -> None:
    config = MachineConfig(extents, EXTENT, tag_secret=SECRET, spare_bytes=0)
    pool = FullPool(Bench(config, check_every=499), latency_ms * MS)
    shards = extents // groups if wide else 1
    greedy = [(GREEDY + n, group) for n in range(sessions) for group in range(groups)]
    for number in range(sessions):
        pool.open(GREEDY + number, shards, payer="greedy", groups=groups)
    while pool.bench.machine.state.free_extents and pool.bench.now_ns < 3 * SECOND:
        press(pool, greedy)
        pool.step()
    others = [Asker(n, *each) for n, each in enumerate(drawn, start=1)]
    for asker in others:
        pool.open(asker.session, asker.shards, payer=f"payer {asker.session}")
    bound = longest_wait_of_a_payer(
        extents, {a.session: a.shards for a in others}, shards, latency_ms * MS
    )
    until = pool.bench.now_ns + bound + 2 * SECOND
    while pool.bench.now_ns < until:
        pool.step()
        press(pool, greedy)
        for asker in others:
            ask(pool, asker, bound)
    assert all(asker.served for asker in others), "nobody is left out"


def press(pool: FullPool, classes: list[tuple[int, int]]) -> None:
    """A store of a whole row in each of them."""
    for session, group in classes:
        pool.store(session, SLOTS, group)


def ask(pool: FullPool, asker: Asker, bound: int) -> None:
    now = pool.bench.now_ns
    if now < asker.next_ns:
        return
    if pool.store(asker.session, asker.blocks):
        if asker.asked_ns >= 0:
            asker.waits.append(now - asker.asked_ns)
        asker.asked_ns, asker.next_ns = -1, now + asker.every_ns
        asker.served += 1
    elif asker.asked_ns < 0:
        asker.asked_ns = now
    assert asker.asked_ns < 0 or now - asker.asked_ns <= bound, (
        f"session {asker.session} of {asker.shards} shards has waited"
        f" {(now - asker.asked_ns) / SECOND:.2f} s, the bound is {bound / SECOND:.2f} s"
    )


def leave(pool: FullPool, asker: Asker) -> None:
    """Its engine ends while it may be waiting."""
    session = asker.session
    pool.feed(ev.SessionClosed(SessionId(session), True))
    movers = {100 * session + rank for rank in range(asker.shards)}
    pool.due = [
        (late, event) for late, event in pool.due if getattr(event, "mover", None) not in movers
    ]
    for mover in sorted(movers):
        for number, order in list(pool.bench.transfers.items()):
            if order.mover == mover:
                del pool.bench.transfers[number]
        pool.feed(ev.MoverGone(MoverId(mover), "test"))


def served(shards: list[int], every_ms: list[int], extents: int = 8) -> list[float]:
    """Shares of stores that were accepted in ten seconds after the first, each tried once."""
    config = MachineConfig(extents, EXTENT, tag_secret=SECRET)
    pool = FullPool(Bench(config, check_every=200), 25 * MS)
    for session, wide in enumerate(shards, start=1):
        pool.open(session, wide)
        while session == 1 and pool.bench.machine.state.free_extents:
            pool.store(BUSY, SLOTS)
            pool.step()
    tried, accepted = [0] * len(shards), [0] * len(shards)
    began = pool.bench.now_ns
    while pool.bench.now_ns < began + 11 * SECOND:
        pool.step()
        for which, every in enumerate(every_ms):
            if (pool.bench.now_ns - began) % (every * MS) < STEP:
                stored = pool.store(which + 1, 4)
                if pool.bench.now_ns > began + SECOND:
                    tried[which] += 1
                    accepted[which] += stored
    return [a / t for a, t in zip(accepted, tried, strict=True)]


def test_engine_at_full_rate_starves_neither_a_slow_one_nor_one_of_two_ranks() -> None:
    assert min(served([1, 1, 2], [25, 1000, 50])) >= 0.95


def test_four_ranks_gather_their_row_beside_two_engines_at_full_rate() -> None:
    assert min(served([1, 1, 4], [25, 25, 100])) >= 0.95


def test_row_is_not_evicted_and_zeroed_for_nothing() -> None:
    config = MachineConfig(8, EXTENT, tag_secret=SECRET)
    pool = FullPool(Bench(config), 25 * MS)
    pool.open(BUSY, 1)
    while pool.bench.machine.state.free_extents:
        pool.store(BUSY, SLOTS)
        pool.step()
    pool.open(2, 3)
    for number in range(100):
        pool.step()
        pool.store(BUSY, 4)
        if number < 20 or number % 20 == 0:
            pool.store(2, 1)
    counters = pool.bench.machine.statistics().counters
    assert counters.rows_taken_back == 3, "as many as its row has extents"
