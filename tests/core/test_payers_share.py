"""A pool that is too small is shared among payers first, then among the classes of each."""

from __future__ import annotations

from kvd.core.machine import MachineConfig
from kvd.core.room import row_rights
from tests.core.bench import EXTENT, MS, SECOND, SECRET, Bench
from tests.core.test_fairness_stateful import SLOTS, STEP, FullPool

GROUPS = 8
HONEST = 1000  # a session's number


def crowd(extents: int, sessions: int, latency_ns: int = 25 * MS) -> FullPool:
    """A payer that has all of the pool, in `sessions` times GROUPS classes that all want more."""
    config = MachineConfig(extents, EXTENT, tag_secret=SECRET, spare_bytes=0)
    pool = FullPool(Bench(config, check_every=997), latency_ns)
    for session in range(1, sessions + 1):
        pool.open(session, 1, payer="greedy", groups=GROUPS)
    while pool.bench.machine.state.free_extents:
        press(pool, sessions)
        pool.step()
    return pool


def press(pool: FullPool, sessions: int) -> None:
    for session in range(1, sessions + 1):
        for group in range(GROUPS):
            pool.store(session, SLOTS, group)


def rows_of(pool: FullPool, session: int) -> int:
    state = pool.bench.machine.state
    namespace = next(s.namespace for s in state.sessions.values() if s.session == session)
    return sum(len(owner.rows) for owner in state.namespaces[namespace].classes)


def waits_beside(pool: FullPool, sessions: int, steps: int, wide: int = 1) -> list[int]:
    """How long one engine of another payer waits for each of its stores."""
    pool.open(HONEST, wide, payer="honest")
    waits, asked_ns = [], pool.bench.now_ns
    for _ in range(steps):
        press(pool, sessions)
        if pool.store(HONEST, SLOTS):
            waits.append(pool.bench.now_ns - asked_ns)
            asked_ns = pool.bench.now_ns
        pool.step()
    return [*waits, pool.bench.now_ns - asked_ns]


def test_payer_with_many_classes_leaves_another_its_half() -> None:
    pool = crowd(32, 3)  # 24 classes
    waits = waits_beside(pool, 3, 120)
    assert max(waits) <= SECOND
    assert rows_of(pool, HONEST) >= 15


def test_payer_with_more_classes_than_rows_makes_nobody_else_wait_for_a_turn_of_them() -> None:
    pool = crowd(8, 4)  # 32 classes in 8 rows: a turn of all is 8 seconds
    waits = waits_beside(pool, 4, 320)
    assert max(waits) <= row_rights.SAFE_NS
    assert rows_of(pool, HONEST) >= 3


def test_wide_row_is_gathered_beside_a_payer_with_more_classes_than_rows() -> None:
    pool = crowd(16, 4)
    waits = waits_beside(pool, 4, 320, wide=8)
    assert max(waits) <= 2 * row_rights.SAFE_NS
    assert rows_of(pool, HONEST) == 1


def test_crowded_payer_s_own_classes_still_go_round() -> None:
    pool = crowd(8, 1)  # 8 classes in 8 rows, and another payer with half of them
    pool.open(HONEST, 1, payer="honest")
    served = [0] * GROUPS
    for _ in range(int(16 * SECOND / STEP)):
        pool.store(HONEST, SLOTS)
        for group in range(GROUPS):
            served[group] += pool.store(1, 1, group)
        pool.step()
    assert min(served), "a class of the payer is left out"
    assert rows_of(pool, HONEST) >= 3


def test_one_payer_alone_has_all_as_before() -> None:
    pool = crowd(8, 1)
    pool.open(HONEST, 1, payer="greedy")
    assert len(pool.bench.machine.state.rows) == 8
    served = 0
    for _ in range(int(8 * SECOND / STEP)):
        press(pool, 1)
        served += pool.store(HONEST, 1)
        pool.step()
    assert served, "its classes go round, this one among them"
