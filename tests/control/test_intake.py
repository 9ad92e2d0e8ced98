"""What a user may have the daemon take in at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import pytest

from kvd.control.access import intake
from kvd_proto.limits import MAX_MESSAGE_BYTES
from kvd_proto.v1 import engine_pb2
from tests.control.daemon_rig import Caller, RawScheduler, daemon, identity, namespace
from tests.control.test_malformed_requests import resident_kib

MIB = 1 << 20


async def test_user_waits_for_his_own_share_and_no_other_does() -> None:
    share = intake.Share(4)
    order: list[str] = []
    release = asyncio.Event()

    async def hold(user: int, units: int, name: str) -> None:
        async with share.hold(user, units):
            order.append(name)
            await release.wait()

    tasks = [
        asyncio.create_task(hold(*each))
        for each in ((1, 3, "a"), (1, 9, "all of it"), (1, 1, "behind"), (2, 4, "other"))
    ]
    await asyncio.sleep(0.01)
    assert order == ["a", "other"]
    tasks[1].cancel()  # who waits may go: the next gets on
    await asyncio.sleep(0.01)
    assert order == ["a", "other", "behind"]
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(share) == 0


async def test_share_comes_back_from_whoever_is_cancelled_as_his_turn_comes() -> None:
    share = intake.Share(1)
    entered: list[int] = []

    async def hold(number: int) -> None:
        async with share.hold(7, 1):
            entered.append(number)
            await asyncio.sleep(0.001)

    for number in range(50):
        tasks = [asyncio.create_task(hold(number)) for _ in range(3)]
        await asyncio.sleep(0.0005 * (number % 5))
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(share) == 0
    assert entered


async def test_who_gives_up_his_turn_late_gives_back_nothing_of_another() -> None:
    share = intake.Share(1)
    first = contextlib.AsyncExitStack()
    await first.enter_async_context(share.hold(7, 1))

    async def wait() -> None:
        async with share.hold(7, 1):
            pass

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()  # it hears of that when the share is back and taken anew
    await first.aclose()
    async with share.hold(7, 1):
        await asyncio.gather(waiting, return_exceptions=True)
        assert share.is_taken(7)
    assert len(share) == 0


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(message: Any, name: str, content: bytes) -> bytes:
    number = message.DESCRIPTOR.fields_by_name[name].number
    return varint(number << 3 | 2) + varint(len(content)) + content


async def test_messages_that_come_late_hold_up_none_and_only_so_many_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "SMALL_LATE_SECONDS", 60.0)
    small = intake.SmallMessages()
    came = asyncio.Event()

    async def take() -> str:
        try:
            async with small.coming():
                await came.wait()
        except TimeoutError:
            return "late"
        return "taken"

    for _ in range(2):  # the places come back
        taking = [asyncio.ensure_future(take()) for _ in range(intake.SMALL_LATE_AT_ONCE + 1)]
        done, _ = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result() for each in done] == ["late"]
        assert taking[-1] in done
        came.set()
        assert await take() == "taken", "beside as many late ones as may be"
        assert [await each for each in taking[:-1]] == ["taken"] * intake.SMALL_LATE_AT_ONCE
        came.clear()


def test_messages_of_tiny_parts_take_little_memory_however_many_come_at_once() -> None:
    """Each became 160 MiB, and those of all sessions were read at the same time."""
    part = field(engine_pb2.Step, "touches", b"")
    step = b"\x08\x01" + part * ((MAX_MESSAGE_BYTES - 64) // len(part))
    content = field(engine_pb2.SessionRequest, "step", step)
    with daemon() as running:
        sessions = [
            RawScheduler(
                running.socket, identity=identity(f"e{n}"), namespace=namespace(model=f"m{n}")
            )
            for n in range(4)
        ]
        idle = [resident_kib(running.pid) for each in sessions if each.opened.session_id][-1]
        most = 0
        calls = []
        for each in sessions:
            channel: Any = each.channel
            stream = channel.stream_stream("/kvd.v1.EngineService/Session")
            calls.append(stream(iter([content]), metadata=each.metadata))
        while not all(call.done() for call in calls):
            most = max(most, resident_kib(running.pid))
            time.sleep(0.01)
        for call in calls:
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        for each in sessions:
            each.close()
    assert most - idle < 150 * 1024, f"{(most - idle) // 1024} MiB"


def test_who_has_not_said_hello_sends_nothing() -> None:
    with daemon() as running:
        caller = Caller(running.socket)
        channel: Any = caller.channel
        call = channel.unary_unary("/kvd.v1.OperatorService/Status")
        idle = resident_kib(running.pid)
        calls = [call.future(b"\x12" * MAX_MESSAGE_BYTES, timeout=30) for _ in range(40)]
        for each in calls:
            with pytest.raises(grpc.RpcError) as caught:
                each.result()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert caller.status().state
        caller.close()
        assert resident_kib(running.pid) - idle < 100 * 1024
