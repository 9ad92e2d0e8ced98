"""Which order a tier's thread takes next, and how many of a kind run at once."""

from __future__ import annotations

import threading
import time

import pytest

from kvd.tiers.frames import Order, OrderId, TierFrame
from kvd.tiers.lanes import Lanes, Work

EXISTS, READ, WRITE, DELETE = (
    TierFrame.EXISTS,
    TierFrame.READ,
    TierFrame.WRITE,
    TierFrame.DELETE_SCOPES,
)


class Queue:
    """Lanes whose orders are numbered as they come."""

    def __init__(self, calls: int) -> None:
        self.lanes = Lanes(calls)
        self._last = 0

    def put(self, *kinds: TierFrame, tenant: str = "") -> None:
        for kind in kinds:
            self._last += 1
            self.lanes.put(Work(Order(OrderId(self._last), kind, 0.0, (), tenant=tenant)))

    def taken(self) -> list[Work]:
        """All that may run now, one after the other."""
        return list(iter(self.lanes.take_now, None))


def kinds(works: list[Work]) -> list[TierFrame]:
    return [work.order.kind for work in works]


@pytest.mark.parametrize(
    ("calls", "first"),
    [
        (1, [EXISTS]),
        (2, [EXISTS, EXISTS]),
        (3, [EXISTS, EXISTS, READ]),
        (4, [EXISTS, EXISTS, READ]),
        (5, [EXISTS, EXISTS, READ, READ]),
        (9, [EXISTS, EXISTS, READ, READ, WRITE, WRITE]),
    ],
)
def test_questions_come_before_reads_and_reads_before_writes(
    calls: int, first: list[TierFrame]
) -> None:
    queue = Queue(calls)
    queue.put(WRITE, WRITE, READ, READ, EXISTS, EXISTS)
    assert kinds(queue.taken()) == first


@pytest.mark.parametrize(
    ("calls", "changes"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (9, 6), (64, 61)]
)
@pytest.mark.parametrize("kind", [WRITE, DELETE])
def test_writes_and_deletes_leave_room_for_a_read_and_a_question(
    calls: int, changes: int, kind: TierFrame
) -> None:
    queue = Queue(calls)
    queue.put(*[kind] * 100)
    assert kinds(queue.taken()) == [kind] * changes
    queue.put(READ)
    assert kinds(queue.taken()) == ([READ] if calls > 1 else [])
    queue.put(EXISTS)
    assert kinds(queue.taken()) == ([EXISTS] if calls > 2 else [])


@pytest.mark.parametrize(("calls", "reads"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_reads_leave_room_for_a_question(calls: int, reads: int) -> None:
    queue = Queue(calls)
    queue.put(*[READ] * 100)
    assert kinds(queue.taken()) == [READ] * reads
    queue.put(EXISTS)
    assert kinds(queue.taken()) == ([EXISTS] if calls > 2 else [])


@pytest.mark.parametrize(("calls", "beside"), [(1, 0), (3, 0), (4, 1), (5, 1), (64, 1)])
@pytest.mark.parametrize("kind", [EXISTS, READ, WRITE])
def test_one_tenant_never_has_all_calls(calls: int, beside: int, kind: TierFrame) -> None:
    queue = Queue(calls)
    queue.put(*[EXISTS, READ, WRITE] * 100, tenant="much")
    much = queue.taken()
    queue.put(kind, kind, tenant="little")
    assert kinds(much) == [EXISTS] * (calls - beside)
    assert kinds(queue.taken()) == [kind] * beside


@pytest.mark.parametrize("kind", [EXISTS, READ, WRITE])
def test_of_each_kind_tenants_take_one_in_turn(kind: TierFrame) -> None:
    queue = Queue(2)
    queue.put(*[kind] * 4, tenant="a")
    queue.put(*[kind] * 2, tenant="b")
    queue.put(kind, tenant="c")
    turns = []
    while works := queue.taken():
        turns += [work.order.tenant for work in works]
        for work in works:
            queue.lanes.end(work)
    assert turns == list("abcabaa")


@pytest.mark.parametrize("calls", [2, 4, 5, 9])
@pytest.mark.parametrize("kind", [READ, WRITE, DELETE])
def test_what_a_tenant_waits_for_comes_though_others_ask_without_end(
    calls: int, kind: TierFrame
) -> None:
    queue = Queue(calls)
    many = [f"asks {number}" for number in range(2 * calls)]
    for tenant in many:
        queue.put(*[EXISTS] * calls, tenant=tenant)
    running = queue.taken()
    queue.put(kind, tenant="little")
    for _ in range(calls):
        ended = running.pop(0)
        queue.lanes.end(ended)
        queue.put(EXISTS, tenant=ended.order.tenant)
        running += queue.taken()
        if running[-1].order.tenant == "little":
            return
    pytest.fail("it never has its turn")


@pytest.mark.parametrize("calls", [1, 2, 3, 5, 64])
@pytest.mark.parametrize(
    ("asked", "kind"),
    [([EXISTS], READ), ([EXISTS], WRITE), ([EXISTS, READ], WRITE), ([EXISTS, READ], DELETE)],
)
def test_a_tenants_own_questions_and_reads_do_not_hold_its_others_for_ever(
    calls: int, asked: list[TierFrame], kind: TierFrame
) -> None:
    queue = Queue(calls)
    for each in asked:
        queue.put(*[each] * 2 * calls, tenant="busy")
    running = queue.taken()
    queue.put(*[WRITE] * (kind is DELETE), kind, tenant="busy")  # a delete waits for that write
    begun: set[TierFrame] = set()
    for _ in range(12 * calls):
        ended = running.pop(0)
        queue.lanes.end(ended)
        if ended.order.kind in asked:
            queue.put(ended.order.kind, tenant="busy")
        running += (taken := queue.taken())
        begun |= set(kinds(taken))
    assert kind in begun


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_no_thread_looks_at_all_tenants_that_wait_where_none_may(
    monkeypatch: pytest.MonkeyPatch, kind: TierFrame
) -> None:
    queue = Queue(5)
    for number in range(4096):
        queue.put(kind, tenant=f"{number}")
    assert len(queue.taken()) == (4 if kind is READ else 3)
    looked_at: list[str] = []
    may = Lanes._may

    def noted(lanes: Lanes, kind: TierFrame, tenant: str) -> bool:
        looked_at.append(tenant)
        return may(lanes, kind, tenant)

    monkeypatch.setattr(Lanes, "_may", noted)
    assert not queue.taken()
    assert len(looked_at) <= 5


def test_what_a_tenant_takes_back_costs_no_other_its_turn() -> None:
    queue = Queue(1)
    queue.put(EXISTS, tenant="a")
    (running,) = queue.taken()
    queue.put(EXISTS, EXISTS, tenant="b")
    queue.put(EXISTS, tenant="c")
    assert queue.lanes.withdraw(OrderId(2))
    assert queue.lanes.withdraw(OrderId(3))
    queue.lanes.end(running)
    (next_one,) = queue.taken()
    assert next_one.order.tenant == "c"
    queue.put(EXISTS, tenant="b")
    queue.lanes.end(next_one)
    assert [work.order.order for work in queue.taken()] == [5]


def test_a_delete_waits_for_writes_before_it_and_those_after_wait_for_it() -> None:
    queue = Queue(8)
    queue.put(WRITE, WRITE, DELETE, WRITE)
    writes = queue.taken()
    assert kinds(writes) == [WRITE, WRITE]
    queue.lanes.end(writes[0])
    assert queue.taken() == []
    queue.lanes.end(writes[1])
    assert kinds(queue.taken()) == [DELETE, WRITE]


def test_no_tenants_write_passes_a_delete_or_is_passed_by_one() -> None:
    queue = Queue(9)
    queue.put(*[WRITE] * 8, tenant="a")
    queue.put(WRITE, tenant="b")
    queue.put(DELETE, DELETE)
    queue.put(WRITE, WRITE, tenant="c")
    queue.put(*[EXISTS] * 8, tenant="a")
    order = []
    while works := queue.taken():
        order += [work for work in works if work.order.kind is not EXISTS]
        queue.lanes.end(works[-1])
        for work in works[:-1]:
            queue.lanes.end(work)
    tenants = [work.order.tenant or work.order.kind for work in order]
    assert sorted(tenants[:9]) == [*"aaaaaaaab"]
    assert "b" in tenants[:2]
    assert tenants[9:] == [DELETE, DELETE, "c", "c"]


def test_writes_are_withdrawn_before_and_behind_a_delete() -> None:
    queue = Queue(9)
    queue.put(WRITE, DELETE, WRITE, WRITE)  # 1 to 4
    assert queue.lanes.withdraw(OrderId(1))
    assert queue.lanes.withdraw(OrderId(4))
    assert [work.order.order for work in queue.taken()] == [2, 3]
    queue.put(DELETE, WRITE, DELETE)  # 5 to 7, behind the write that runs
    assert queue.lanes.withdraw(OrderId(6))
    assert queue.taken() == []
    assert queue.lanes.withdraw(OrderId(5))
    queue.put(WRITE)
    assert queue.lanes.withdraw(OrderId(7))
    assert [work.order.order for work in queue.taken()] == [8]


def test_what_is_withdrawn_never_runs_and_lets_others() -> None:
    queue = Queue(8)
    queue.put(WRITE, DELETE, WRITE)
    [write] = queue.taken()
    assert queue.lanes.withdraw(write.order.order) is None
    assert queue.lanes.withdraw(OrderId(99)) is None
    withdrawn = queue.lanes.withdraw(OrderId(2))
    assert withdrawn is not None
    assert queue.lanes.withdraw(OrderId(2)) is None
    assert [work.order.order for work in queue.taken()] == [3]


def test_threads_that_wait_take_what_comes_and_go_home_when_it_closes() -> None:
    queue = Queue(4)
    taken: list[int] = []

    def serve() -> None:
        while (work := queue.lanes.take()) is not None:
            taken.append(work.order.order)
            queue.lanes.end(work)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        queue.put(WRITE, READ, EXISTS, DELETE)
    deadline = time.monotonic() + 10
    while len(taken) < 2_000 and time.monotonic() < deadline:
        time.sleep(0.005)
    queue.lanes.close()
    queue.put(WRITE)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert sorted(taken) == list(range(1, 2_001))
