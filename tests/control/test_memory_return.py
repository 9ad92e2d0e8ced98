"""What large messages took is given back, and messages over the limit take nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from typing import Any

import grpc
import pytest

from kvd.control import memory_return
from kvd.core.errors import LimitExceeded
from kvd.core.shares import Bound, Shares
from kvd_proto.limits import MAX_MESSAGE_BYTES
from tests.control.daemon_rig import Caller, daemon
from tests.control.test_malformed_requests import resident_kib


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_return, "LOOK_SECONDS", 0.002)


@pytest.mark.usefixtures("quick")
async def test_memory_is_given_back_as_soon_as_there_is_more_of_it() -> None:
    held = [100 << 20]
    given: list[int] = []
    given_back = asyncio.Event()
    loop = asyncio.get_running_loop()

    def give_back() -> None:
        given.append(held[0])
        held[0] = 100 << 20
        loop.call_soon_threadsafe(given_back.set)

    back = memory_return.MemoryReturn(give_back, lambda: held[0])
    back.begin()
    held[0] += memory_return.GROWN_BYTES
    await asyncio.sleep(0.05)
    assert not given
    held[0] += 1
    await asyncio.wait_for(given_back.wait(), 60)
    assert given == [(100 << 20) + memory_return.GROWN_BYTES + 1]
    back.close()
    held[0] *= 2
    await asyncio.sleep(0.05)
    assert len(given) == 1


@pytest.mark.usefixtures("quick")
async def test_memory_is_given_back_after_a_time_without_a_descriptor_to_look_with() -> None:
    looks = itertools.count()
    given_back = asyncio.Event()
    loop = asyncio.get_running_loop()

    def held() -> int:
        match next(looks):
            case 0:
                return 100 << 20
            case 1 | 2 | 4:  # two in a row, and the one after it was given back
                raise OSError(errno.EMFILE, "Too many open files")
        return 200 << 20

    def give_back() -> None:
        loop.call_soon_threadsafe(given_back.set)

    back = memory_return.MemoryReturn(give_back, held)
    back.begin()
    for _ in range(2):
        await asyncio.wait_for(given_back.wait(), 60)
        given_back.clear()
    back.close()


@pytest.mark.usefixtures("quick")
async def test_memory_that_stays_in_use_is_tried_ever_more_seldom_and_goes_back_in_the_end() -> (
    None
):
    held, needed, looks = [0], [200 << 20], [0]
    given: list[int] = []
    many, gone = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def give_back() -> None:
        given.append(looks[0])
        held[0] = needed[0]
        if not held[0]:
            loop.call_soon_threadsafe(gone.set)

    def count() -> int:
        looks[0] += 1
        if looks[0] >= 300:
            many.set()
        return held[0]

    back = memory_return.MemoryReturn(give_back, count)
    back.begin()
    held[0] = 200 << 20
    await asyncio.wait_for(many.wait(), 60)
    assert len(given) < 16, "tried as often as looked"
    needed[0] = 0
    await asyncio.wait_for(gone.wait(), 60)
    back.close()


@pytest.mark.usefixtures("quick")
async def test_what_little_lies_free_is_given_back_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_return, "LOOKS_ANYHOW", 20)
    looks = [0]
    given: list[int] = []
    thrice = asyncio.Event()
    loop = asyncio.get_running_loop()

    def give_back() -> None:
        given.append(looks[0])
        if len(given) == 3:
            loop.call_soon_threadsafe(thrice.set)

    def count() -> int:
        looks[0] += 1
        return 100 << 20

    back = memory_return.MemoryReturn(give_back, count)
    back.begin()
    await asyncio.wait_for(thrice.wait(), 60)
    back.close()
    assert all(20 <= later - one <= 24 for one, later in itertools.pairwise([0, *given]))


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
    for user in (1, 1, 1, 1, 2, 2, 4, 5):
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


def greedy(shares: Shares, users: int) -> list[int]:
    """What each of so many users gets who take all they can, one after the other."""
    for user in range(1, users + 1):
        with contextlib.suppress(LimitExceeded):
            while True:
                shares.take(user)
    return [shares.of(user) for user in range(1, users + 1)]


def test_ten_greedy_users_leave_some_for_the_next_and_operators_their_reserve() -> None:
    shares = Shares(Bound("things", most=1100, each=300, reserved=76))
    assert greedy(shares, 10) == [300, 300, 212, 106, 53, 27, 13, 7, 3, 2]
    assert shares.bound.most - shares.bound.reserved - len(shares) == 1
    shares.take(11)
    with pytest.raises(LimitExceeded, match="1024 things, and 76 for operators"):
        shares.take(12)
    for _ in range(76):
        shares.take(0, operates=True)
    with pytest.raises(LimitExceeded, match="there are 1100 things, as many"):
        shares.take(0, operates=True)


def test_one_who_waits_for_others_to_end_some_may_take_more_again() -> None:
    shares = Shares(Bound("things", most=8, each=4))
    assert greedy(shares, 2) == [4, 2]
    with pytest.raises(LimitExceeded, match="uid 2 has 2 things and 2 are free: a user may have"):
        shares.take(2)
    shares.give_back(1)
    shares.take(2)
    with pytest.raises(LimitExceeded):
        shares.take(2)
    with pytest.raises(LimitExceeded):
        shares.take(1)  # has 3 of 6


def test_a_sole_user_has_a_whole_share() -> None:
    for bound in (
        Bound("companion connections of engines", 256, 128),
        Bound("calls under way", 4096, 1024, 64),
    ):
        shares = Shares(bound)
        assert greedy(shares, 1) == [bound.each]
