"""The event log gives every watcher all changes, in order, without a gap."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from kvd.config.tenant_rule import TenantRule
from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.access.tenants import TenantPolicy
from kvd.control.namespaces import Namespaces
from kvd.control.services.events import EventServicer
from kvd.core.keys import KeyBatch, NamespaceId, TenantId
from kvd.runtime import event_log
from kvd.runtime.event_log import (
    Change,
    ChangeFilter,
    ChangeKind,
    Delivery,
    EventLog,
    FellBehind,
    Snapshot,
)
from kvd.runtime.turns import FairQueue
from kvd_proto.v1 import events_pb2

INCARNATION = b"a" * 16
TENANT = TenantId("default")
ALL = ChangeFilter(lambda _tenant, _namespace: True)


def change(number: int, namespace: int = 1) -> Change:
    words = np.full((1, 4), number, dtype=np.uint64)
    keys = KeyBatch(words, 32)
    return Change(ChangeKind.STORED, TENANT, NamespaceId(namespace), "", "", 0, keys)


def first_words(deliveries: list[Delivery]) -> list[int]:
    return [int(c.keys.words[0, 0]) for d in deliveries for c in d.changes if c.keys is not None]


async def take(watch: AsyncIterator[Delivery], count: int) -> list[Delivery]:
    return [await asyncio.wait_for(anext(watch), 1) for _ in range(count)]


async def test_new_watcher_gets_a_snapshot_and_then_the_tail() -> None:
    log = EventLog(INCARNATION, lambda _: iter([(change(7),)]), FairQueue())
    log.append(change(7))
    watch = log.watch(None, ALL)
    (snapshot,) = await take(watch, 1)
    assert (snapshot.snapshot, snapshot.snapshot_end, snapshot.sequence) == (True, True, 1)
    log.append(change(8))
    (tail,) = await take(watch, 1)
    assert (tail.snapshot, tail.sequence) == (False, 2)
    assert first_words([snapshot, tail]) == [7, 8]


async def test_returning_watcher_goes_on_without_a_gap() -> None:
    log = EventLog(INCARNATION, lambda _: iter([]), FairQueue())
    for number in range(5):
        log.append(change(number))
    (delivery,) = await take(log.watch((INCARNATION, 2), ALL), 1)
    assert not delivery.snapshot
    assert first_words([delivery]) == [2, 3, 4]


async def test_watcher_of_another_incarnation_starts_over() -> None:
    log = EventLog(INCARNATION, lambda _: iter([(change(1),)]), FairQueue())
    log.append(change(1))
    (delivery,) = await take(log.watch((b"b" * 16, 1), ALL), 1)
    assert delivery.snapshot


async def test_watcher_that_names_a_change_yet_to_come_starts_over() -> None:
    log = EventLog(INCARNATION, lambda _: iter([(change(1),)]), FairQueue())
    log.append(change(1))
    (delivery,) = await take(log.watch((INCARNATION, 2), ALL), 1)
    assert (delivery.snapshot, first_words([delivery])) == (True, [1])


async def test_watcher_that_fell_behind_the_kept_tail_gets_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = EventLog(INCARNATION, lambda _: iter([(change(9),)]), FairQueue())
    monkeypatch.setattr(event_log, "KEPT_CHANGES", 4)
    for number in range(10):
        log.append(change(number))
    (delivery,) = await take(log.watch((INCARNATION, 2), ALL), 1)
    assert delivery.snapshot
    assert delivery.sequence == 10


async def test_watcher_sees_only_the_namespaces_it_may_see() -> None:
    log = EventLog(INCARNATION, lambda _: iter([]), FairQueue())
    log.append(change(1, namespace=1))
    log.append(change(2, namespace=2))
    (delivery,) = await take(
        log.watch((INCARNATION, 0), ChangeFilter(lambda _tenant, namespace: namespace == 2)), 1
    )
    assert first_words([delivery]) == [2]
    assert delivery.sequence == 2


class Watched:
    """A log, and a user's calls that watch it under a policy of tenants."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.log = EventLog(INCARNATION, snapshot, FairQueue())
        self.policy = TenantPolicy(root=False)
        driver: Any = SimpleNamespace(
            event_log=self.log,
            machine=SimpleNamespace(knows=lambda _: True),
            pool=SimpleNamespace(namespace_fields=lambda _: {"tenant": TENANT}),
        )
        peer = Peer(Credentials(7, 7, 0, None), Role.TOOL, "test", lambda *_: None)
        peers: Any = SimpleNamespace(behind=lambda _: peer)
        self._servicer = EventServicer(driver, Namespaces(driver, self.policy), peers)
        self._told: asyncio.Queue[Any] = asyncio.Queue()

    def allow(self, *users: int) -> None:
        """From now on these users are the tenant."""
        rule = TenantRule(TENANT, frozenset(users), frozenset(), 0)
        self.policy.replace([rule], (), root=False)

    def reload(self, *users: int) -> None:
        """Likewise, and the log is told."""
        self.allow(*users)
        self.log.rights_changed()

    @contextlib.asynccontextmanager
    async def watch(self, **request: Any) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
        """What waits for the call's next message."""
        context: Any = SimpleNamespace(
            write=self._told.put,
            send_initial_metadata=AsyncMock(),
            add_done_callback=lambda _then: None,
        )
        message = events_pb2.WatchEventsRequest(incarnation=INCARNATION, **request)
        watching = asyncio.ensure_future(self._servicer.WatchEvents(message, context))
        yield lambda: asyncio.wait_for(self._told.get(), 1)
        watching.cancel()
        await asyncio.wait([watching])
        assert self._told.empty()


@pytest.mark.parametrize("by_name", [False, True], ids=["all", "one-namespace"])
async def test_who_loses_the_tenant_watches_it_no_more(by_name: bool) -> None:
    watched = Watched(lambda _: iter([]))
    watched.allow(7)
    async with watched.watch(namespace_id=1 if by_name else 0) as told:
        watched.log.append(change(1))
        assert (await told()).sequence == 1
        watched.allow(8)
        watched.log.append(change(2))
        await asyncio.sleep(0.05)


async def test_who_gains_a_tenant_is_told_at_once_what_was_there() -> None:
    watched = Watched(
        lambda wanted: iter([(change(1),)] if wanted.namespaces(TENANT, NamespaceId(1)) else [])
    )
    watched.allow(8)
    async with watched.watch() as told:
        watched.log.append(change(1))
        await asyncio.sleep(0.05)
        watched.allow(7, 8)
        watched.log.rights_changed()
        snapshot = await told()
        assert (snapshot.snapshot_end, snapshot.sequence, len(snapshot.events)) == (True, 2, 1)
        watched.allow(7)
        watched.log.rights_changed()
        watched.log.append(change(2))
        message = await told()
        assert (message.snapshot, message.sequence) == (False, 4)  # it has gained nothing


async def test_who_comes_back_after_rights_have_changed_begins_with_a_snapshot() -> None:
    watched = Watched(lambda _: iter([(change(1),)]))
    watched.allow(7)
    watched.log.append(change(1))
    watched.log.rights_changed()
    async with watched.watch(after_sequence=1) as told:
        assert (await told()).snapshot


async def test_place_behind_a_change_of_rights_is_gone_on_from() -> None:
    watched = Watched(lambda _: iter([(change(1),)]))
    watched.allow(7)
    watched.log.append(change(1))
    watched.log.rights_changed()
    async with watched.watch(after_sequence=watched.log.sequence) as told:
        await asyncio.sleep(0)
        watched.log.append(change(2))
        message = await told()
        assert (message.snapshot, message.sequence) == (False, 3)


async def broken_off_and_whole(told: Callable[[], Awaitable[Any]]) -> tuple[Any, Any]:
    """A snapshot of nothing that a reload made void, and the one behind it, of one block."""
    broken_off, whole = await told(), await told()
    assert (broken_off.snapshot_end, len(broken_off.events)) == (True, 0)
    assert (whole.snapshot_end, len(whole.events)) == (True, 1)
    return broken_off, whole


async def test_who_gains_a_tenant_amid_a_snapshot_is_given_another_one() -> None:
    def snapshot(wanted: ChangeFilter) -> Iterator[tuple[Change, ...]]:
        if wanted.namespaces(TENANT, NamespaceId(1)):
            yield (change(1),)
        else:
            yield ()
            watched.reload(7)

    watched = Watched(snapshot)
    watched.reload(8)
    async with watched.watch() as told:
        broken_off, whole = await broken_off_and_whole(told)
        assert whole.sequence == 2
    async with watched.watch(after_sequence=broken_off.sequence) as told:
        assert (await told()).snapshot, "nobody goes on from where it was broken off"


async def test_what_was_taken_away_and_given_back_amid_a_snapshot_is_told_anew() -> None:
    passes = count()

    def snapshot(_wanted: ChangeFilter) -> Iterator[tuple[Change, ...]]:
        if next(passes):
            yield (change(1),)
        else:
            watched.reload(8)
            yield ()
            watched.reload(7)

    watched = Watched(snapshot)
    watched.reload(7)
    async with watched.watch() as told:
        _, whole = await broken_off_and_whole(told)
        assert whole.sequence == 3


async def test_who_loses_the_tenant_amid_a_snapshot_hears_no_more_of_it() -> None:
    def snapshot(_wanted: ChangeFilter) -> Iterator[tuple[Change, ...]]:
        yield (change(1),)
        watched.reload(8)
        yield (change(2),)

    watched = Watched(snapshot)
    watched.reload(7)
    async with watched.watch() as told:
        for is_end in (False, True):
            message = await told()
            assert (message.snapshot_end, len(message.events)) == (is_end, 0)


async def test_kept_tail_is_bounded_by_its_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT_BLOCKS", 8)
    log = EventLog(INCARNATION, lambda _: iter([(change(0),)]), FairQueue())
    for number in range(5):
        words = np.full((3, 4), number, dtype=np.uint64)
        keys = KeyBatch(words, 32)
        log.append(Change(ChangeKind.STORED, TENANT, NamespaceId(1), "", "", 0, keys))
    (tail,) = await take(log.watch((INCARNATION, 3), ALL), 1)
    assert first_words([tail]) == [3, 4]
    (behind,) = await take(log.watch((INCARNATION, 2), ALL), 1)
    assert behind.snapshot


async def test_changes_while_a_snapshot_is_taken_stand_in_it_behind_its_pieces() -> None:
    pieces = iter([(change(1),), (change(2),), (change(3),)])
    log = EventLog(INCARNATION, lambda _: pieces, FairQueue())
    log.append(change(0))
    watch = log.watch(None, ALL)
    (first,) = await take(watch, 1)
    log.append(change(8))
    deliveries = [first, *await take(watch, 3)]
    assert all(d.snapshot for d in deliveries)
    assert [d.snapshot_end for d in deliveries] == [False, False, False, True]
    assert first_words(deliveries) == [1, 2, 3, 8]
    assert [d.sequence for d in deliveries] == [1, 1, 1, 2]


async def test_pieces_without_blocks_are_no_deliveries_and_lose_none() -> None:
    """Nothing is readable of rows that were cleared, however many there are."""
    pieces: list[tuple[Change, ...]] = [(), (change(1),), (), (), (change(2),), ()]
    log = EventLog(INCARNATION, lambda _: iter(pieces), FairQueue())
    found = await take(log.watch(None, ALL), 2)
    assert first_words(found) == [1, 2]
    assert [each.snapshot_end for each in found] == [False, True]
    log = EventLog(INCARNATION, lambda _: iter([(), ()]), FairQueue())
    (only,) = await take(log.watch(None, ALL), 1)
    assert (only.changes, only.snapshot_end) == ((), True)


async def test_watchers_whom_one_change_wakes_take_turns() -> None:
    log = EventLog(INCARNATION, lambda _: iter([]), FairQueue())
    heard: list[int] = []

    async def watch(number: int) -> None:
        async for delivery in log.watch((INCARNATION, 0), ALL, number % 4):
            heard.append(number)
            if delivery.sequence == 3:
                return

    watchers = [asyncio.ensure_future(watch(number)) for number in range(64)]
    await asyncio.sleep(0)
    most = 0
    for number in range(3):
        log.append(change(number))
        while len(heard) < 64 * (number + 1):
            before = len(heard)
            await asyncio.sleep(0)
            most = max(most, len(heard) - before)
    await asyncio.gather(*watchers)
    assert most == 1


async def test_watcher_that_is_overtaken_within_its_snapshot_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = iter([(change(1),), (change(2),)])
    log = EventLog(INCARNATION, lambda _: pieces, FairQueue())
    monkeypatch.setattr(event_log, "KEPT_CHANGES", 4)
    watch = log.watch(None, ALL)
    await take(watch, 1)
    for number in range(10):
        log.append(change(number))
    with pytest.raises(FellBehind):
        await take(watch, 3)


async def test_nobody_waits_for_watchers_that_take_their_time() -> None:
    log = EventLog(INCARNATION, lambda _: iter([(change(1),), (change(2),)]), FairQueue())
    log.append(change(1))
    idle = [log.watch(None, ALL, user=7) for _ in range(200)]
    for watch in idle:
        await take(watch, 1)  # and nothing more
    (_, end) = await take(log.watch(None, ALL, user=8), 2)
    assert end.snapshot_end
