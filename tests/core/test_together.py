"""Small stores that begin together: which may, what each job is told, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import namespaces
from kvd.core.errors import UnknownSession
from kvd.core.jobs import together
from kvd.core.keys import JobId, KeyBatch, RequestId, SessionId
from kvd.core.policy import POLICY_NAMES
from kvd_proto.groups import GroupKind
from kvd_proto.layout import NULL_ENGINE_BLOCK as NULL
from kvd_proto.limits import MAX_JOBS_IN_FLIGHT
from tests.core.bench import BLOCK, Bench, context, engine_blocks, keys, only, small, spec

FAILED = ev.TransferOutcome.FAILED


@pytest.fixture
def bench() -> Bench:
    made = small()
    made.open()
    return made


def asked(job: int, *numbers: int, request: str = "", blocks: Sequence[int] = ()) -> Any:
    """A store of these keys; their engine blocks have the same numbers where none are given."""
    run = ev.Run(0, keys(*numbers), engine_blocks(blocks or numbers))
    name = context(request=request or f"store-{job}")
    return ev.StoreRequested(SessionId(1), JobId(job), name, (run,))


def of_run(group: int, batch: KeyBatch, blocks: Any) -> ev.StoreRequested:
    """Job 9's store of one run."""
    run = ev.Run(group, batch, blocks)
    return ev.StoreRequested(SessionId(1), JobId(9), context(request="store-9"), (run,))


def run_at(first: int, *numbers: int) -> ev.Run:
    """These keys, from a place of the prompt on."""
    return ev.Run(0, keys(*numbers), engine_blocks(numbers), first)


def begin(bench: Bench, *stores: ev.StoreRequested) -> tuple[list[act.Action], list[int]]:
    """Orders, and the jobs that began."""
    made = bench.feed(ev.StoresRequested(SessionId(1), stores))
    (reply,) = only(made, act.Reply)
    said = reply.payload
    assert len(said) == len(stores)
    for store, verdict in zip(stores, said, strict=True):
        if verdict is not None:
            blocks = sum(len(run.keys) for run in store.runs)
            assert verdict == act.Verdict(store.job, ev.JobKind.STORE, True, "", blocks)
    return made, [verdict.job for verdict in said if verdict is not None]


def ended(actions: list[act.Action]) -> list[tuple[int, ev.JobStatus, str, int, int]]:
    return [
        (each.job, each.status, each.reason, each.blocks, each.bytes_copied)
        for each in only(actions, act.EndJob)
    ]


def test_stores_share_one_transfer_a_rank_and_end_each_for_itself() -> None:
    bench = small()
    bench.open(ranks=2)
    made, begun = begin(bench, asked(1, 10), asked(2, 20, 21), asked(3, 30))
    assert begun == [1, 2, 3]
    first, second = only(made, act.StartTransfer)
    assert first.jobs == second.jobs == (1, 2, 3)
    assert [order.mover for order in (first, second)] == [100, 101]
    assert bench.statuses([10, 20, 21, 30]) == "PPPP"
    assert not only(bench.finish([first]), act.EndJob)
    last = bench.finish([second])
    assert bench.statuses([10, 20, 21, 30]) == "HHHH"
    (written,) = only(last, act.WriteReady)
    assert len(written.slots) == 4
    quarter = 2 * BLOCK // 4  # each rank says that it copied so much
    assert ended(last) == [
        (1, ev.JobStatus.DONE, "", 1, quarter),
        (2, ev.JobStatus.DONE, "", 2, 2 * quarter),
        (3, ev.JobStatus.DONE, "", 1, quarter),
    ]
    boards = [(post.mover, post.job) for post in only(last, act.PostBoard)]
    assert boards == [(mover, job) for job in (1, 2, 3) for mover in (100, 101)]
    assert {post.duration_ns for post in only(last, act.PostBoard)} == {250, 500}


def test_what_is_copied_and_the_time_are_divided_without_a_rest(bench: Bench) -> None:
    made, _ = begin(bench, asked(1, 1), asked(2, 2, 3), asked(3, 4, 5, 6))
    (order,) = only(made, act.StartTransfer)
    copied = ev.TransferFinished(order.mover, order.transfer, ev.TransferOutcome.DONE, 1001, 7)
    last = bench.feed(copied)
    posts = only(last, act.PostBoard)
    assert sum(each.bytes_copied for each in only(last, act.EndJob)) == 1001
    assert sum(post.bytes_copied for post in posts) == 1001
    assert sum(post.duration_ns for post in posts) == 7


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_blocks_are_found_whatever_the_policy(policy: str) -> None:
    bench = small(policy=policy)
    bench.open()
    bench.finish(begin(bench, asked(1, 10), asked(2, 20))[0])
    _, begun = begin(bench, asked(3, 11, request="store-1"), asked(4, 21, request="store-2"))
    assert begun == [3, 4]
    bench.finish()
    assert bench.statuses([10, 11, 20, 21]) == "HHHH"


def test_a_policy_that_heeds_requests_is_told_of_fewer_at_once() -> None:
    bench = small(policy="turns")
    bench.open()
    stores = [asked(n, n) for n in range(1, 13)]
    assert begin(bench, *stores)[1] == list(range(1, together.TOLD_ONE_BY_ONE + 1))


@pytest.mark.parametrize(("policy", "most"), [("turns", 2), ("auto", 2), ("lru", 6)])
def test_policies_of_several_groups_are_told_of_no_more_requests_at_once(
    policy: str, most: int
) -> None:
    groups = 4
    bench = small(extents=groups, policy=policy)
    bench.open(namespace=spec(groups=groups))
    stores = []
    for job in range(1, 7):
        runs = tuple(ev.Run(g, keys(job), engine_blocks([job])) for g in range(groups))
        stores.append(replace(asked(job), runs=runs))
    assert begin(bench, *stores)[1] == list(range(1, most + 1))


def test_each_job_is_its_request_s(bench: Bench) -> None:
    begin(bench, asked(1, 10, request="a"), asked(2, 20, request="b"))
    session = bench.machine.state.sessions[SessionId(1)]
    jobs = [session.jobs[JobId(number)] for number in (1, 2)]
    assert [job.request for job in jobs] == ["a", "b"]
    assert [job.prefix for job in jobs] == [session.prefixes[RequestId(r)] for r in "ab"]


def salted(store: ev.StoreRequested, account: str = "salt") -> ev.StoreRequested:
    return replace(store, context=replace(store.context, account=account))


def test_an_account_s_first_blocks_open_its_scope(bench: Bench) -> None:
    bench.open(session=2, epoch="other")
    _, begun = begin(bench, salted(asked(1, 10)), salted(asked(2, 20)))
    assert begun == [1, 2]
    bench.finish()
    assert bench.statuses([10, 20], account="salt") == "HH"
    assert bench.statuses([10, 20]) + bench.statuses([10, 20], session=2, account="salt") == "MMMM"


@pytest.mark.parametrize("groups", [1, 3])
def test_none_begins_where_an_account_can_have_no_scope(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    bench = small()
    bench.open(namespace=spec(groups=groups))
    stores = [salted(asked(number, number), f"user {number}") for number in (1, 2, 3)]
    state = bench.machine.state
    # As many as leave the payer just too few: it may have three quarters of what others leave.
    most = next(n for n in range(100) if 3 * (n - 4 * groups + 1) >= 4 * groups)
    monkeypatch.setattr(namespaces, "MAX_SCOPES", most - 1)
    made, begun = begin(bench, *stores)
    assert (begun, len(made)) == ([], 1)
    assert len(state.scopes) == groups, "the empty account's"
    monkeypatch.setattr(namespaces, "MAX_SCOPES", most)
    assert begin(bench, *stores)[1] == [1, 2, 3]
    assert len(state.scopes) == groups + 3


def test_none_begins_where_a_scope_would_be_forgotten_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = small()
    bench.open()
    begin(bench, *(salted(asked(n, n), f"user {n}") for n in (1, 2)))
    bench.finish(outcome=FAILED)  # now their scopes are empty, and may be forgotten
    monkeypatch.setattr(namespaces, "MAX_SCOPES", len(bench.machine.state.scopes))
    stores = [salted(asked(10 + n, 10 + n), f"user {n}") for n in (1, 3)]
    assert begin(bench, *stores)[1] == []
    for store in stores:  # each by itself
        bench.feed(store)
    bench.finish()
    assert bench.statuses([11], account="user 1") + bench.statuses([13], account="user 3") == "HH"


def test_accounts_share_a_copy_and_nothing_else() -> None:
    bench = small()
    bench.open(namespace=spec(groups=2))
    both = tuple(ev.Run(g, keys(10), engine_blocks([5 + g])) for g in (0, 1))
    stores = [
        salted(asked(1, 10, blocks=[1]), "a"),
        salted(asked(2, 10, blocks=[2]), "b"),
        salted(asked(3, 10, 11, blocks=[3, 4]), ""),
        salted(replace(asked(4), runs=both), "c"),
    ]
    made, begun = begin(bench, *stores)
    assert begun == [1, 2, 3, 4]
    (order,) = only(made, act.StartTransfer)
    assert [(part.group, len(part.slots)) for part in order.parts] == [(0, 5), (1, 1)]
    news = only(bench.finish(made), act.AnnounceStored)
    stored = sorted((each.account, each.group, len(each.keys)) for each in news)
    assert stored == [("", 0, 2), ("a", 0, 1), ("b", 0, 1), ("c", 0, 1), ("c", 1, 1)]
    for account, found in (("a", "HM"), ("b", "HM"), ("", "HH"), ("c", "HM"), ("d", "MM")):
        assert bench.statuses([10, 11], account=account) == found
    assert begin(bench, *(replace(each, job=JobId(10 + each.job)) for each in stores))[1] == []


def test_engine_block_of_another_account_s_store_is_copied_once(bench: Bench) -> None:
    stores = [salted(asked(n, n, blocks=[7]), f"user {n}") for n in (1, 2)]
    assert begin(bench, *stores, salted(asked(3, 3), "c"))[1] == [1, 3]


def test_accounts_whose_blocks_are_cleared_meanwhile_fail_together(bench: Bench) -> None:
    made, _ = begin(bench, *(salted(asked(n, n), f"user {n}") for n in (1, 2)))
    bench.clear()
    last = bench.finish(made)
    assert [each[1:3] for each in ended(last)] == [(ev.JobStatus.FAILED, "RESET")] * 2
    assert bench.statuses([1], account="user 1") == "M"


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(asked(9, 1), id="a key that is there"),
        pytest.param(asked(9, 3), id="a key that is being stored"),
        pytest.param(asked(9, 50, 1), id="one of its keys"),
        pytest.param(asked(9, 10), id="a key of an earlier one"),
        pytest.param(asked(9, 50, 50), id="a key twice"),
        pytest.param(asked(9, 50, blocks=[3]), id="an engine block that is being copied"),
        pytest.param(asked(9, 50, blocks=[10]), id="an engine block of an earlier one"),
        pytest.param(asked(9), id="nothing"),
        pytest.param(replace(asked(9, 50), runs=()), id="no run"),
        pytest.param(asked(0, 50), id="job 0"),
        pytest.param(asked(3, 50), id="a job in flight"),
        pytest.param(asked(10, 50), id="a job of an earlier one"),
        pytest.param(of_run(0, keys(50), np.array([[NULL]], np.uint32)), id="a null engine block"),
    ],
)
def test_what_needs_an_event_of_its_own_is_left_alone(bench: Bench, odd: Any) -> None:
    bench.stored([1])
    bench.store([3], job=3)
    _, begun = begin(bench, asked(10, 10), odd, asked(12, 20))
    assert begun == [10, 12]
    assert bench.statuses([10, 20]) == "PP"
    assert set(bench.machine.state.sessions[SessionId(1)].jobs) == {3, 10, 12}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            replace(asked(9), runs=(ev.Run(7, keys(50), engine_blocks([50])),)), id="group"
        ),
        pytest.param(
            replace(asked(9), runs=(ev.Run(0, keys(50), np.zeros((1, 2), np.uint32)),)), id="shape"
        ),
        pytest.param(
            replace(asked(9), runs=(ev.Run(0, keys(50, hash_bytes=16), engine_blocks([5])),)),
            id="hash",
        ),
        pytest.param(
            replace(asked(9, 50), context=context("x" * 257)), id="the account's name is too long"
        ),
    ],
)
def test_of_a_mistake_everybody_hears_alone(bench: Bench, wrong: Any) -> None:
    stores = [asked(1, 1), wrong, asked(2, 2)]
    account = wrong.context.account
    stores = [replace(each, context=replace(each.context, account=account)) for each in stores]
    made, begun = begin(bench, *stores)
    assert (begun, len(made)) == ([], 1)
    assert not bench.machine.state.sessions[SessionId(1)].jobs


def test_fewer_than_two_do_not_begin_together(bench: Bench) -> None:
    bench.stored([1])
    made, begun = begin(bench, asked(8, 1), asked(9, 50))
    assert (begun, len(made)) == ([], 1)


def test_nothing_begins_in_a_drain_or_without_a_rank_or_with_a_reuse_filter(bench: Bench) -> None:
    bench.feed(ev.DrainStarted())
    assert begin(bench, asked(1, 1), asked(2, 2))[1] == []
    without = small()
    without.open(ranks=2, attach=False)
    without.attach(1, 0)
    assert begin(without, asked(1, 1), asked(2, 2))[1] == []
    filtering = small(store_threshold=2)
    filtering.open()
    assert begin(filtering, asked(1, 1), asked(2, 2))[1] == []
    with pytest.raises(UnknownSession):
        bench.feed(ev.StoresRequested(SessionId(77), (asked(1, 1), asked(2, 2))))


def test_no_more_begin_than_jobs_may_be_in_flight() -> None:
    bench = small(extents=128)
    bench.check_every = 1000
    bench.open()
    for job in range(1, MAX_JOBS_IN_FLIGHT - 1):
        bench.store([1000], job=job, whole=True, last=False)
    _, begun = begin(bench, *(asked(9000 + n, n) for n in range(1, 5)))
    assert begun == [9001, 9002]
    assert len(bench.machine.state.sessions[SessionId(1)].jobs) == MAX_JOBS_IN_FLIGHT


def test_without_room_for_all_nothing_is_evicted_and_none_begins() -> None:
    bench = small(extents=1)
    bench.open()
    bench.store(list(range(100, 115)), job=50)  # of 16 slots; what is copied can't be evicted
    made, begun = begin(bench, asked(1, 1), asked(2, 2))
    assert (begun, only(made, act.WriteFree)) == ([], [])
    assert begin(bench, asked(1, 1))[1] == []
    bench.store([1], job=60)
    assert bench.statuses([1, 2]) == "PM"


def test_a_copy_that_fails_fails_every_job_of_it_and_frees_all(bench: Bench) -> None:
    made, _ = begin(bench, asked(1, 10), asked(2, 20, 21))
    last = bench.finish(made, FAILED)
    assert ended(last) == [
        (1, ev.JobStatus.FAILED, "COPY_FAILED", 0, 0),
        (2, ev.JobStatus.FAILED, "COPY_FAILED", 0, 0),
    ]
    assert bench.statuses([10, 20, 21]) == "MMM"
    _, begun = begin(bench, asked(3, 10), asked(4, 20, 21))
    assert begun == [3, 4]


def test_requests_that_wait_for_one_of_them_wait_for_its_blocks_only(bench: Bench) -> None:
    bench.open(session=2)
    made, _ = begin(bench, asked(1, 10), asked(2, 20))
    bench.store([20], session=2, job=7, whole=True)
    last = bench.finish(made)
    assert (7, ev.JobStatus.DONE, "", 0, 0) in ended(last)
    made, _ = begin(bench, asked(3, 11), asked(4, 21))
    bench.store([21], session=2, job=8, whole=True)
    restarted = only(bench.finish(made, FAILED), act.StartTransfer)
    assert [order.jobs for order in restarted] == [(8,)]
    assert bench.statuses([11, 21]) == "MP"


def test_a_session_that_closes_ends_all_of_them(bench: Bench) -> None:
    made, _ = begin(bench, asked(1, 10), asked(2, 20))
    bench.close(gone=True)
    (order,) = only(made, act.StartTransfer)
    revoked = ev.TransferFinished(order.mover, order.transfer, ev.TransferOutcome.REVOKED, 0, 0)
    assert [each[:2] for each in ended(bench.feed(revoked))] == [
        (1, ev.JobStatus.FAILED),
        (2, ev.JobStatus.FAILED),
    ]


def test_a_request_s_head_makes_no_room_for_its_tail() -> None:
    bench = small(extents=1)
    bench.open()
    for job, first in ((1, 10), (2, 20)):
        bench.finish(bench.feed(asked(job, *range(first, first + 6), request=f"r{first}")))
    bench.finish(bench.feed(asked(3, *range(30, 34), request="other")))
    later = [
        replace(asked(job, number, request=f"r{number // 10 * 10}"), runs=(run_at(6, number),))
        for job, number in ((4, 16), (5, 26))
    ]
    made, begun = begin(bench, *later)
    assert begun == [4, 5]
    bench.finish(made)
    assert bench.statuses([*range(10, 17), *range(20, 27)]) == "H" * 14
    assert bench.statuses(range(30, 34)) == "HHMM"


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_each_prompt_s_tail_leaves_before_its_head(policy: str) -> None:
    bench = small(extents=1, policy=policy)
    bench.open()
    requests = {"a": 10, "b": 20}
    for place in range(6):
        stores = [
            replace(
                asked(1 + 10 * place + n, 0, request=name), runs=(run_at(place, first + place),)
            )
            for n, (name, first) in enumerate(requests.items())
        ]
        assert len(begin(bench, *stores)[1]) == 2
        bench.finish()
    for number in range(30, 38):
        bench.stored([number])
        for first in requests.values():
            found = bench.statuses(range(first, first + 6))
            assert "MH" not in found, f"{found}: a head left before its tail"


def test_no_more_blocks_of_their_requests_are_held_at_once_than_may_be(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job, first in ((1, 10), (2, 20), (3, 30)):
        bench.finish(bench.feed(asked(job, *range(first, first + 4), request=f"r{job}")))
    monkeypatch.setattr(together, "MAX_KEPT_BLOCKS", 8)
    stores = [asked(10 + n, 50 + n, request=f"r{n}") for n in (1, 2, 3)]
    assert begin(bench, *stores, asked(14, 54))[1] == [11, 12, 14]


def test_groups_are_stored_together_and_bytes_are_counted_by_what_is_given() -> None:
    bench = small(extents=8)
    namespace = spec(groups=2, blocks_per_block=2)
    wide, narrow = namespace.groups
    state = replace(narrow, kind=GroupKind.RECURRENT_STATE)
    bench.open(namespace=replace(namespace, groups=(wide, state)))

    def of(group: int, number: int, *row: int) -> ev.Run:
        return ev.Run(group, keys(number), np.array([row], dtype=np.uint32))

    first = replace(asked(1), runs=(of(0, 10, 1, 2), of(1, 11, NULL, 3)))
    second = replace(asked(2), runs=(of(1, 21, NULL, 4),))
    partly = replace(asked(3), runs=(of(0, 30, 5, NULL),))
    made, begun = begin(bench, first, second, partly)
    assert begun == [1, 2]
    (order,) = only(made, act.StartTransfer)
    assert [(part.group, len(part.slots)) for part in order.parts] == [(0, 1), (1, 2)]
    done = ev.TransferFinished(order.mover, order.transfer, ev.TransferOutcome.DONE, 4000, 4)
    assert [each[-2:] for each in ended(bench.feed(done))] == [(2, 3000), (1, 1000)]
