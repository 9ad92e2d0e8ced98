"""Whoever opens and closes sessions without end takes one descriptor, not one for each."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from kvd_client.companion import CompanionRefused
from kvd_proto.v1 import engine_pb2
from tests.control.daemon_rig import (
    Caller,
    RawScheduler,
    RunningDaemon,
    daemon,
    identity,
    namespace,
)
from tests.control.running_daemon import DEADLINE_S
from tests.waiting import wait_until

SESSIONS = 1000
A_FEW = 32


def open_descriptors(running: RunningDaemon) -> int:
    return len(list(Path(f"/proc/{running.pid}/fd").iterdir()))


def test_a_thousand_sessions_of_one_process_take_no_descriptor_each(
    running: RunningDaemon,
) -> None:
    caller = Caller(running.socket, "SCHEDULER")
    opening = engine_pb2.OpenSession(identity=identity(), namespace=namespace(), world_size=1)
    most = before = 0
    for number in range(SESSIONS):
        requests: queue.SimpleQueue[engine_pb2.SessionRequest | None] = queue.SimpleQueue()
        requests.put(engine_pb2.SessionRequest(open=opening))
        stream = caller.engine.Session(
            iter(requests.get, None), timeout=DEADLINE_S, metadata=caller.metadata
        )
        assert next(stream).opened.session_id
        requests.put(None)
        for _response in stream:
            pass
        if number == 0:
            before = open_descriptors(running)
        most = max(most, open_descriptors(running))
    caller.close()
    assert most < before + A_FEW
    wait_until(lambda: open_descriptors(running) <= before, "the last descriptor's end")


def test_what_can_not_be_answered_for_want_of_descriptors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_COPIES)
    flag = tmp_path / "full"
    with daemon(environment={"PYTHONPATH": str(tmp_path)}) as running:
        scheduler = RawScheduler(running.socket, identity=identity("pages"))
        number = scheduler.opened.namespace_id
        flag.touch()
        with pytest.raises(CompanionRefused, match=r"LIMIT_EXCEEDED.*LimitNOFILE"):
            scheduler.companion.get_page(number)
        flag.unlink()
        os.close(scheduler.companion.get_page(number))
        scheduler.close()


NO_COPIES = """
import errno, os, pathlib
copy = os.dup
def dup(fd):
    if pathlib.Path(__file__).with_name("full").exists():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return copy(fd)
os.dup = dup
"""
