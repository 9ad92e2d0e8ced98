"""Engines that come and go by the thousand: what each had alone leaves no trace in the daemon."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.core import events as ev
from kvd.core.keys import TenantId
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.pool import registry
from kvd.runtime.driver import Driver
from kvd_proto.groups import GroupKind
from tests import leaks
from tests.control.driver_stand import NoNews, config_of, opened_driver
from tests.waiting import wait_until

EXTENT_BYTES = 1 << 18
STARTS = 5000
GROUP = GroupSpec(GroupKind.FULL_ATTENTION, 1, (4096,))
SPEC = NamespaceSpec("", TenantId("default"), 32, (GROUP,), unshared=True)


async def work_off(driver: Driver) -> None:
    while driver.machine.has_work():  # noqa: ASYNC110 - in the turns of other tasks
        await asyncio.sleep(0)


@pytest.mark.parametrize("unshared", [True, False], ids=["unshared", "shared"])
async def test_engines_that_crash_in_a_loop_leave_no_descriptor_page_or_line(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch, unshared: bool
) -> None:
    monkeypatch.setattr("kvd.core.room.expiry.ROOM_KEPT", 32)
    monkeypatch.setattr("kvd.core.blocks.namespaces.MAX_NAMESPACES", 128)
    async with opened_driver(config_of(shared_directory, EXTENT_BYTES)) as driver:
        before, most = len(leaks.descriptors()), 2 if unshared else 2 * 128

        def pages_are_closed() -> bool:  # on a thread
            return len(leaks.descriptors()) - before <= most

        for number in range(STARTS):
            session = driver.allocate_session_id()
            mine = replace(SPEC, fingerprint=f"start {number}", unshared=unshared)
            driver.open_session(ev.SessionOpened(session, mine, "", 1), {}, NoNews())
            driver.close_session(session, gone=True)
            await work_off(driver)
            if number % 100 == 0:
                driver.call(ev.TimerTicked())
                wait_until(pages_are_closed, "index pages are closed")
    namespaces = driver.machine.namespaces()
    assert len(namespaces) <= (0 if unshared else 128)
    lines = len((shared_directory / "registry.jsonl").read_bytes().splitlines())
    assert lines <= registry.SLACK_LINES + 3 * 128 + 2
