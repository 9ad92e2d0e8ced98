"""Engines, ranks and movers come, change and die."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.errors import (
    InvalidArgument,
    LayoutMismatch,
    LimitExceeded,
    UnknownRegistration,
)
from kvd.core.keys import JobId, MoverId, SessionId
from kvd.core.model.job import JobState
from kvd.core.model.state import MAX_ENGINE_BLOCKS, MoverState, SessionState
from kvd.core.upkeep.session import CLOSE_GRACE_NS
from tests.core.bench import BLOCK, SECOND, Bench, only, small, spec, verdict

DONE, FAILED, REVOKED = (
    ev.TransferOutcome.DONE,
    ev.TransferOutcome.FAILED,
    ev.TransferOutcome.REVOKED,
)


@pytest.fixture
def bench() -> Bench:
    return small()


def test_namespace_and_scopes_are_known_before_a_session_is_accepted(bench: Bench) -> None:
    actions = bench.feed(ev.SessionOpened(SessionId(1), spec(groups=2), "", 1))
    kinds = [type(a) for a in actions]
    assert kinds[:3] == [act.OpenNamespace, act.OpenScope, act.OpenScope]
    assert kinds[-1] is act.Reply


def test_second_engine_of_a_namespace_opens_nothing_new(bench: Bench) -> None:
    first = bench.open(1)
    actions = bench.feed(ev.SessionOpened(SessionId(2), spec(), "", 1))
    assert [type(a) for a in actions] == [act.Reply]
    assert actions[0] == act.Reply(first)


def test_seeds_are_the_same_in_every_incarnation() -> None:
    assert small().open().epoch == small().open().epoch


def test_block_larger_than_an_extent_is_refused_and_says_what_to_raise(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match="raise extent_bytes") as caught:
        bench.open(namespace=spec(block_bytes=2**20))
    assert caught.value.field == "groups[0]"
    assert not bench.machine.namespaces()


def test_groups_of_different_shard_counts_are_refused_and_the_group_is_named(
    bench: Bench,
) -> None:
    one, two = spec(shards=1), spec(shards=2)
    mixed = replace(one, groups=(*one.groups, *one.groups, *two.groups))
    with pytest.raises(InvalidArgument, match="group 2 has 2 shards") as caught:
        bench.open(namespace=mixed)
    assert caught.value.field == "namespace.groups[2].shard_bytes"
    assert not bench.machine.namespaces()


def test_same_fingerprint_with_other_groups_is_refused(bench: Bench) -> None:
    bench.open(1)
    with pytest.raises(LayoutMismatch):
        bench.open(2, spec(block_bytes=8192))


def test_rank_and_shard_must_exist_and_have_one_writer(bench: Bench) -> None:
    bench.open(ranks=2, attach=False)
    bench.attach(1, 0)
    for rank, shard, error in (
        (2, 0, InvalidArgument),
        (0, 1, InvalidArgument),
        (1, 2, LayoutMismatch),
        (1, 0, LayoutMismatch),
    ):
        with pytest.raises(error):
            bench.feed(ev.RankAttached(SessionId(1), MoverId(7), rank, shard, True))


# -- an engine dies ------------------------------------------------------------------------------


def test_closed_session_s_leases_end_at_once(bench: Bench) -> None:
    bench.open()
    bench.stored([1])
    bench.lookup([1], lease=ev.LeaseMode.PREFIX)
    bench.close()
    assert bench.machine.statistics().leases == 0


def test_closed_session_s_transfers_are_called_off(bench: Bench) -> None:
    bench.open()
    (order,) = only(bench.store([1]), act.StartTransfer)
    actions = bench.close()
    assert only(actions, act.RevokeTransfer) == [act.RevokeTransfer(MoverId(100), order.transfer)]
    (end,) = only(bench.finish([order], REVOKED), act.EndJob)
    assert (end.status, end.reason) == (ev.JobStatus.FAILED, "SESSION_CLOSED")
    assert bench.machine.statistics().slots.reserved == 0


def test_store_whose_shards_are_all_written_is_ready_whatever_became_of_the_session(
    bench: Bench,
) -> None:
    bench.open(1)
    bench.open(2)
    started = bench.store([1], 1)
    bench.close(1)
    bench.finish(started, DONE)
    assert bench.statuses([1], 2) == "H"


def test_session_is_forgotten_with_its_last_mover(bench: Bench) -> None:
    bench.open()
    bench.store([1])
    bench.close()
    assert len(bench.machine.statistics().sessions) == 1
    bench.gone(100)
    assert not bench.machine.statistics().sessions


def ended(actions: list[act.Action]) -> list[int]:
    """The movers that are told to end."""
    return [order.mover for order in only(actions, act.KillMover)]


def test_closed_session_without_copies_ends_its_movers_at_once(bench: Bench) -> None:
    bench.open(ranks=2)
    bench.stored([1])
    assert ended(bench.close()) == [100, 101]
    assert not ended(bench.close() + bench.tick(5 * SECOND)), "told once"


def test_movers_of_a_closed_session_end_with_its_last_copy(bench: Bench) -> None:
    bench.open(ranks=2)
    first, second = only(bench.store([1]), act.StartTransfer)
    assert not ended(bench.close())
    assert not ended(bench.finish([first], DONE))
    last = bench.finish([second], DONE)
    assert ended(last) == [100, 101]
    boards = [n for n, order in enumerate(last) if isinstance(order, act.PostBoard)]
    kills = [n for n, order in enumerate(last) if isinstance(order, act.KillMover)]
    assert len(boards) == 2
    assert max(boards) < min(kills), "its ranks hear of the end first"


def test_movers_whose_copies_run_on_end_when_the_grace_has_passed(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    bench.store([1], 1)
    bench.close(1)
    grace_ns = CLOSE_GRACE_NS
    assert not ended(bench.tick(grace_ns - 1))
    late = bench.tick(1)
    assert ended(late) == [100], "and no mover of another session"
    assert only(late, act.KillMover)[0].is_late
    assert not ended(bench.tick()), "told once"
    assert not bench.machine.state.counters.movers_killed, "its copy has not passed its deadline"
    assert bench.machine.statistics().slots.quarantined == 1, "its copy may still run"
    bench.gone(100)
    assert bench.machine.statistics().slots.quarantined == 0


def test_only_ranks_whose_copies_run_on_are_called_late(bench: Bench) -> None:
    bench.open(ranks=2)
    _, second = only(bench.store([1]), act.StartTransfer)
    bench.finish([second], DONE)
    bench.close()
    kills = only(bench.tick(CLOSE_GRACE_NS), act.KillMover)
    assert {kill.mover: kill.is_late for kill in kills} == {100: True, 101: False}
    assert [kill.mover for kill in kills if "a copy ran on" in kill.reason] == [100]


def test_closed_session_that_closes_again_has_no_longer_grace(bench: Bench) -> None:
    bench.open()
    bench.store([1])
    bench.close()
    bench.now_ns += CLOSE_GRACE_NS - 1
    bench.close(gone=True)
    assert ended(bench.tick(1)) == [100]


def test_mover_that_is_gone_by_itself_takes_the_others_of_a_closed_session_along(
    bench: Bench,
) -> None:
    bench.open(ranks=2)
    bench.store([1])
    bench.close()
    (order,) = [t for t in bench.transfers.values() if t.mover == 101]
    assert not ended(bench.gone(100))
    assert ended(bench.finish([order], REVOKED)) == [101]


def test_rank_that_is_to_end_is_told_so_once(bench: Bench) -> None:
    bench.open()
    (order,) = only(bench.feed(ev.RankEnding(MoverId(100), "its worker is gone")), act.KillMover)
    assert (order.mover, order.reason, order.is_late) == (100, "its worker is gone", False)
    again = bench.feed(ev.RankEnding(MoverId(100), "and unregistered"))
    assert not ended(again + bench.close() + bench.tick(60 * SECOND))


def test_slots_being_copied_are_quarantined_until_the_mover_is_gone(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    bench.store([1, 2], 1)
    bench.feed(ev.RankEnding(MoverId(100), "killed"))
    slots = bench.machine.statistics().slots
    assert (slots.quarantined, slots.reserved) == (2, 0)
    assert bench.statuses([1], 2) == "M"
    bench.gone(100)
    assert bench.machine.statistics().slots.quarantined == 0


def test_no_new_transfer_goes_to_a_rank_that_is_ending(bench: Bench) -> None:
    bench.open()
    bench.stored([1])
    bench.feed(ev.RankEnding(MoverId(100), "killed"))
    assert verdict(bench.store([2])).reason == "RANKS_MISSING"
    assert verdict(bench.load([1])).reason == "RANKS_MISSING"


# -- a mover dies --------------------------------------------------------------------------------


def test_dead_mover_s_jobs_fail_and_the_cache_goes_on(bench: Bench) -> None:
    bench.open(ranks=2)
    bench.stored([1])
    first, second = only(bench.store([2]), act.StartTransfer)
    actions = bench.gone(first.mover)
    assert only(actions, act.RevokeTransfer) == [act.RevokeTransfer(MoverId(101), second.transfer)]
    (end,) = only(bench.finish([second], REVOKED), act.EndJob)
    assert (end.status, end.reason) == (ev.JobStatus.FAILED, "MOVER_GONE")
    assert bench.statuses([1, 2]) == "HM"


def test_engine_registers_the_lost_rank_again(bench: Bench) -> None:
    bench.open()
    bench.stored([1])
    bench.gone(100)
    bench.feed(ev.RankAttached(SessionId(1), MoverId(999), 0, 0, True))
    assert verdict(bench.load([1])).accepted


def test_late_word_of_a_dead_mover_changes_nothing(bench: Bench) -> None:
    bench.open()
    (order,) = only(bench.store([1]), act.StartTransfer)
    bench.gone(100)
    assert not bench.feed(ev.TransferFinished(order.mover, order.transfer, DONE, 1, 1))
    assert bench.statuses([1]) == "M"


def test_mover_can_not_end_another_s_transfer(bench: Bench) -> None:
    bench.open(ranks=2)
    first, _ = only(bench.store([1]), act.StartTransfer)
    assert not bench.feed(ev.TransferFinished(MoverId(101), first.transfer, FAILED, 0, 0))
    assert bench.statuses([1]) == "P"


def test_ending_of_an_unknown_mover_is_an_error(bench: Bench) -> None:
    with pytest.raises(UnknownRegistration):
        bench.feed(ev.RankEnding(MoverId(5), "x"))


# -- lifecycles ----------------------------------------------------------------------------------


def test_session_takes_only_steps_of_its_table(bench: Bench) -> None:
    bench.open()
    session = bench.machine.state.sessions[SessionId(1)]
    for new in (SessionState.FORGOTTEN, SessionState.OPEN):
        with pytest.raises(AssertionError, match="no step from"):
            session.move(new)
    bench.close()
    bench.close(gone=True)
    for new in (SessionState.OPEN, SessionState.CLOSED):
        with pytest.raises(AssertionError, match="no step from"):
            session.move(new)
    assert session.state.name == "DEPARTED"
    bench.gone(100)
    assert session.state.name == "FORGOTTEN"
    bench.close(gone=True)
    assert session.state.name == "FORGOTTEN"


def test_mover_takes_only_steps_of_its_table(bench: Bench) -> None:
    bench.open()
    mover = bench.machine.state.movers[MoverId(100)]
    bench.feed(ev.RankEnding(MoverId(100), "killed"))
    for new in (MoverState.SERVING, MoverState.ENDING):
        with pytest.raises(AssertionError, match="no step from"):
            mover.move(new)
    bench.gone(100)
    assert mover.state.name == "GONE"


def test_job_and_transfer_take_only_steps_of_their_tables(bench: Bench) -> None:
    bench.open()
    (order,) = only(bench.store([1], job=7, last=False), act.StartTransfer)
    job = bench.machine.state.sessions[SessionId(1)].jobs[JobId(7)]
    transfer = bench.machine.state.transfers[order.transfer]
    with pytest.raises(AssertionError, match="no step from"):
        job.move(JobState.ENDED)
    bench.store([2], job=7)
    assert job.state.name == "WHOLE"
    bench.finish(outcome=DONE)
    assert job.state.name == "ENDED"
    with pytest.raises(AssertionError, match="no step from"):
        job.move(JobState.OPEN)
    with pytest.raises(AssertionError, match="no step from"):
        transfer.call_off("late")
    with pytest.raises(AssertionError, match="no step from"):
        transfer.end()
    job.will_end_as(ev.JobStatus.FAILED)
    with pytest.raises(AssertionError, match="no step from"):
        job.will_end_as(ev.JobStatus.DONE)


# -- deadlines -----------------------------------------------------------------------------------


def test_half_that_never_comes_expires_and_nobody_is_killed(bench: Bench) -> None:
    bench.open()
    (order,) = only(bench.store([1]), act.StartTransfer)
    assert not bench.tick(29 * SECOND)
    actions = bench.tick(1 * SECOND)
    assert actions == [act.RevokeTransfer(MoverId(100), order.transfer)]
    assert not bench.tick(1 * SECOND), "asked once"
    (end,) = only(bench.finish([order], REVOKED), act.EndJob)
    assert end.reason == "EXPIRED"


def test_copy_that_does_not_end_gets_its_mover_killed(bench: Bench) -> None:
    bench.open()
    bench.store([1])
    bench.tick(30 * SECOND)
    (kill,) = only(bench.tick(30 * SECOND), act.KillMover)
    assert kill.mover == 100
    assert bench.machine.statistics().slots.quarantined == 1
    assert not only(bench.tick(), act.KillMover)
    (end,) = only(bench.gone(100), act.EndJob)
    assert end.status is ev.JobStatus.FAILED
    assert bench.machine.statistics().slots.quarantined == 0


# -- epochs --------------------------------------------------------------------------------------


def test_reset_moves_this_session_and_clears_nobody_else_s_blocks(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    bench.stored([1], 1)
    opened = bench.ask(ev.EpochChanged(SessionId(1), "mine"))
    assert isinstance(opened, act.EpochOpened)
    assert opened.epoch == "mine"
    assert bench.statuses([1], 1) == "M"
    assert bench.statuses([1], 2) == "H"


def test_reset_ends_the_session_s_leases(bench: Bench) -> None:
    bench.open()
    bench.stored([1])
    bench.lookup([1], lease=ev.LeaseMode.PREFIX)
    bench.feed(ev.EpochChanged(SessionId(1), "mine"))
    assert bench.machine.statistics().leases == 0


def test_engine_block_that_no_rank_registered_is_refused_naming_the_field(bench: Bench) -> None:
    bench.open(1, spec(shards=2), ranks=2, attach=False)
    bench.attach(1, 0, blocks=(64,))
    bench.attach(1, 1, blocks=(32,))
    assert verdict(bench.store([1], blocks=[31])).accepted
    with pytest.raises(InvalidArgument, match="which has 32") as refused:
        bench.store([2], blocks=[32])
    assert refused.value.field == "engine_blocks"
    (busy,) = bench.machine.state.sessions[SessionId(1)].busy.values()
    assert len(busy) == 64, "the map is as large as the largest rank, and no larger"


@pytest.mark.parametrize(
    ("blocks", "field"),
    [
        ((MAX_ENGINE_BLOCKS + 1, 1), "groups[0].num_blocks"),
        ((MAX_ENGINE_BLOCKS,) * 5, "groups.num_blocks"),
    ],
)
def test_rank_with_too_many_engine_blocks_is_refused_naming_the_field(
    blocks: tuple[int, ...], field: str
) -> None:
    bench = small(extents=8)
    bench.open(1, spec(groups=len(blocks)), attach=False)
    with pytest.raises(LimitExceeded) as refused:
        bench.attach(1, blocks=blocks)
    assert refused.value.field == field
    assert not bench.machine.state.movers


def test_engine_blocks_of_a_tenant_are_bounded_over_its_engines(bench: Bench) -> None:
    groups = spec(groups=4)
    most = (MAX_ENGINE_BLOCKS,) * 4
    for session in (1, 2, 3):
        bench.open(session, groups, attach=False)
    bench.attach(1, blocks=most)
    bench.attach(2, blocks=most)
    with pytest.raises(LimitExceeded, match="tenant"):
        bench.attach(3, blocks=(1, 1, 1, 1))
    bench.open(4, spec("other", "other tenant"), attach=False)
    bench.attach(4, blocks=(1,))


def test_ranks_of_one_engine_count_once_for_their_tenant(bench: Bench) -> None:
    groups = spec(groups=4)
    most = (MAX_ENGINE_BLOCKS,) * 4
    for session in (1, 2):
        bench.open(session, groups, ranks=2, attach=False)
    for session, rank in itertools.product((1, 2), (0, 1)):
        bench.attach(session, rank, 0, writer=not rank, blocks=most)
    assert len(bench.machine.state.movers) == 4


def test_session_may_come_back_to_its_own_epoch(bench: Bench) -> None:
    bench.open(1, epoch="mine")
    bench.stored([1], 1)
    bench.close(1)
    bench.open(2, epoch="mine")
    assert bench.statuses([1], 2) == "H"


def test_job_that_waits_for_its_next_piece_fails_with_its_session(bench: Bench) -> None:
    bench.open()
    assert verdict(bench.store([1], job=4, last=False)).accepted
    bench.finish()
    (ended,) = only(bench.close(), act.EndJob)
    assert (ended.job, ended.status, ended.reason) == (4, ev.JobStatus.FAILED, "SESSION_CLOSED")
    bench.gone(100)
    assert not bench.machine.state.sessions


def test_load_fails_with_the_mover_that_is_told_to_end_and_pins_stay_until_it_has(
    bench: Bench,
) -> None:
    bench.open()
    bench.stored([1])
    bench.load([1], job=9)
    killed = bench.feed(ev.RankEnding(MoverId(100), "")) + bench.work_off()
    assert only(killed, act.KillMover) == [act.KillMover(MoverId(100), "MOVER_GONE", False)]
    assert not only(killed, act.EndJob), "the copy may run on"
    assert bench.machine.statistics().tenants[0].evictable_bytes == 0
    (ended,) = only(bench.gone(100), act.EndJob)
    assert (ended.job, ended.kind, ended.status) == (9, ev.JobKind.LOAD, ev.JobStatus.FAILED)
    assert ended.reason == "MOVER_GONE"
    assert bench.machine.statistics().tenants[0].evictable_bytes == BLOCK
