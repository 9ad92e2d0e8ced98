"""Whoever opens and closes sessions without end takes one descriptor, not one for each."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.registration import engine_exits
from kvd.control.registration.engine_exits import WATCH_SECONDS, EngineExitWatcher, _Watched
from kvd.core import events as ev
from kvd.core.keys import SessionId
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


def process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def peer_of(process: subprocess.Popen[bytes], uid: int) -> Peer:
    credentials = Credentials(uid, uid, process.pid, os.pidfd_open(process.pid))
    return Peer(credentials, Role.SCHEDULER, "test", lambda _message, _fds: None)


async def test_so_many_ended_engines_are_watched_and_each_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_exits, "MAX_WATCHED_OF_A_USER", 1)
    told: asyncio.Queue[ev.SessionClosed] = asyncio.Queue()
    driver: Any = SimpleNamespace(call=told.put_nowait)
    watcher = EngineExitWatcher(driver)
    before = descriptors()
    first, second, others = process(), process(), process()
    peers = [peer_of(first, 1), peer_of(second, 1), peer_of(others, 2)]
    gone = peer_of(first, 1)
    gone.end()
    watcher.watch(SessionId(9), gone)  # it can't be watched, and takes no place
    held = descriptors()
    for number, peer in enumerate(peers):
        watcher.watch(SessionId(number), peer)
    assert len(descriptors() - held) == 2, "the user's second one has no place"
    for each in (second, first, others):
        each.communicate()
    ended = {(await told.get()).session for _ in range(2)}
    assert ended == {0, 2}
    third = process()
    peers.append(peer_of(third, 1))
    watcher.watch(SessionId(3), peers[-1])
    third.communicate()
    assert await told.get() == ev.SessionClosed(SessionId(3), gone=True)
    assert not watcher._watched
    for peer in peers:
        peer.end()
    assert descriptors() <= before


def test_a_process_that_opens_sessions_without_end_is_watched_for_the_last_ones() -> None:
    watched = _Watched(-1)
    for number in range(100):
        watched.add(SessionId(number), number * WATCH_SECONDS / 2)
    assert list(watched.sessions) == [98, 99]


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
