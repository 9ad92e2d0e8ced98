"""A tier over its processes' lives: started again, later and later, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvd.core.keys import RowId
from kvd.processes import parent
from kvd.tiers import keeper as module
from kvd.tiers.keeper import KeeperStage, TierKeeper
from kvd.tiers.process import (
    OrderEnd,
    QueueBounds,
    TierAnswer,
    TierConfig,
    TierId,
    TierLeft,
    TierProcess,
    TierSink,
    TierStartError,
)
from kvd.tiers.store import TierUsage
from tests.tiers.tier_rig import BAD, MEMORY, TierRig, keys, on_loop, soon, tier_rig, until

FIRST_S, LONGEST_S = 0.05, 0.2


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", FIRST_S)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", LONGEST_S)


class Heard:
    """A TierListener, and where processes are noted."""

    def __init__(self) -> None:
        self.started: list[tuple[float, TierProcess]] = []
        self.gone: list[tuple[float, str]] = []
        self.answers: dict[int, TierAnswer] = {}
        self.noted: dict[int, int] = {}
        self.refusals = 0  # of notes still to come
        self.deaf = False  # to starts and ends

    def record_mover(self, pid: int, start_time: int) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert not self.noted, "two processes at a time"
        self.noted[pid] = start_time

    def forget_mover(self, pid: int) -> None:
        self.noted.pop(pid, None)

    def tier_started(self, tier: TierId, process: TierProcess) -> None:
        if self.deaf:
            return
        assert process.pid in self.noted
        assert len(self.started) == len(self.gone)
        self.started.append((time.monotonic(), process))

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:
        self.answers[answer.order] = answer

    def row_unmapped(self, tier: TierId, row: RowId) -> None:
        """No test here unmaps one."""

    def usage_told(self, tier: TierId, usage: TierUsage) -> None:
        """No test here asks."""

    def left_told(self, tier: TierId, left: TierLeft) -> None:
        """No test here evicts."""

    def tier_gone(self, tier: TierId, reason: str) -> None:
        if self.deaf:
            return
        assert not self.noted
        self.gone.append((time.monotonic(), reason))


@contextlib.asynccontextmanager
async def kept(r: TierRig, heard: Heard, store: str = MEMORY) -> AsyncIterator[TierKeeper]:
    """A keeper whose process is gone afterwards."""
    keeper = TierKeeper(r.config(store), heard, heard)
    try:
        yield keeper
    finally:
        assert await keeper.close()
        assert keeper.stage is KeeperStage.CLOSED
        assert keeper.process is None
        assert not heard.noted
        assert len(heard.started) == len(heard.gone)


@on_loop
async def test_one_that_ends_is_started_again_later_and_later() -> None:
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard) as keeper:
            for _ in range(5):
                await until(lambda: len(heard.started) > len(heard.gone))
                assert keeper.stage is KeeperStage.SERVING
                os.kill(heard.started[-1][1].pid, signal.SIGKILL)
                await until(lambda: len(heard.started) == len(heard.gone))
            await until(lambda: len(heard.started) > 5)
        waits = [
            started - gone
            for (started, _), (gone, _) in zip(heard.started[1:], heard.gone, strict=False)
        ]
        least = [FIRST_S, 2 * FIRST_S, LONGEST_S, LONGEST_S, LONGEST_S]
        assert all(wait >= wanted for wait, wanted in zip(waits, least, strict=True))
        assert {reason for _, reason in heard.gone} == {"killed by SIGKILL", "stopped"}


class Brief:
    """Launches what serves for as long as it is told, and notes when it was asked to."""

    def __init__(self, serves_s: list[float | None]) -> None:
        self.asked: list[float] = []
        self._serves_s = serves_s
        self.left = asyncio.Event()

    async def launch(self, config: TierConfig, sink: TierSink, _: QueueBounds) -> TierProcess:
        self.asked.append(time.monotonic())
        if not self._serves_s:
            self.left.set()
            await asyncio.Event().wait()
        serves_s = self._serves_s.pop(0)
        if serves_s is None:
            raise TierStartError("not now")
        asyncio.get_running_loop().call_later(serves_s, sink.tier_gone, config.tier, "ended")
        return cast(TierProcess, SimpleNamespace(pid=1))


@on_loop
async def test_waits_double_up_to_the_longest_and_begin_anew_for_who_served_so_long() -> None:
    async with tier_rig() as r:
        heard = Heard()
        heard.deaf = True
        brief = Brief([None, 0.01, None, 0.01, LONGEST_S + 0.05, None])
        keeper = TierKeeper(r.config(), heard, heard, launch=brief.launch)
        await asyncio.wait_for(brief.left.wait(), 10)
        await keeper.close()
        steps = np.diff(brief.asked)
        served = np.array([0, 0.01, 0, 0.01, LONGEST_S + 0.05, 0])
        wanted = np.array([1, 2, 4, 4, 1, 2]) * FIRST_S
        assert (steps - served - wanted > -0.01).all(), steps
        assert (steps - served - wanted < 0.08).all(), steps


@on_loop
async def test_a_store_that_can_not_be_opened_is_tried_again_and_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard, BAD + "opens_later") as keeper:
            await until(lambda: keeper.stage is KeeperStage.WAITING)
            assert "it does not start: not yet" in keeper.reason
            await asyncio.sleep(1.0)
            assert not heard.started
            assert sum("not yet" in line for line in caplog.messages) == 1
            r.sign("open")
            await until(lambda: heard.started)
            assert heard.started[0][1].exists(r.next_order(), keys(1), soon())
            await until(lambda: heard.answers)
            assert heard.answers[1].end is OrderEnd.ANSWERED


@on_loop
async def test_one_that_can_not_be_noted_does_not_serve_until_it_can() -> None:
    async with tier_rig() as r:
        heard = Heard()
        heard.refusals = 2
        async with kept(r, heard) as keeper:
            await until(lambda: heard.started)
            assert "No space left" in keeper.reason
            assert heard.noted == {heard.started[0][1].pid: heard.started[0][1].start_time}


@pytest.mark.parametrize("store", ["hangs_in_opening", "can_not_be_opened"])
@on_loop
async def test_a_keeper_can_be_closed_while_there_is_no_process(store: str) -> None:
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard, BAD + store) as keeper:
            await asyncio.sleep(0.4)
            began = time.monotonic()
            await keeper.close()
            assert time.monotonic() - began < 2.0
        assert not heard.started


@on_loop
async def test_a_process_that_can_not_be_ended_does_not_keep_the_daemon_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.5)
    monkeypatch.setattr(parent, "STOP_S", 0.1)
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard) as keeper:
            await until(lambda: heard.started)
            process = heard.started[0][1]
            os.kill(process.pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(process._child, "kill", lambda: None)
                began = time.monotonic()
                assert not await keeper.close()
                assert time.monotonic() - began < 1.0
                assert list(heard.noted) == [process.pid], "the next owner must know of it"
            process._child.kill()


@on_loop
async def test_orders_of_the_last_process_end_before_the_next_begins() -> None:
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard, BAD + "Hangs"):
            await until(lambda: heard.started)
            first = heard.started[0][1]
            assert first.exists(r.next_order(), keys(1), soon())
            os.kill(first.pid, signal.SIGSTOP)
            assert first.exists(r.next_order(), keys(1), soon())
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: len(heard.started) == 2)
            assert set(heard.answers) == {1, 2}
            assert not first.exists(r.next_order(), keys(1), soon())
            assert heard.started[1][1].exists(r.next_order(), keys(1), soon())
            await until(lambda: 4 in heard.answers)
