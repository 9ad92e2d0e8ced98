"""What large messages took is given back, and messages over the limit take nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvd.control import memory
from kvd.control.shares import Bound, Shares
from kvd.core.errors import LimitExceeded
from kvd_proto.layout import MAX_MESSAGE_BYTES
from tests.control.daemon_rig import Caller, daemon
from tests.control.test_malformed_requests import resident_kib


async def test_memory_is_given_back_once_after_many_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "PAUSE_SECONDS", 0.01)
    given: list[int] = []
    back = memory.MemoryReturn(lambda: given.append(1))
    back.note(memory.NOTED_BYTES - 1)
    await asyncio.sleep(0.05)
    assert not given
    for _ in range(10):
        back.note(1 << 20)
    await asyncio.sleep(0.2)
    assert len(given) == 1


def test_messages_over_the_limit_take_no_memory_and_leave_none() -> None:
    with daemon() as running:
        caller = Caller(running.socket)
        channel: Any = caller.channel
        status = channel.unary_unary("/kvd.v1.OperatorService/Status")

        def send(size: int) -> None:
            with pytest.raises(grpc.RpcError) as caught:
                status(b"\xff" * size, metadata=caller.metadata, timeout=30)
            assert caught.value.code().name in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")

        send(MAX_MESSAGE_BYTES)
        before = resident_kib(running.pid)
        for size in (MAX_MESSAGE_BYTES + 1, 64 << 20, 192 << 20):
            send(size)
        grown = resident_kib(running.pid) - before
        caller.close()
    assert grown < 24 * 1024, f"{grown} KiB"


def test_shares_are_kept_for_each_user_and_a_reserve_for_operators() -> None:
    shares = Shares(Bound("things", most=10, each=4, reserved=2))
    for user in (1, 1, 1, 1, 2, 2, 2, 2):
        shares.take(user)
    with pytest.raises(LimitExceeded, match="uid 1 has 4 things"):
        shares.take(1)
    with pytest.raises(LimitExceeded, match="8 things, and 2 for operators"):
        shares.take(3)
    shares.take(0, operates=True)
    shares.take(0, operates=True)
    with pytest.raises(LimitExceeded):
        shares.take(0, operates=True)
    shares.give_back(1)
    assert (len(shares), shares.of(1), shares.of(0)) == (9, 3, 2)
    with pytest.raises(LimitExceeded, match="operators"):
        shares.take(3)
