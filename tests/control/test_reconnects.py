"""A scheduler whose stream broke comes back, and its ranks after it: nothing old harms the new."""

from __future__ import annotations

import os
import signal
import time

from kvd.core.upkeep.session import CLOSE_GRACE_NS
from tests.control.daemon_rig import (
    RawEngine,
    RawScheduler,
    RunningDaemon,
    block,
    identity,
    store_job,
)
from tests.waiting import wait_until


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_rank_that_registers_again_gets_its_place_when_its_old_mover_has_ended(
    running: RunningDaemon,
) -> None:
    """The old one would have had a grace: it copies, as far as anybody knows."""
    name = identity("too-soon")
    engine = RawEngine(running.socket, identity=name)
    engine.store({1: block(1)})
    old = engine.mover_pid
    os.kill(old, signal.SIGSTOP)  # so it gives no transfer up
    job = store_job(engine.scheduler.highest_job + 9, [2], [2])
    (verdict,) = engine.scheduler.step(stores=[job], end_step=True).verdicts
    assert verdict.accepted
    again = RawScheduler(running.socket, identity=name)
    assert again.opened.session_id
    new = engine.worker.register(identity=name)
    assert not lives(old)
    said = running.log.read_text()
    assert f"(pid {old}): its rank registered again" in said, "nobody needs the grace any more"
    assert lives(new)
    again.next("ranks_ready")
    again.close()
    engine.close()


def test_ranks_that_register_again_at_once_outlive_the_old_sessions_end(
    running: RunningDaemon,
) -> None:
    name = identity("comes-back")
    engine = RawEngine(running.socket, identity=name)
    engine.store({1: block(1)})
    again = RawScheduler(running.socket, identity=name)
    assert again.opened.session_id
    old = engine.mover_pid
    wait_until(lambda: not lives(old), "the old mover's end")
    new = engine.worker.register(identity=name)
    again.next("ranks_ready")
    time.sleep(2 * CLOSE_GRACE_NS / 1e9)  # by when the old session's movers are ended by force
    assert lives(new)
    (session,) = [s for s in again.status().sessions if s.engine_id == "comes-back"]
    assert session.usable
    again.close()
    engine.close()
