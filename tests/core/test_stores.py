"""Stores: when a block becomes readable, what is copied, and who waits for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.errors import DuplicateJob, InvalidArgument, LimitExceeded
from kvd.core.jobs import waiters, waits
from kvd.core.keys import JobId, KeyBatch, MoverId, SessionId
from kvd.core.model.state import MAX_ENGINE_BLOCKS
from kvd.core.model.turn import Turn
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.limits import MAX_JOBS_IN_FLIGHT
from tests.core.bench import MS, Bench, context, engine_blocks, keys, only, small, spec, verdict

DONE, FAILED, REVOKED = (
    ev.TransferOutcome.DONE,
    ev.TransferOutcome.FAILED,
    ev.TransferOutcome.REVOKED,
)


@pytest.fixture
def bench() -> Bench:
    return small()


def test_block_is_readable_only_when_every_shard_is_written(bench: Bench) -> None:
    bench.open(ranks=2)
    started = bench.store([1, 2], job=7)
    first, second = only(started, act.StartTransfer)
    told = [(order.mover, order.jobs[0], order.kind) for order in (first, second)]
    assert told == [(100, 7, ev.JobKind.STORE), (101, 7, ev.JobKind.STORE)]
    assert bench.statuses([1, 2, 3]) == "PPM"
    bench.finish([first])
    assert bench.statuses([1]) == "P"
    bench.finish([second])
    assert bench.statuses([1, 2]) == "HH"


def test_done_is_posted_after_record_tag_and_news(bench: Bench) -> None:
    bench.open()
    kinds = [type(action) for action in bench.finish(bench.store([1]))]
    assert kinds == [
        act.WriteReady,
        act.PublishTags,
        act.AnnounceStored,
        act.PostBoard,
        act.EndJob,
    ]


def test_every_rank_hears_the_end_of_a_store(bench: Bench) -> None:
    bench.open(ranks=2)
    boards = only(bench.finish(bench.store([1])), act.PostBoard)
    assert [(b.mover, b.status) for b in boards] == [
        (100, ev.JobStatus.DONE),
        (101, ev.JobStatus.DONE),
    ]


def test_rank_that_only_reads_is_sent_no_store_but_hears_of_it(bench: Bench) -> None:
    bench.open(namespace=spec(), ranks=2, attach=False)
    bench.attach(1, 0, shard=0)
    bench.attach(1, 1, shard=0, writer=False)
    started = bench.store([1])
    assert [order.mover for order in only(started, act.StartTransfer)] == [100]
    assert [b.mover for b in only(bench.finish(started), act.PostBoard)] == [100, 101]


def test_failed_rank_keeps_the_block_unreadable_and_calls_off_the_others(bench: Bench) -> None:
    bench.open(ranks=2)
    first, second = only(bench.store([1]), act.StartTransfer)
    actions = bench.finish([first], FAILED)
    assert only(actions, act.RevokeTransfer) == [act.RevokeTransfer(second.mover, second.transfer)]
    assert bench.statuses([1]) == "M"
    assert bench.machine.statistics().slots.quarantined == 1
    ended = bench.finish([second], DONE)
    (end,) = only(ended, act.EndJob)
    assert (end.status, end.reason, end.blocks) == (ev.JobStatus.FAILED, "COPY_FAILED", 0)
    assert not only(ended, act.WriteReady)
    assert bench.machine.statistics().slots.quarantined == 0


def test_store_that_the_mover_never_took_says_queue_full(bench: Bench) -> None:
    bench.open()
    (end,) = only(bench.finish(bench.store([1]), REVOKED), act.EndJob)
    assert (end.status, end.reason) == (ev.JobStatus.FAILED, "QUEUE_FULL")


def test_key_that_is_stored_already_is_not_stored_again(bench: Bench) -> None:
    bench.open()
    bench.stored([1, 2])
    actions = bench.store([1, 2, 3])
    (order,) = only(actions, act.StartTransfer)
    assert len(order.parts[0].slots) == 1
    assert verdict(actions).blocks == 1


def test_key_that_any_engine_is_storing_is_not_stored_again(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    bench.store([1], 1)
    actions = bench.store([1], 2)
    assert not only(actions, act.StartTransfer)
    (end,) = only(actions, act.EndJob)
    assert (end.status, end.blocks, end.left) == (ev.JobStatus.PARTIAL, 0, 1)


def test_key_named_twice_in_one_store_gets_one_slot(bench: Bench) -> None:
    bench.open()
    actions = bench.store([5, 6, 5], blocks=[1, 2, 3])
    (order,) = only(actions, act.StartTransfer)
    assert order.parts[0].engine_blocks.ravel().tolist() == [1, 2]


def test_engine_block_whose_copy_is_in_flight_is_not_offered_twice(bench: Bench) -> None:
    bench.open()
    first = bench.store([1], blocks=[7])
    assert not only(bench.store([2], blocks=[7]), act.StartTransfer)
    bench.finish(first)
    assert only(bench.store([2], blocks=[7]), act.StartTransfer)


def test_engine_blocks_of_two_sessions_are_different_blocks(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    bench.store([1], 1, blocks=[7])
    assert only(bench.store([2], 2, blocks=[7]), act.StartTransfer)


def test_block_of_nothing_but_nulls_is_never_stored(bench: Bench) -> None:
    bench.open()
    actions = bench.store([1, 2], blocks=[3, 4])
    bench.finish(actions)
    run = ev.Run(0, keys(8), np.full((1, 1), NULL_ENGINE_BLOCK, dtype=np.uint32))
    actions = bench.feed(ev.StoreRequested(SessionId(1), JobId(50), context(), (run,)))
    assert not only(actions, act.StartTransfer)
    assert bench.statuses([8]) == "M"


def test_job_in_pieces_ends_after_its_last(bench: Bench) -> None:
    bench.open()
    first = bench.store([1], job=5, last=False)
    assert not only(bench.finish(first), act.EndJob)
    assert bench.statuses([1]) == "H"
    (end,) = only(bench.finish(bench.store([2], job=5)), act.EndJob)
    assert (end.status, end.blocks) == (ev.JobStatus.DONE, 2)


def test_job_whose_later_piece_found_no_room_is_not_called_done() -> None:
    bench = small(extents=1)
    bench.open()
    bench.store(range(10), job=5, last=False)
    actions = bench.store(range(10, 20), job=5)
    assert (verdict(actions).accepted, verdict(actions).reason) == (False, "NO_ROOM")
    (end,) = only(bench.finish(), act.EndJob)
    assert (end.status, end.reason, end.blocks) == (ev.JobStatus.FAILED, "NO_ROOM", 10)
    assert bench.statuses([0, 9]) == "HH"


def test_store_without_all_ranks_is_refused_on_the_board_of_those_that_stand(
    bench: Bench,
) -> None:
    bench.open(ranks=2, attach=False)
    bench.attach(1, 0)
    actions = bench.store([1])
    assert verdict(actions).reason == "RANKS_MISSING"
    assert [b.status for b in only(actions, act.PostBoard)] == [ev.JobStatus.REFUSED]
    (end,) = only(actions, act.EndJob)
    assert end.status is ev.JobStatus.REFUSED


def test_draining_admits_no_store_but_loads_go_on(bench: Bench) -> None:
    bench.open()
    bench.stored([1])
    bench.feed(ev.DrainStarted())
    assert verdict(bench.store([2])).reason == "DRAINING"
    assert bench.machine.room(bench.machine.namespaces()[0]) == (0,)
    assert bench.statuses([2]) == "m"
    assert verdict(bench.load([1])).accepted


def test_live_job_id_is_not_taken_twice_and_nothing_changes(bench: Bench) -> None:
    bench.open()
    bench.store([1], job=5)
    before = bench.machine.statistics()
    with pytest.raises(DuplicateJob):
        bench.store([2], job=5)
    assert bench.machine.statistics() == before


@pytest.mark.parametrize(
    "run",
    [
        ev.Run(1, keys(1), engine_blocks([1])),
        ev.Run(0, keys(1, hash_bytes=16), engine_blocks([1])),
        ev.Run(0, keys(1, 2), engine_blocks([1])),
        ev.Run(0, keys(1), engine_blocks([1, 2]).reshape(1, 2)),
        ev.Run(0, keys(1), np.full((1, 1), 1 << 30, dtype=np.uint32)),
        ev.Run(0, KeyBatch(np.zeros((20000, 4), np.uint64), 32), engine_blocks([0] * 20000)),
    ],
    ids=["group", "hash length", "rows", "columns", "engine block", "too many keys"],
)
def test_impossible_run_is_refused_and_nothing_changes(bench: Bench, run: ev.Run) -> None:
    bench.open()
    before = bench.machine.statistics()
    event = ev.StoreRequested(SessionId(1), JobId(1), context(), (run,))
    with pytest.raises(InvalidArgument):
        bench.feed(event)
    assert bench.machine.statistics() == before


def test_jobs_in_flight_are_bounded() -> None:
    bench = small()
    bench.open()
    machine, session = bench.machine, SessionId(1)
    for job in range(1, MAX_JOBS_IN_FLIGHT + 1):
        event = ev.StoreRequested(session, JobId(job), context(), (), last=False)
        machine.handle(event, 0)
    with pytest.raises(LimitExceeded):
        machine.handle(ev.StoreRequested(session, JobId(10**6), context(), (), last=False), 0)


def test_a_store_says_done_only_when_every_key_is_found(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    bench.stored([1])
    bench.store([2], 1)
    (end,) = only(bench.finish(bench.store([1, 2, 3], 2)), act.EndJob)
    assert (end.status, end.blocks, end.left) == (ev.JobStatus.PARTIAL, 1, 1)
    boards = [b.status for each in bench.history for b in only(each, act.PostBoard)]
    assert boards[-1] is ev.JobStatus.PARTIAL
    bench.finish()
    (end,) = only(bench.store([1, 2, 3], 2), act.EndJob)
    assert (end.status, end.left) == (ev.JobStatus.DONE, 0)


def test_a_store_says_how_many_keys_it_left_for_each_reason() -> None:
    bench = small(store_threshold=2)
    bench.open()
    (end,) = only(bench.store([1, 2]), act.EndJob)
    assert (end.status, end.left) == (ev.JobStatus.PARTIAL, 2), "filtered"
    bench.store([1], blocks=[7])
    (end,) = only(bench.store([9], blocks=[8]), act.EndJob)
    (end,) = only(bench.store([9], blocks=[7]), act.EndJob)
    assert (end.status, end.left) == (ev.JobStatus.PARTIAL, 1), "its engine block is in flight"
    null = ev.Run(0, keys(5), np.full((1, 1), NULL_ENGINE_BLOCK, dtype=np.uint32))
    asked = ev.StoreRequested(SessionId(1), JobId(50), context(), (null,))
    (end,) = only(bench.feed(asked), act.EndJob)
    assert (end.status, end.left) == (ev.JobStatus.PARTIAL, 1), "null all over"


# -- request-level stores -----------------------------------------------------------------------


def test_request_level_store_ends_when_its_leader_is_done(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    leader = bench.store([1], 1)
    follower = bench.store([1, 2], 2, whole=True)
    (own,) = only(follower, act.StartTransfer)
    assert not only(bench.finish([own]), act.EndJob)
    ends = only(bench.finish(leader), act.EndJob)
    assert sorted((e.session, e.status) for e in ends) == [
        (1, ev.JobStatus.DONE),
        (2, ev.JobStatus.DONE),
    ]


def test_request_level_store_of_an_engine_block_that_is_being_copied_fails(bench: Bench) -> None:
    bench.open()
    first = bench.store([1], blocks=[7])
    copied = bench.store([2, 3], blocks=[7, 8], whole=True)
    (end,) = only(bench.finish(copied), act.EndJob)
    assert (end.status, end.reason, end.blocks) == (ev.JobStatus.FAILED, "COPY_FAILED", 1)
    bench.finish(first)
    assert bench.statuses([1, 2, 3]) == "HMH"


def test_follower_copies_its_own_bytes_when_its_leader_fails(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    leader = bench.store([1], 1, blocks=[10])
    bench.store([1], 2, blocks=[20], job=9, whole=True)
    actions = bench.finish(leader, FAILED)
    (order,) = only(actions, act.StartTransfer)
    assert (order.mover, order.jobs[0]) == (200, 9)
    assert order.parts[0].engine_blocks.tolist() == [[20]]
    (end,) = only(bench.finish([order]), act.EndJob)
    assert (end.session, end.status) == (2, ev.JobStatus.DONE)
    assert bench.statuses([1]) == "H"


def test_second_follower_follows_the_first_when_the_leader_fails(bench: Bench) -> None:
    for session in (1, 2, 3):
        bench.open(session)
    leader = bench.store([1], 1)
    bench.store([1], 2, whole=True)
    bench.store([1], 3, whole=True)
    (order,) = only(bench.finish(leader, FAILED), act.StartTransfer)
    assert order.mover == 200
    ends = only(bench.finish([order]), act.EndJob)
    assert sorted(e.session for e in ends) == [2, 3]
    assert {e.status for e in ends} == {ev.JobStatus.DONE}


def test_follower_copies_into_another_slot_while_the_old_one_is_still_written(
    bench: Bench,
) -> None:
    bench.open(1, ranks=2)
    bench.open(2, ranks=2)
    first, second = only(bench.store([1], 1), act.StartTransfer)
    bench.store([1], 2, whole=True)
    (order, _) = only(bench.finish([first], FAILED), act.StartTransfer)
    assert order.parts[0].slots.tolist() != second.parts[0].slots.tolist()
    assert bench.machine.statistics().slots.quarantined == 1


def test_follower_without_room_fails_when_its_leader_fails() -> None:
    bench = small(extents=2)
    bench.open(1, ranks=2)
    bench.open(2, ranks=2)
    first, _ = only(bench.store([1], 1), act.StartTransfer)
    bench.store(range(100, 115), 1)
    bench.store([1], 2, whole=True)
    actions = bench.finish([first], FAILED)
    assert not only(actions, act.StartTransfer)
    (end,) = only(actions, act.EndJob)
    assert (end.session, end.reason) == (2, "NO_ROOM")


def test_closed_session_stops_following(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    leader = bench.store([1], 1)
    bench.store([1], 2, whole=True)
    (end,) = only(bench.close(2), act.EndJob)
    assert (end.session, end.reason) == (2, "SESSION_CLOSED")
    assert not only(bench.finish(leader, FAILED), act.StartTransfer)


def test_follower_whose_rank_is_lost_fails_when_its_leader_fails(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    leader = bench.store([1], 1)
    bench.store([1], 2, whole=True)
    bench.feed(ev.RankEnding(MoverId(200), "test"))
    ends = only(bench.finish(leader, FAILED), act.EndJob)
    assert sorted((e.session, e.reason) for e in ends) == [
        (1, "COPY_FAILED"),
        (2, "RANKS_MISSING"),
    ]


def test_request_level_store_of_readable_keys_is_done_at_once(bench: Bench) -> None:
    bench.open()
    bench.stored([1, 2])
    (end,) = only(bench.store([1, 2], whole=True), act.EndJob)
    assert end.status is ev.JobStatus.DONE


def test_later_piece_that_breaks_a_rule_fails_the_job_and_ends_it(bench: Bench) -> None:
    bench.open()
    started = bench.store([1, 2], job=7, last=False)
    actions = bench.store([3], job=7, blocks=[0], group=0, last=False)
    assert verdict(actions).accepted
    run = ev.Run(0, keys(4), np.full((1, 1), MAX_ENGINE_BLOCKS, dtype=np.uint32))
    event = ev.StoreRequested(SessionId(1), JobId(7), context(), (run,))
    refused = verdict(bench.feed(event))
    assert (refused.accepted, refused.reason) == (False, "INVALID_ARGUMENT")
    (end,) = only(bench.finish(started + actions), act.EndJob)
    assert (end.job, end.status, end.reason) == (7, ev.JobStatus.FAILED, "INVALID_ARGUMENT")
    assert bench.statuses([1, 2, 3, 4]) == "HHHM"


@pytest.mark.parametrize("outcome", [DONE, FAILED, REVOKED])
def test_key_repeated_in_a_later_piece_ends_the_job_once(
    bench: Bench, outcome: ev.TransferOutcome
) -> None:
    bench.open()
    started = bench.store([1, 2], job=5, blocks=[1, 2], whole=True, last=False)
    started += bench.store([2, 1], job=5, blocks=[3, 4], whole=True)
    ends = only(started + bench.finish(started, outcome) + bench.finish(), act.EndJob)
    assert [(end.job, end.status) for end in ends] == [
        (5, ev.JobStatus.DONE if outcome is DONE else ev.JobStatus.FAILED)
    ]


def test_key_that_a_job_waits_for_twice_is_copied_once_when_its_leader_fails(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    leader = bench.store([1], 1)
    bench.store([1], 2, job=7, blocks=[10], whole=True, last=False)
    bench.store([1], 2, job=7, blocks=[11], whole=True)
    (order,) = only(bench.finish(leader, FAILED), act.StartTransfer)
    (end,) = only(bench.finish([order]), act.EndJob)
    assert (end.session, end.job, end.status) == (2, 7, ev.JobStatus.DONE)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Waits that each event carried on with."""
    carried: list[int] = []
    sound = waiters.go_on

    def go_on(turn: Turn) -> Any:
        before = len(turn.state.released)
        seen = sound(turn)
        carried.append(before - len(turn.state.released))
        return seen

    monkeypatch.setattr(waiters, "go_on", go_on)
    return carried


@pytest.mark.parametrize("outcome", [DONE, FAILED])
def test_an_event_carries_on_with_few_of_those_who_wait_for_one_store(
    monkeypatch: pytest.MonkeyPatch, outcome: ev.TransferOutcome
) -> None:
    """8 jobs of 16,384 keys that followed one another took 128 MiB and an event of 3 s."""
    carried = counting(monkeypatch)
    bench = small()
    bench.open(1)
    bench.open(2)
    leader = bench.store([1, 2], 1)
    jobs = 3 * waiters.WAITS_AT_ONCE
    for _ in range(jobs):
        bench.store([1, 2], 2, whole=True)
    news = bench.finish(leader, outcome)
    while bench.machine.state.released or bench.transfers:
        news += bench.tick(MS) + bench.finish()
    assert max(carried) <= waiters.WAITS_AT_ONCE
    ends = [end.status for end in only(news, act.EndJob) if end.session == 2]
    assert ends == [ev.JobStatus.DONE] * jobs
    assert bench.statuses([1, 2]) == "HH"


def test_waits_of_a_failed_store_copy_few_keys_in_one_event() -> None:
    bench = small(extents=64)
    bench.open(1)
    bench.open(2)
    per_job = waiters.KEYS_AT_ONCE // 2
    leaders = [bench.store(range(n * per_job, (n + 1) * per_job), 1) for n in range(4)]
    bench.store(range(4 * per_job), 2, whole=True)
    bench.feed(ev.RankEnding(MoverId(100), "test"))
    copied: list[int] = []
    while bench.machine.state.released or not copied:
        orders = only(bench.history[-1], act.StartTransfer)
        copied.append(sum(len(part.slots) for order in orders for part in order.parts))
        bench.tick(MS)
    orders = only(bench.history[-1], act.StartTransfer)
    copied.append(sum(len(part.slots) for order in orders for part in order.parts))
    assert max(copied) == waiters.KEYS_AT_ONCE
    assert sum(copied) == len(leaders) * per_job


def test_what_a_session_and_a_tenant_may_wait_for_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "MAX_WAITING_BYTES", 4096)
    monkeypatch.setattr(waits, "MAX_TENANT_WAITING_BYTES", 6000)
    bench = small()
    for session in (1, 2, 3):
        bench.open(session)
    leader = bench.store([1], 1)

    def until_refused(session: int) -> int:
        for number in range(100):
            answer = verdict(bench.store([1], session, whole=True))
            if not answer.accepted:
                assert answer.reason == "LIMIT_EXCEEDED"
                return number
        raise AssertionError("no bound")

    assert until_refused(2) == 3, "its own bound"
    assert until_refused(3) == 2, "what is left of its tenant's"
    bench.finish(leader)
    assert bench.machine.state.sessions[SessionId(2)].waiting_bytes == 0
    assert verdict(bench.store([2, 1], 2, whole=True)).accepted


def test_closed_session_with_many_waits_is_forgotten_over_some_events() -> None:
    bench = small()
    bench.open(1)
    bench.open(2)
    leader = bench.store([1], 1)
    for _ in range(3 * waiters.WAITS_AT_ONCE):
        bench.store([1], 2, whole=True)
    bench.leave(2)
    for _ in range(3):
        bench.tick(MS)
    assert SessionId(2) not in bench.machine.state.sessions
    (end,) = only(bench.finish(leader), act.EndJob)
    assert end.session == 1


# -- the reuse filter ----------------------------------------------------------------------------


def test_block_is_stored_on_its_second_sighting_when_asked_so() -> None:
    bench = small(store_threshold=2)
    bench.open()
    assert bench.statuses([1]) == "m"
    actions = bench.store([1, 2])
    assert verdict(actions).accepted
    assert verdict(actions).blocks == 0
    assert bench.statuses([1, 2, 3]) == "MMm"
    assert verdict(bench.store([2, 3])).blocks == 1


def test_request_level_store_passes_the_filter() -> None:
    bench = small(store_threshold=3)
    bench.open()
    assert verdict(bench.store([1], whole=True)).blocks == 1


def test_lookup_is_no_sighting() -> None:
    bench = small(store_threshold=2)
    bench.open()
    for _ in range(3):
        assert bench.statuses([1]) == "m"


def several(*runs: ev.Run, job: int = 1) -> ev.StoreRequested:
    return ev.StoreRequested(SessionId(1), JobId(job), context(), runs)


def placed(actions: list[act.Action]) -> list[tuple[int, list[list[int]]]]:
    """The engine blocks that each part of the first rank's order takes from, by group."""
    order = only(actions, act.StartTransfer)[0]
    return [(part.group, part.engine_blocks.tolist()) for part in order.parts]


def test_runs_of_one_group_are_stored_as_one_in_their_order(bench: Bench) -> None:
    bench.open(namespace=spec(groups=2))
    made = bench.feed(
        several(
            ev.Run(1, keys(5, 6), engine_blocks([50, 60]), first_block=4),
            ev.Run(0, keys(1), engine_blocks([10])),
            ev.Run(0, keys(), engine_blocks([])),
            ev.Run(1, keys(9), engine_blocks([90]), first_block=8),
        )
    )
    assert placed(made) == [(1, [[50], [60], [90]]), (0, [[10]])]
    assert verdict(made).blocks == 4
    bench.finish(made)
    assert bench.statuses([1]) == "H"
    assert bench.lookup([5, 6, 9, 1], group=1).statuses == bytes([1, 1, 1, 4])


def test_key_that_is_named_twice_is_copied_from_where_it_stands_first(bench: Bench) -> None:
    bench.open()
    made = bench.feed(
        several(
            ev.Run(0, keys(1, 2, 1), engine_blocks([10, 20, 11])),
            ev.Run(0, keys(2, 3), engine_blocks([21, 30]), first_block=3),
        )
    )
    assert placed(made) == [(0, [[10], [20], [30]])]
    bench.finish(made)
    assert bench.statuses([1, 2, 3]) == "HHH"


def test_store_of_nothing_ends_at_once(bench: Bench) -> None:
    bench.open()
    made = bench.feed(several())
    assert verdict(made).blocks == 0
    assert [(each.status, each.left) for each in only(made, act.EndJob)] == [(ev.JobStatus.DONE, 0)]


@pytest.mark.parametrize("account", ["", "somebody"])
def test_tail_of_a_request_makes_no_room_for_itself_by_its_own_head(account: str) -> None:
    bench = small(extents=1)
    bench.open()

    def stored(request: str, numbers: list[int], job: int) -> list[act.Action]:
        run = ev.Run(0, keys(*numbers), engine_blocks(numbers), first_block=numbers[0])
        event = ev.StoreRequested(SessionId(1), JobId(job), context(account, request), (run,))
        made = bench.feed(event)
        return made + bench.finish(made)

    stored("long", list(range(10)), 1)
    stored("other", list(range(20, 26)), 2)
    made = stored("long", list(range(10, 14)), 3)
    assert verdict(made).blocks == 4
    assert bench.statuses(range(14), account=account) == "H" * 14
    assert bench.statuses(range(20, 26), account=account).count("H") == 2
    assert verdict(stored("long", list(range(14, 18)), 4)).reason == "NO_ROOM"
