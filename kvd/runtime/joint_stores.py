"""Begins the small stores of a step together, a few dozen in one event."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.core.actions import Verdict
from kvd.core.events import StoreRequested, StoresRequested
from kvd.core.keys import JobId, SessionId
from kvd.runtime.driver import Driver


async def store_together(driver: Driver, events: Sequence[StoreRequested]) -> dict[JobId, Verdict]:
    """Begin those that may begin with others; `Driver.store` says what becomes of the rest.

    The events are of one session, as `stores_together` cuts them, and of different new jobs.
    """
    session, said = events[0].session, dict[JobId, Verdict]()
    left = list(events)
    while len(left) > 1:
        begun = _begin(driver, session, left)
        if not begun:
            break
        said |= begun
        left = [event for event in left if event.job not in begun]
        await driver.let_others_in(session)
    return said


def _begin(
    driver: Driver, session: SessionId, events: Sequence[StoreRequested]
) -> dict[JobId, Verdict]:
    for event in events:
        driver.jobs.started(session, event.job)
    verdicts: tuple[Verdict | None, ...] = (None,) * len(events)
    try:
        verdicts = driver.call(StoresRequested(session, tuple(events)))
    finally:
        said = zip(events, verdicts, strict=True)
        driver.jobs.withdraw(session, [event.job for event, verdict in said if verdict is None])
        if session not in driver.sessions:
            driver.jobs.forget_if_idle(session)
    return {verdict.job: verdict for verdict in verdicts if verdict is not None}
