"""What control makes of a tier's word about what has left it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from kvd.config.tiers import KINDS, TierRule
from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import (
    CopyId,
    MoverId,
    NamespaceId,
    RowId,
    ScopeName,
    SearchId,
    TenantId,
    TierId,
)
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.tiers import TierCounters
from kvd.core.upkeep.statistics import TierFigures
from kvd.pool.generations import EVERY, MAX_CLEARED_NAMESPACES, Generations
from kvd.runtime import tiers as module
from kvd.runtime.tiers import Tiers
from kvd.tiers.process import OrderEnd, OrderId, TierAnswer, TierLeft
from kvd.tiers.store import Found, Outcome, TierReason, TierUsage
from tests.tiers.tier_rig import OTHER_SCOPE, SCOPE, hashes, keys, on_loop

TIER = TierId(0)


def no_tenant(_namespace: NamespaceId) -> TenantId | None:
    return None


def tiers(reported: list[ev.Event], generations: Generations | None = None) -> Tiers:
    pool = cast(Any, SimpleNamespace(generations=generations))
    made = Tiers((), pool, str, no_tenant, cast(Any, reported.append), lambda: cast(Any, 1))
    made._keepers.append(cast(Any, SimpleNamespace(process=object())))
    return made


def shared_and_own(reported: list[Any], generations: Generations) -> Tiers:
    """Two that have no process yet."""
    pool = cast(Any, SimpleNamespace(generations=generations))
    rules = [TierRule("far", "nobody:Store", medium="REMOTE"), TierRule("own", "nobody:Store")]
    return Tiers(rules, pool, str, no_tenant, reported.append, lambda: cast(Any, 1))


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@on_loop
async def test_only_scopes_that_control_has_named_are_passed_on() -> None:
    reported: list[ev.Event] = []
    made = tiers(reported)
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    made._scope_names[SCOPE] = name
    made.left_told(TIER, TierLeft((*keys(1), *keys(2, scope=OTHER_SCOPE))))
    (forgot,) = reported
    assert isinstance(forgot, ev.TierForgot)
    assert forgot.name == name


@on_loop
async def test_a_store_that_knows_nothing_any_more_costs_the_core_one_look_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DOUBTED_AGAIN_S", 0.2)
    reported: list[ev.Event] = []
    made = tiers(reported)
    for _ in range(50):
        made.left_told(TIER, TierLeft((), in_doubt=True))
    assert len(reported) == 1
    await asyncio.sleep(0.5)
    assert len(reported) == 2, "the last word counts"
    made.left_told(TIER, TierLeft((), in_doubt=True))
    assert len(reported) == 3
    made._keepers[0] = cast(Any, SimpleNamespace(process=None))
    made.left_told(TIER, TierLeft((), in_doubt=True))
    await asyncio.sleep(0.5)
    assert len(reported) == 3, "its process has ended, which says as much"


@on_loop
async def test_a_clear_that_renames_all_has_the_core_believe_nothing(tmp_path: Path) -> None:
    """There is no room for the name of another cleared namespace: all get another one."""
    reported: list[ev.Event] = []
    generations = Generations(tmp_path / "generations.table")
    made = tiers(reported, generations)
    made._rules = cast(Any, (SimpleNamespace(medium="LOCAL"),))
    made._deleting[TIER] = {}
    name = ScopeName(NamespaceId(5000), "", "", 0, 0)
    before = made._scope(TIER, name)
    for number in range(MAX_CLEARED_NAMESPACES):
        made.scopes_cleared(NamespaceId(number))
        assert not reported
    assert made._scope(TIER, name) == before
    made.scopes_cleared(NamespaceId(MAX_CLEARED_NAMESPACES))
    assert reported == [ev.TierDoubted(TIER)]
    after = made._scope(TIER, name)
    made.left_told(TIER, TierLeft(tuple(keys(1, scope=before))))
    assert len(reported) == 1, "a block under its former name is none of today's"
    made.left_told(TIER, TierLeft(tuple(keys(1, scope=after))))
    assert len(reported) == 2
    generations.close()


@on_loop
async def test_so_many_namespaces_are_deleted_one_by_one_and_beyond_that_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces come, are cleared and go while the tier has no process."""
    assert module.MAX_DELETIONS == 4096
    monkeypatch.setattr(module, "MAX_DELETIONS", 4)
    reported: list[ev.Event] = []
    generations = Generations(tmp_path / "generations.table")
    pool = cast(Any, SimpleNamespace(generations=generations))
    rules = (TierRule("one", "nobody:Store"),)
    made = Tiers(rules, pool, str, no_tenant, cast(Any, reported.append), lambda: cast(Any, 1))
    for number in range(1000):
        made.carry_out(act.ClearTier(TIER, f"namespace {number}"))
        assert len(made._deleting[TIER]) <= 4
    hidden = next(reversed(made._deleting[TIER].values()))
    made.carry_out(act.ClearTier(TIER, hidden.fingerprint))
    assert made._deleting[TIER].keys() >= {hidden.name}, "it is one of those already"
    waits = {deletion.fingerprint for deletion in made._deleting[TIER].values()} - {""}
    cleared = [event.fingerprint for event in reported if isinstance(event, ev.TierCleared)]
    assert sorted([*cleared, *waits]) == sorted(f"namespace {number}" for number in range(1000))
    deleting = Mock(return_value=True)
    process = cast(Any, SimpleNamespace(delete_scopes=deleting))
    made._keepers.append(cast(Any, SimpleNamespace(process=process)))
    made.tier_started(TIER, process)
    assert deleting.call_args_list[0].args[1] == (EVERY,)
    every = made._deleting[TIER][EVERY].order
    made.order_ended(TIER, TierAnswer(every, OrderEnd.ANSWERED, np.array([])))
    assert ev.TierDoubted(TIER) in reported, "it took along what was written meanwhile"
    generations.close()


@on_loop
async def test_a_shared_store_that_has_deleted_all_owes_no_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next daemon has it delete what was stored since, for all nodes."""
    monkeypatch.setattr(module, "MAX_DELETIONS", 4)
    generations = Generations(tmp_path / "generations.table")
    pool = cast(Any, SimpleNamespace(generations=generations))
    rules = [TierRule(name, "nobody:Store", medium="REMOTE") for name in ("one", "two")]
    made = Tiers(rules, pool, str, no_tenant, lambda _event: None, lambda: cast(Any, 1))
    process = cast(Any, SimpleNamespace(delete_scopes=Mock(return_value=True)))

    def clear(number: int) -> None:
        made.scopes_cleared(NamespaceId(number))
        for tier in (TIER, TierId(1)):
            made.carry_out(act.ClearTier(tier, str(number)))

    for number in range(5):  # the last is one too many: each is to delete all
        clear(number)
    made._keepers += [cast(Any, SimpleNamespace(process=process))] * 2
    for tier in (TIER, TierId(1)):
        made.tier_started(tier, process)
    deletion = made._deleting[TIER][EVERY]
    clear(7)  # behind that one
    theirs = made._bits(TierId(1))
    made.order_ended(TIER, TierAnswer(deletion.order, OrderEnd.ANSWERED, np.array([])))
    left = dict(generations.unsettled())
    assert left.pop(module._namespace_name("7")) == theirs | made._bits(TIER)
    assert set(left.values()) == {theirs}
    for each in [*made._deleting[TierId(1)].values(), *made._deleting[TIER].values()]:
        for tier in (TierId(1), TIER):
            made.order_ended(tier, TierAnswer(each.order, OrderEnd.ANSWERED, np.array([])))
    assert generations.unsettled() == []
    generations.close()


@on_loop
async def test_a_store_with_another_timeout_is_the_one_that_had_yet_to_delete(
    tmp_path: Path,
) -> None:
    """Else it deletes all of the namespace once more when it has the former one again."""
    generations = Generations(tmp_path / "generations.table")
    pool = cast(Any, SimpleNamespace(generations=generations))
    name = module._namespace_name("7")

    def told(**options: str | float) -> Tiers:
        rule = TierRule("cold", KINDS["s3"], medium="REMOTE", options=options)
        return Tiers([rule], pool, str, no_tenant, lambda _event: None, lambda: cast(Any, 1))

    told(bucket="one", request_timeout_seconds=4.0).scopes_cleared(NamespaceId(7))
    made = told(bucket="one", request_timeout_seconds=9.0)
    made._settle(TIER, name)
    assert generations.unsettled() == []
    made.scopes_cleared(NamespaceId(7))
    told(bucket="two")._settle(TIER, name)
    assert generations.unsettled(), "it is another store"
    generations.close()


@on_loop
async def test_what_is_cleared_before_the_tiers_begin_is_deleted_once_they_serve(
    tmp_path: Path,
) -> None:
    """Calls are taken as soon as the socket listens, and its processes start behind that."""
    generations = Generations(tmp_path / "generations.table")
    pool = cast(Any, SimpleNamespace(generations=generations))
    rules = (TierRule("one", "nobody:Store"),)
    made = Tiers(rules, pool, str, no_tenant, lambda _event: None, lambda: cast(Any, 1))
    made.carry_out(act.ClearTier(TIER, "a namespace"))
    deleting = Mock(return_value=True)
    process = cast(Any, SimpleNamespace(delete_scopes=deleting))
    made._keepers.append(cast(Any, SimpleNamespace(process=process)))
    made.tier_started(TIER, process)
    (order,) = deleting.call_args_list
    assert order.args[1] == (module._namespace_name("a namespace"),)
    generations.close()


@on_loop
async def test_what_shared_stores_have_yet_to_delete_is_told(tmp_path: Path) -> None:
    generations = Generations(tmp_path / "generations.table")
    pool = cast(Any, SimpleNamespace(generations=generations))
    rules = [TierRule("own", "nobody:Store"), TierRule("far", "nobody:Store", medium="REMOTE")]
    made = Tiers(rules, pool, str, no_tenant, lambda _event: None, lambda: cast(Any, 1))

    def owed() -> list[tuple[int, bool]]:
        return [(told.undeleted, told.is_hidden) for told in made.told()]

    assert owed() == [(0, False), (0, False)]
    for number in (1, 2, 2):
        made.scopes_cleared(NamespaceId(number))
        for tier in (TIER, TierId(1)):
            made.carry_out(act.ClearTier(tier, str(number)))
    assert owed() == [(0, False), (2, False)]
    made.all_cleared()
    assert owed() == [(0, False), (0, True)]
    generations.close()


@on_loop
async def test_a_shared_store_that_has_yet_to_delete_is_not_asked_and_the_core_told_so(
    tmp_path: Path,
) -> None:
    """Else what waits for the answer waits for ever, or finds what was cleared."""
    reported: list[ev.Event] = []
    generations = Generations(tmp_path / "generations.table")
    pool = cast(Any, SimpleNamespace(generations=generations))
    rules = (TierRule("far", "nobody:Store", medium="REMOTE"),)
    made = Tiers(rules, pool, str, no_tenant, cast(Any, reported.append), lambda: cast(Any, 1))
    process = Mock()
    made._keepers.append(cast(Any, SimpleNamespace(process=process)))
    made.carry_out(act.ClearTier(TIER, "1"))
    process.reset_mock()
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    made.carry_out(act.AskTier(TIER, SearchId(2), name, hashes((1, 2, 3))))
    made.carry_out(act.ReadFromTier(TIER, CopyId(3), name, hashes((1, 2)), np.array([7, 8])))
    answered, ended = reported
    assert isinstance(answered, ev.TierAnswered)
    assert isinstance(ended, ev.TierCopyEnded)
    assert answered.refused
    assert ended.refused
    assert not answered.held.any()
    assert not ended.done.any()
    assert process.mock_calls == []
    generations.close()


@on_loop
async def test_of_what_a_store_said_nothing_the_core_is_told_so() -> None:
    reported: list[ev.Event] = []
    made = tiers(reported)
    made._asked[TIER] = {
        OrderId(7): act.AskTier(TIER, SearchId(2), cast(Any, None), hashes((1, 2, 3)))
    }
    said = np.array([Found.UNKNOWN, Found.THERE, Found.ABSENT], dtype=np.uint8)
    made.order_ended(TIER, TierAnswer(OrderId(7), OrderEnd.ANSWERED, said))
    (answered,) = reported
    assert isinstance(answered, ev.TierAnswered)
    assert answered.held.tolist() == [False, True, False]
    assert answered.unknown.tolist() == [True, False, False]


@on_loop
async def test_the_sums_of_what_was_read_are_kept_for_each_shard() -> None:
    made = tiers([])
    note = Mock()
    made._pool = cast(Any, SimpleNamespace(note_checksums=note))
    slots = np.array([40, 41, 42])
    made._asked[TIER] = {
        OrderId(7): act.ReadFromTier(TIER, CopyId(2), cast(Any, None), hashes((1, 2, 3)), slots)
    }
    done = np.full(3, Outcome.DONE, dtype=np.uint8)
    sums = np.array([10, 11, 20, 21, 30, 31], dtype=np.uint64)  # block after block
    made.order_ended(TIER, TierAnswer(OrderId(7), OrderEnd.ANSWERED, done, sums=sums))
    noted = [
        (call.args[0].tolist(), call.args[1], call.args[2].tolist()) for call in note.call_args_list
    ]
    assert noted == [([40, 41, 42], 0, [10, 20, 30]), ([40, 41, 42], 1, [11, 21, 31])]


@on_loop
async def test_clients_look_below_only_while_a_tier_may_hold_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it was told by a write or by the tier's own figures: with its process both go."""
    made = tiers([])
    said: list[bool] = []
    made._pool = cast(Any, SimpleNamespace(set_below=lambda *, holds_some: said.append(holds_some)))
    made._rules = (TierRule("own", "nobody:Store"),)
    made._asked[TIER], made._deleting[TIER] = {}, {}
    monkeypatch.setattr(made, "_give", lambda *_: True)
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    write = act.WriteToTier(TIER, cast(Any, 1), name, cast(Any, ()), cast(Any, ()))
    for _ in range(2):
        made.carry_out(write)
    made.tier_gone(TIER, "it was killed")
    assert said == [True, False], "once for each change"
    made.carry_out(write)
    made.tier_gone(TIER, "it was killed")
    made.usage_told(TIER, TierUsage(1, 4096, 0))
    made.tier_gone(TIER, "it was killed")
    assert said[2:] == [True, False, True, False]
    made.usage_told(TIER, TierUsage(0, 0, 0))
    made._rules = (TierRule("far", "nobody:Store", medium="REMOTE"),)
    made.usage_told(TIER, TierUsage(0, 0, 0))
    assert said[6:] == [False, True], "other nodes write to what nodes share"


@on_loop
async def test_what_a_process_was_asked_before_its_end_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SOON_S", 60.0)
    reported: list[Any] = []
    made = tiers(reported)
    made._pool = cast(Any, SimpleNamespace(set_below=lambda **_: None))
    made._asked[TIER], made._deleting[TIER] = {}, {}
    monkeypatch.setattr(made, "_give", lambda *_: True)
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    for number in range(3):
        made.carry_out(act.AskTier(TIER, SearchId(number), name, cast(Any, ())))
    lookup = asyncio.ensure_future(made.answered_soon())
    await asyncio.sleep(0)
    made.tier_gone(TIER, "it was killed")
    assert not made._questions, "each end of a process would leave some"
    assert not made._asked[TIER]
    gone, waiting = reported
    assert gone == ev.TierGone(TIER)
    waiting.set_result(None)  # as who reports does, once the event was handled
    assert await asyncio.wait_for(lookup, 5.0)


@on_loop
async def test_a_tier_that_is_slow_for_one_tenant_is_waited_for_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = tiers([])
    monkeypatch.setattr(module, "SOON_S", 0.01)
    monkeypatch.setattr(made, "_give", lambda *_: True)
    monkeypatch.setattr(made, "_tenant_of", lambda namespace: TenantId(f"tenant {namespace}"))
    made._asked[TIER], made._deleting[TIER] = {}, {}
    assert made.may_answer_soon("tenant 1")
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    made.carry_out(act.AskTier(TIER, SearchId(1), name, cast(Any, ())))
    assert not await made.answered_soon()
    assert not made.may_answer_soon("tenant 1")
    assert made.may_answer_soon("tenant 2")
    monkeypatch.setattr(module, "SOON_S", 60.0)
    monkeypatch.setattr(made, "_tell_end", lambda *_: None)
    made.order_ended(TIER, TierAnswer(OrderId(1), OrderEnd.ANSWERED))
    assert made.may_answer_soon("tenant 1")


def test_slow_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 3)
    made = tiers([])
    for number in range(9):
        made._note_pace(module.Question(TIER, f"{number}", 0.0, []), is_slow=True)
    assert list(made._slow_for[TIER]) == ["6", "7", "8"]


def test_a_tier_whose_process_has_yet_to_end_is_shown_as_away() -> None:
    made = tiers([])
    each = tuple(
        TierFigures(name, serves, 0, 0, 0.0, 0.0, TierCounters())
        for name, serves in (("ends", True), ("serves", True), ("is away", False))
    )
    machine = Machine(MachineConfig(extents=1, extent_bytes=1 << 20, tag_secret=bytes(16)))
    figures = replace(machine.statistics(), tiers=each)
    made._keepers = [cast(Any, SimpleNamespace(is_ending=False))] * 3
    assert made.seen(figures) == figures
    made.usage[TierId(1)] = TierUsage(0, 0, 0, errors={TierReason.BUSY: 3})
    errors = [tier.errors for tier in made.seen(figures).tiers]
    assert errors == [{}, {"BUSY": 3}, {}]
    made._keepers[0] = cast(Any, SimpleNamespace(is_ending=True))
    assert [tier.is_serving for tier in made.seen(figures).tiers] == [False, True, False]
    made._keepers = []
    assert made.seen(figures) is figures, "none was started yet"


@on_loop
async def test_what_a_process_does_not_delete_is_deleted_later_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a store that nodes share stays hidden, or loses what is stored after the clear."""
    monkeypatch.setattr(module, "DELETE_AGAIN_S", 0.0)
    reported: list[ev.Event] = []
    generations = Generations(tmp_path / "generations.table")
    made = shared_and_own(reported, generations)
    takes = Mock(side_effect=[False, True, True, True])
    process = cast(Any, SimpleNamespace(delete_scopes=takes))
    made._keepers = [cast(Any, SimpleNamespace(process=process))] * 2

    def end(order: OrderId, how: OrderEnd) -> None:
        made.order_ended(TIER, TierAnswer(order, how, np.array([])))

    made.carry_out(act.ClearTier(TIER, "7"))
    assert not made._asked[TIER], "it takes no more orders"
    await settled()
    (late,) = made._asked[TIER]
    end(late, OrderEnd.FAILED)
    made.carry_out(act.ClearTier(TIER, "7"))  # before it is deleted again
    await settled()
    (first,) = made._asked[TIER]
    made.carry_out(act.ClearTier(TIER, "7"))
    end(first, OrderEnd.ANSWERED)
    assert not reported, "it says nothing of what was cleared since"
    assert made._is_hidden(TIER, NamespaceId(7))
    (last,) = made._asked[TIER]
    end(last, OrderEnd.ANSWERED)
    await settled()
    assert reported == [ev.TierCleared(TIER, "7")]
    assert takes.call_count == 4
    assert not made._deleting[TIER]
    generations.close()


@on_loop
async def test_only_what_nodes_share_is_hidden_until_it_is_deleted(tmp_path: Path) -> None:
    reported: list[Any] = []
    generations = Generations(tmp_path / "generations.table")
    made = shared_and_own(reported, generations)

    def hidden() -> list[tuple[bool, bool]]:
        return [
            (made._is_hidden(tier, NamespaceId(1)), made._is_hidden(tier, NamespaceId(2)))
            for tier in (TIER, TierId(1))
        ]

    for tier in (TIER, TierId(1)):
        made.carry_out(act.ClearTier(tier, "1"))
    assert hidden() == [(True, False), (False, False)]
    asked = Mock(return_value=True)
    made._keepers = [cast(Any, SimpleNamespace(process=SimpleNamespace(exists=asked)))] * 2
    for number in (1, 2):
        name = ScopeName(NamespaceId(number), "", "", 0, 0)
        made.carry_out(act.AskTier(TIER, SearchId(number), name, hashes((1,))))
    assert [(each.search, each.refused) for each in reported] == [(SearchId(1), True)]
    assert asked.call_count == 1
    made._keepers = []
    made.all_cleared()
    assert hidden() == [(True, True), (False, False)]
    generations.close()


@on_loop
async def test_where_there_is_no_room_for_another_clear_shared_stores_delete_all(
    tmp_path: Path,
) -> None:
    generations = Generations(tmp_path / "generations.table")
    made = shared_and_own([], generations)
    for number in range(MAX_CLEARED_NAMESPACES + 1):
        assert EVERY not in made._deleting[TIER]
        made.scopes_cleared(NamespaceId(number))
    assert made._deleting[TIER].keys() == {EVERY}
    assert not made._deleting[TierId(1)]
    generations.close()


def test_rows_are_unmapped_by_the_tier_that_says_so_and_by_one_that_is_gone() -> None:
    reported: list[Any] = []
    made = tiers(reported)
    made._pool = cast(Any, SimpleNamespace(extents_of_row=lambda _row: (), set_below=Mock()))
    made._asked[TIER] = {}
    made._movers = {MoverId(5): TIER, MoverId(6): TierId(1)}
    made.row_unmapped(TierId(1), RowId(3))
    assert reported.pop() == ev.RowUnmapped(MoverId(6), RowId(3))
    order = act.UnmapRow(MoverId(5), RowId(4))
    unmaps = Mock(side_effect=[True, False])
    made._keepers = [cast(Any, SimpleNamespace(process=SimpleNamespace(unmap_row=unmaps)))]
    made.unmap_row(order)
    assert not reported, "its process will say so"
    made.unmap_row(order)
    made._keepers = [cast(Any, SimpleNamespace(process=None))]
    made.unmap_row(order)
    assert reported == [ev.RowUnmapped(MoverId(5), RowId(4))] * 2
    made.tier_gone(TIER, "it was killed")
    assert [made.maps_as(MoverId(number)) for number in (5, 6)] == [False, True]


def test_a_block_whose_row_could_not_be_had_is_not_read(tmp_path: Path) -> None:
    reported: list[Any] = []
    generations = Generations(tmp_path / "generations.table")
    made = shared_and_own(reported, generations)
    made._pool.has = Mock(return_value=False)  # type: ignore[method-assign]
    made._keepers = [cast(Any, SimpleNamespace(process=SimpleNamespace(read=None)))] * 2
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    order = act.ReadFromTier(TIER, CopyId(1), name, hashes((1,)), cast(Any, np.array([0])))
    made.carry_out(order)
    (ended,) = reported
    assert (ended.refused, ended.done.tolist()) == (True, [False])
    generations.close()


def test_who_was_not_answered_in_time_hears_so() -> None:
    reported: list[Any] = []
    made = tiers(reported)
    question = act.AskTier(TIER, SearchId(2), cast(Any, None), hashes((1,)))
    made._asked[TIER] = {OrderId(7): question}
    made.order_ended(TIER, TierAnswer(OrderId(7), OrderEnd.FAILED, np.array([])))
    assert [(each.refused, each.failed) for each in reported] == [(False, True)]


def test_no_tier_is_written_more_of_a_small_pool_at_once_than_its_share() -> None:
    rules = (TierRule("own", "nobody:Store"),)
    for pool_bytes, most in ((8 << 20, 2 << 20), (1 << 40, module.MAX_WRITE_BYTES)):
        (terms,) = module.terms_of(rules, pool_bytes)
        assert terms.max_write_bytes == most


def test_of_a_store_of_a_sites_own_every_option_says_which_it_is() -> None:
    for store, is_same in (("nobody:Store", False), (KINDS["s3"], True)):
        places = {
            module._place_of(TierRule("own", store, options={"threads": number}))
            for number in (1, 2)
        }
        assert (len(places) == 1) == is_same
