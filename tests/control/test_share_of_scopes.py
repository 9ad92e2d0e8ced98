"""Who has all the scopes that it may have comes back to its blocks, beside others who do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_proto.v1 import engine_pb2
from tests.control.daemon_of_few_scopes import MOST
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    block,
    identity,
    namespace,
    query,
    store_job,
)
from tests.control.running_daemon import RunningDaemon
from tests.waiting import wait_until

TENANTS = ("many", "few")


def engine(running: RunningDaemon, tenant: str) -> RawEngine:
    names = namespace(model=tenant, tenant=tenant)
    return RawEngine(running.socket, identity=identity(tenant, os.urandom(16)), namespace=names)


def fill(storer: RawEngine) -> int:
    """One block for account after account, until one is refused; for how many there was one."""
    for number in range(1, MOST + 2):
        storer.worker.write(0, block(number))
        job = store_job(number, [number], [0])
        job.context.account = f"account {number}"
        (verdict,) = storer.scheduler.step(stores=[job], end_step=True).verdicts
        if not verdict.accepted:
            assert verdict.reason == "LIMIT_EXCEEDED"
            return number - 1
        storer.worker.ready(number)
        assert storer.ended(number).status == 1
    raise AssertionError("no account was one too many")


def found(asker: RawEngine, accounts: int) -> int:
    """For how many of these accounts the block is there."""
    queries = [query([number], 0) for number in range(1, accounts + 1)]
    for number, each in enumerate(queries, 1):
        each.context.account = f"account {number}"
    request = engine_pb2.LookupRequest(session_id=asker.scheduler.id, queries=queries)
    answers = asker.scheduler.call(asker.scheduler.engine.Lookup, request).answers
    return sum(answer.statuses[0] & 3 == 1 for answer in answers)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningDaemon]:
    config = tmp_path / "kvd.toml"
    uids = f"uids = [{os.getuid()}]\n"
    config.write_text("".join(f"[tenants.{tenant}]\n{uids}" for tenant in TENANTS))
    made = RunningDaemon("--config", str(config))
    made.module = "tests.control.daemon_of_few_scopes"
    try:
        made.start()
        yield made
    finally:
        made.remove()


def test_engines_with_all_the_scopes_they_may_have_come_back_to_a_new_daemon(
    running: RunningDaemon,
) -> None:
    held: list[RawEngine] = []
    has: dict[str, int] = {}
    for tenant in TENANTS:
        held.append(engine(running, tenant))
        has[tenant] = fill(held[-1])
    running.kill()
    running.start()
    for tenant in TENANTS:
        held.append(engine(running, tenant))
        assert found(held[-1], has[tenant]) == has[tenant]
    for each in held:
        each.close()


def test_engine_that_left_comes_back_beside_one_that_takes_all_it_gets(
    running: RunningDaemon,
) -> None:
    first = engine(running, "many")
    has = fill(first)
    first.close()
    caller = Caller(running.socket)
    wait_until(lambda: not caller.status().sessions, "its session's end")
    caller.close()
    other = engine(running, "few")
    assert fill(other) > 0
    back = engine(running, "many")
    assert found(back, has) == has
    other.close()
    back.close()
