"""Status names everything, however much there is, page by page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.cli.status import ask
from kvd.config.settings import MAX_TENANTS
from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.access.tenants import TenantPolicy
from kvd.control.namespaces import Namespaces
from kvd.control.services import status as control_status
from kvd.core.keys import TenantId
from kvd.core.upkeep.statistics import TenantFigures
from kvd.runtime.told_lookups import ToldLookups
from kvd.runtime.turns import UNITS_AT_ONCE, FairQueue, Pace
from kvd_proto.v1 import operator_pb2
from tests.control.daemon_of_small_bounds import VARIABLE
from tests.control.daemon_rig import (
    Caller,
    RawScheduler,
    RunningDaemon,
    daemon,
    group,
    identity,
    namespace,
)

MAX_PAGE = 64  # sessions, and namespaces; the real one has more than a user may have sessions
SESSIONS = 100
NAMESPACES = MAX_PAGE * 2 + 20


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    bound = {VARIABLE: f"kvd.control.services.status:MAX_PAGE={MAX_PAGE}"}
    running = RunningDaemon("--sessions-per-user", "128", environment=bound)
    running.module = "tests.control.daemon_of_small_bounds"
    try:
        running.start()
        yield running
    finally:
        running.remove()


def test_status_of_many_namespaces_and_sessions_comes_in_pages_that_make_the_whole(
    running: RunningDaemon,
) -> None:
    held: list[RawScheduler] = []
    for number in range(NAMESPACES):
        name = f"e{number % SESSIONS}"  # the later ones take the earlier ones' places
        if number >= SESSIONS:
            held[number - SESSIONS].close()
        scheduler = RawScheduler(
            running.socket, identity=identity(name), namespace=namespace(model=f"m{number}")
        )
        assert scheduler.opened.session_id
        held.append(scheduler)
    caller = Caller(running.socket)
    first = caller.status()
    assert (len(first.sessions), len(first.namespaces)) == (MAX_PAGE, MAX_PAGE)
    assert first.more_sessions
    assert first.more_namespaces
    whole = ask(running.socket, 20.0)
    numbers = [n.namespace_id for n in whole.namespaces]
    assert len(set(numbers)) == len(numbers) == NAMESPACES
    assert {s.engine_id for s in whole.sessions} == {f"e{n}" for n in range(SESSIONS)}
    listed: list[int] = []
    more = True
    while more:
        after = listed[-1] if listed else 0
        request = operator_pb2.ListNamespacesRequest(after_namespace_id=after)
        answer = caller.call(caller.operator.ListNamespaces, request)
        listed += [n.namespace_id for n in answer.namespaces]
        more = answer.more
    assert listed == numbers
    for each in (*held[-SESSIONS:], caller):
        each.close()


async def test_page_ends_where_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPace:
        async def spend(self, units: int) -> None:
            pass

    monkeypatch.setattr(control_status, "MAX_PAGE_BYTES", 1000)

    def tell(number: Any) -> operator_pb2.NamespaceStatus:
        return operator_pb2.NamespaceStatus(namespace_id=number, fingerprint="f" * 300)

    page: Any = control_status._page
    told, more = await page(list(range(1, 100)), tell, NoPace(), 1)
    assert (len(told), more) == (4, True)
    told, more = await page([1, 2], tell, NoPace(), 1)
    assert (len(told), more) == (2, False)


async def test_others_have_their_turns_while_thousands_of_tenants_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a message of its own, and an operator hears of all."""
    figures = [TenantFigures(TenantId(f"t{n}"), n, 0, 0, 0, 0) for n in range(MAX_TENANTS)]
    turns, told = FairQueue(), ToldLookups(lambda _: True)
    monkeypatch.setattr(control_status.StatusReport, "__init__", lambda _self: None)
    report: Any = control_status.StatusReport()  # type: ignore[call-arg]
    report._told = told
    report._namespaces = Namespaces(None, TenantPolicy())  # type: ignore[arg-type]
    user = Peer(Credentials(0, 0, 1, None), Role.TOOL, "test", lambda *_: None)
    telling = asyncio.ensure_future(report._tenants(user, figures, Pace(turns, user.uid)))
    others = 0
    while not telling.done():
        await asyncio.sleep(0)
        others += 1
    assert [each.bytes_used for each in telling.result()] == list(range(MAX_TENANTS))
    assert others >= MAX_TENANTS / UNITS_AT_ONCE


def test_group_of_many_shards_fits_a_page() -> None:
    """The largest namespace that there can be is small beside the largest message."""
    with daemon("--pool-bytes", "64MiB", "--extent-bytes", "4KiB") as running:
        groups = [group(shard_bytes=[4096] * 256)] * 64
        many = RawScheduler(running.socket, namespace=namespace(groups=groups), world_size=256)
        assert many.opened.session_id
        other = RawScheduler(
            running.socket,
            identity=identity("other"),
            namespace=namespace(groups=groups, kv_layout="another"),
            world_size=256,
        )
        assert other.opened.session_id
        whole = ask(running.socket, 20.0)
        assert len(whole.namespaces) == 2
        assert whole.ByteSize() < 3 << 20
        for each in (many, other):
            each.close()
