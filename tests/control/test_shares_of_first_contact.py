"""Who says nothing, half a message, or comes with engine after engine: to the bound and beyond."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

from kvd.control.access.intake import FIRST_AT_ONCE
from kvd.control.registration.rendezvous import Rendezvous
from kvd.core.engines.meeting import MAX_ENGINES, MAX_ENGINES_OF_A_USER
from kvd.core.errors import LimitExceeded
from tests.control.daemon_of_small_bounds import VARIABLE
from tests.control.daemon_rig import (
    Caller,
    RawScheduler,
    identity,
    refusal,
)
from tests.control.raw_http2 import RawHttp2, message
from tests.control.running_daemon import RunningDaemon
from tests.control.test_companion_socket import HELLO, answer, connect
from tests.waiting import wait_until

ONE, OTHER = 12346, 12347
# Another user's process: it takes so many, and says what it is told with one more.
TAKE = """
import os, sys
from tests.control import test_shares_of_first_contact as here
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
held, told = getattr(here, sys.argv[1])(sys.argv[2], int(sys.argv[4]))
print(told, flush=True)
sys.stdin.readline()
"""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@contextlib.contextmanager
def daemon_with(bounds: str) -> Iterator[RunningDaemon]:
    """A daemon for every user, with these bounds, each of a module of kvd."""
    said = " ".join(f"kvd.{bound}" for bound in bounds.split())
    running = RunningDaemon("--socket-mode", "0666", environment={VARIABLE: said})
    running.directory.chmod(0o755)
    running.module = "tests.control.daemon_of_small_bounds"
    try:
        running.start()
        yield running
    finally:
        running.remove()


@contextlib.contextmanager
def by_another(user: int, take: str, path: str, count: int) -> Iterator[str]:
    """`take` by a process of this user, which holds on while in the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, take, path, str(user), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def say_nothing(path: str, count: int) -> tuple[list[socket.socket], str]:
    """So many companion connections that say nothing, and what one more is told."""
    held = []
    for _ in range(count + 1):
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(20)
        connected.connect(f"{path}.companion")
        held.append(connected)
    with held.pop() as last:  # they are taken in the order in which they came
        refused = answer(last).error
        assert last.recv(1) == b""
    return held, f"{refused.reason}: {refused.message}"


@as_root
def test_users_who_say_nothing_have_their_shares_and_operators_their_reserve() -> None:
    bounds = " ".join(
        f"control.access.companion:{bound}"
        for bound in (
            "MAX_STRANGERS=9",
            "MAX_STRANGERS_OF_A_USER=4",
            "STRANGERS_FOR_OPERATORS=2",
            "HELLO_SECONDS=600",
        )
    )
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(daemon_with(bounds))
        told = stack.enter_context(by_another(ONE, "say_nothing", running.socket, 4))
        assert told.startswith(f"LIMIT_EXCEEDED: uid {ONE} has 4 connections that have not said")
        told = stack.enter_context(by_another(OTHER, "say_nothing", running.socket, 2))
        assert told.startswith(f"LIMIT_EXCEEDED: uid {OTHER} has 2 connections that have not said")
        assert "1 are free, and 2 for operators" in told
        held, told = say_nothing(running.socket, 3)
        for each in held:
            stack.enter_context(each)
        assert told.startswith("LIMIT_EXCEEDED: there are 9 connections that have not said hello")
        held[0].sendall(HELLO)  # and is a stranger no more
        assert answer(held[0]).welcome.token
        with connect(running) as another:
            another.sendall(HELLO)
            assert answer(another).welcome.token


def test_who_does_not_say_hello_in_time_is_closed_and_who_did_stays() -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(daemon_with("control.access.companion:HELLO_SECONDS=3.0"))
        polite = stack.enter_context(connect(running))
        polite.sendall(HELLO)
        assert answer(polite).welcome.token
        rude = stack.enter_context(connect(running))
        rude.sendall(HELLO[:-1])
        assert rude.recv(1) == b""
        polite.sendall(HELLO)  # a second one is refused, and the connection stays
        assert answer(polite).error.reason == "INVALID_ARGUMENT"


def test_message_that_does_not_come_whole_in_time_gives_its_place_back() -> None:
    """All the places of a user are held by halves of messages; who comes behind them is served."""
    with daemon_with("control.rpc:TAKE_IN_SECONDS=3.0") as running, contextlib.ExitStack() as stack:
        caller = stack.enter_context(contextlib.closing(Caller(running.socket, "SCHEDULER")))
        raw = stack.enter_context(contextlib.closing(RawHttp2(running.socket)))
        halves = []
        for _ in range(FIRST_AT_ONCE):
            halves.append(raw.begin("/kvd.v1.EngineService/Session", caller.welcome.token))
            raw.send(halves[-1], message(b"half", 8))
        tool = stack.enter_context(contextlib.closing(Caller(running.socket)))
        assert tool.status().state

        def all_ended() -> bool:
            raw.read(0.05)
            return raw.reset >= set(halves)

        wait_until(all_ended, "the halves' end")


def test_call_whose_message_does_not_come_is_told_why() -> None:
    with daemon_with("control.rpc:TAKE_IN_SECONDS=3.0") as running:
        with contextlib.closing(Caller(running.socket, "SCHEDULER")) as caller:
            never = threading.Event()
            silent = (never.wait() for _ in range(1))
            stream: Any = caller.engine.Session(silent, metadata=caller.metadata)
            told = refusal(lambda: next(stream))
            never.set()
        assert told == ("DEADLINE_EXCEEDED", "DEADLINE", "")


# -- engines ----------------------------------------------------------------------------------


def open_sessions(path: str, count: int) -> tuple[list[RawScheduler], str]:
    """So many engines' sessions, and what one more is told."""
    held = [RawScheduler(path, identity=identity(f"e{n}")) for n in range(count)]
    for each in held:
        assert each.opened.session_id
    last = RawScheduler(path, identity=identity("one more"))
    try:
        told = refusal(lambda: last.opened)
    finally:
        last.close()
    return held, " ".join(told)


REFUSED = "RESOURCE_EXHAUSTED LIMIT_EXCEEDED identity.engine_id"


@as_root
def test_engines_are_bounded_for_a_user_and_for_all_and_one_that_ends_makes_room() -> None:
    place = "core.engines.meeting"
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(
            daemon_with(f"{place}:MAX_ENGINES=3 {place}:MAX_ENGINES_OF_A_USER=2")
        )
        held, told = open_sessions(running.socket, 2)
        for each in held[1:]:
            stack.callback(each.close)
        assert told == REFUSED
        with by_another(ONE, "open_sessions", running.socket, 1) as told:
            assert told == REFUSED
        held[0].close()

        def another() -> bool:
            with contextlib.closing(RawScheduler(running.socket, identity=identity("n"))) as new:
                try:
                    return bool(new.opened.session_id)
                except grpc.RpcError:  # the other one still ends
                    return False

        wait_until(another, "room for another engine")


async def test_so_many_engines_as_are_promised_are_taken_and_no_more() -> None:
    known = Rendezvous(cast("Any", None))
    for number in range(MAX_ENGINES_OF_A_USER):
        await known.claim(ONE, identity(f"e{number}"))
    with pytest.raises(LimitExceeded, match=f"uid {ONE} has {MAX_ENGINES_OF_A_USER}") as refused:
        await known.claim(ONE, identity("one more"))
    assert refused.value.field == "identity.engine_id"
    assert 2 * MAX_ENGINES_OF_A_USER == MAX_ENGINES
    for user in range(OTHER, OTHER + MAX_ENGINES - MAX_ENGINES_OF_A_USER):
        await known.claim(user, identity("first"))
    with pytest.raises(LimitExceeded, match=f"there are {MAX_ENGINES} engines"):
        await known.claim(OTHER + MAX_ENGINES, identity("first"))
    first = await known.claim(ONE, identity("e0"))
    known.forget_if_empty(first)
    known.forget_if_empty(first)  # it gives back one place, not two
    await known.claim(OTHER + MAX_ENGINES, identity("first"))
    with pytest.raises(LimitExceeded):
        await known.claim(OTHER + MAX_ENGINES + 1, identity("first"))


async def test_ten_users_who_take_all_the_engines_they_can_leave_one_for_the_next() -> None:
    known = Rendezvous(cast("Any", None))
    had = []
    for user in range(10):
        count = 0
        with contextlib.suppress(LimitExceeded):
            while True:
                await known.claim(user, identity(f"e{count}"))
                count += 1
        had.append(count)
    assert had == [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]
    await known.claim(11, identity("newcomer"))
