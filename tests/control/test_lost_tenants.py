"""A reload takes tenants from users: their sessions end, and none is opened that began before."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.config.tenant_rule import TenantRule
from kvd.control.access.tenants import TenantPolicy
from kvd.control.sessions.session import SchedulerSession, SessionContext, SessionTerms
from kvd.control.sessions.verbs import LiveSession
from kvd.core.errors import Draining, KvdError, LimitExceeded, PermissionDenied
from kvd.core.keys import NamespaceId, SessionId, TenantId
from kvd.runtime.turns import TURNS_BETWEEN_PIECES, FairQueue, Pace
from kvd_proto.v1 import engine_pb2
from tests.control.daemon_rig import identity, namespace
from tests.control.live_session import SPEC

UID = 4242
TERMS = SessionTerms(2000, 1, sessions_per_user=1)


class EndingSession(SchedulerSession):
    """One that only notes its end."""

    def __init__(self, number: int, ended: list[int]) -> None:
        self._number, self._ended = number, ended

    def end(self, reason: str) -> None:
        assert "is tenant" in reason, "it should say why"
        self._ended.append(self._number)


class LateEngines:
    """A meeting that lets things happen while an earlier start's movers end."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    async def claim(self, *_: object) -> object:
        await asyncio.sleep(0)
        self.meanwhile()
        return object()

    def check_scheduler(self, *_: object) -> None:
        """It is the only one."""

    check_ranks = forget_if_empty = check_scheduler


def peer() -> Any:
    return SimpleNamespace(uid=UID, credentials=SimpleNamespace(uid=UID, gid=UID))


def policy(tenant: str) -> TenantPolicy:
    return TenantPolicy((TenantRule(TenantId(tenant), frozenset({UID}), frozenset(), 0),))


def context(engines: Any = None) -> SessionContext:
    driver: Any = SimpleNamespace(
        turns=FairQueue(), machine=SimpleNamespace(knows=None, knows_tenant=None), sessions={}
    )
    return SessionContext(driver, engines, policy("acme"), TERMS)


def live(number: int, tenant: str = "acme") -> LiveSession:
    spec = replace(SPEC, tenant=TenantId(tenant))
    return LiveSession(SessionId(number), NamespaceId(1), spec, peer(), "engine", 1)


async def test_sessions_that_lost_their_tenant_end_one_by_one_and_others_get_on() -> None:
    common, ended = context(), list[int]()
    for number in range(20):
        common.sessions.by_id[SessionId(number)] = live(number, "acme" if number else "other")
        record: Any = SimpleNamespace(sink=EndingSession(number, ended))
        common.driver.sessions[SessionId(number)] = record
    ending = asyncio.ensure_future(common.end_other_tenants(Pace(common.driver.turns, "reload")))
    await asyncio.sleep(0)
    assert not ending.done()
    await ending
    assert ended == [0], "who has its tenant still goes on"
    common.tenants = policy("new")
    del common.sessions.by_id[SessionId(0)]
    ending = asyncio.ensure_future(common.end_other_tenants(Pace(common.driver.turns, "reload")))
    seen, others = list[int](), 0
    while not ending.done():
        await asyncio.sleep(0)
        others += 1
        seen.append(len(ended))
        common.sessions.by_id.pop(SessionId(19), None)  # which ends by itself
    assert ended == list(range(19))
    assert max(b - a for a, b in itertools.pairwise(seen)) == 1
    assert others >= 18 * TURNS_BETWEEN_PIECES


def lose_tenant(common: SessionContext) -> None:
    common.tenants = policy("new")


def have_another(common: SessionContext) -> None:
    common.sessions.by_id[SessionId(1)] = live(1)


def drain(common: SessionContext) -> None:
    common.draining = True


@pytest.mark.parametrize(
    ("happens", "refusal"),
    [(lose_tenant, PermissionDenied), (have_another, LimitExceeded), (drain, Draining)],
)
async def test_what_happened_while_a_session_waited_counts_for_it(
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[SessionContext], None],
    refusal: type[KvdError],
) -> None:
    engines = LateEngines()
    common = context(engines)
    opened: list[object] = []
    monkeypatch.setattr(common, "_admit", lambda *said: opened.append(said))
    message = engine_pb2.OpenSession(
        identity=identity(), namespace=namespace(), world_size=1, epoch=""
    )
    await common._open(message, peer())
    assert len(opened) == 1
    engines.meanwhile = lambda: happens(common)
    with pytest.raises(refusal):
        await common._open(message, peer())
    assert len(opened) == 1
