"""Operators' long work: whoever gives it up, and whatever goes meanwhile, does no harm."""

from __future__ import annotations

import asyncio

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import NamespaceId, TenantId
from kvd.runtime.long_work import LongWork

ONE, TWO = NamespaceId(1), NamespaceId(2)


class Asked:
    """The core as long work sees it: notes what it is asked."""

    def __init__(self, *known: NamespaceId) -> None:
        self.events: list[ev.Event] = []
        self.work = LongWork(known.__contains__, self.events.append, asyncio.ensure_future)

    async def asked(self) -> None:
        """Let whoever waits go on."""
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_namespace_that_was_forgotten_meanwhile_is_passed_over() -> None:
    core = Asked(TWO)
    clearing = asyncio.ensure_future(core.work.clear([ONE, TWO]))
    await core.asked()
    assert core.events == [ev.NamespaceCleared(1, TWO)]
    core.work.tell_done(act.TellDone(1, 3))
    assert await clearing == 3
    assert not core.work._asked, "a daemon clears for years"


async def test_a_quota_whose_caller_gives_up_as_it_is_done_is_no_defect() -> None:
    """The driver takes any error of it for a broken invariant, and the daemon would end."""
    core = Asked()
    setting = asyncio.ensure_future(core.work.set_quota(TenantId("t"), 1))
    await core.asked()
    setting.cancel()
    core.work.tell_done(act.TellDone(1, 3))
    await asyncio.wait([setting])
    assert setting.cancelled()
    assert not core.work._asked
    core.work.tell_done(act.TellDone(1, 3))  # nobody waits any more
