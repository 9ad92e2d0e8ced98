"""A tier over its processes' lives: started again, later and later, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.core.keys import RowId
from kvd.processes import parent
from kvd.processes.mappings import ExtentFiles
from kvd.tiers import keeper as module
from kvd.tiers import process as process_module
from kvd.tiers.keeper import KeeperStage, TierKeeper
from kvd.tiers.kinds import OPEN_DISK
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
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.tiers.tier_rig import BAD, MEMORY, TierRig, keys, on_loop, soon, tier_rig, until

SHORT_S = 0.05


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", SHORT_S)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", SHORT_S)


short_waits = pytest.mark.usefixtures("_short_waits")


class Heard:
    """A TierListener, and where processes are noted."""

    def __init__(self) -> None:
        self.started: list[TierProcess] = []
        self.gone: list[str] = []
        self.answers: dict[int, TierAnswer] = {}
        self.noted: dict[int, int] = {}
        self.launches = 0
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
        self.started.append(process)

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
        self.gone.append(reason)


@contextlib.asynccontextmanager
async def kept(
    r: TierRig, heard: Heard, store: str = MEMORY, **options: str | float | bool
) -> AsyncIterator[TierKeeper]:
    """A keeper whose process is gone afterwards."""

    def launch(*about: Any) -> Coroutine[Any, Any, TierProcess]:
        heard.launches += 1
        return TierProcess.start(*about)

    config = r.config(store, **options)
    if store == OPEN_DISK:
        config = replace(config, options=options)
    keeper = TierKeeper(config, heard, heard, launch=launch)
    try:
        yield keeper
    finally:
        assert await keeper.close()
        assert keeper.stage is KeeperStage.CLOSED
        assert keeper.process is None
        assert not heard.noted
        assert len(heard.started) == len(heard.gone)


@short_waits
@on_loop
async def test_one_that_ends_is_started_again_and_each_end_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same end as the last time, too: it may have served for weeks since."""
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard) as keeper:
            for _ in range(3):
                await until(lambda: len(heard.started) > len(heard.gone))
                assert keeper.stage is KeeperStage.SERVING
                os.kill(heard.started[-1].pid, signal.SIGKILL)
                await until(lambda: len(heard.started) == len(heard.gone))
            await until(lambda: len(heard.started) > 3)
        killed = "killed by SIGKILL, perhaps for want of memory"
        assert heard.gone == [killed] * 3 + ["stopped"]
        ends = [each for each in caplog.messages if "its process ended" in each]
        assert ends == [f"tier below: its process ended: {killed}"] * 3


@short_waits
@on_loop
async def test_one_that_was_told_to_end_and_can_not_yet_is_said_to_serve_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that waits in the kernel for a disk that hangs."""
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard) as keeper:
            await until(lambda: bool(heard.started))
            assert (keeper.is_ending, keeper.problem) == (False, "")
            (process,) = heard.started
            assert process._child is not None
            with monkeypatch.context() as patched:
                patched.setattr(process._child, "kill", lambda: None)
                process.end_because("it is late")
            assert keeper.is_ending
            assert keeper.problem == "its process has yet to end: it is late"
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: len(heard.started) == 2)
            assert (keeper.is_ending, keeper.problem) == (False, "its process ended: it is late")


@short_waits
@on_loop
async def test_one_that_has_yet_to_open_its_store_is_told_of_before_and_after_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that waits in the kernel for a disk that hangs, which nobody can end."""
    monkeypatch.setattr(module, "SLOW_START_S", SHORT_S)
    monkeypatch.setattr(process_module, "START_S", SHORT_S)
    ends: list[int] = []
    async with tier_rig() as r:
        heard = Heard()
        with monkeypatch.context() as patched:
            patched.setattr(TierProcess, "kill", lambda process: ends.append(process.pid))
            async with kept(r, heard, BAD + "hangs_in_opening") as keeper:
                await until(lambda: bool(ends))
                [pid] = heard.noted
                said = f"its process (pid {pid}) has yet to open its store"
                await until(lambda: said in caplog.text)
                assert (keeper.stage, keeper.problem) == (KeeperStage.STARTING, said)
                patched.undo()
                os.kill(pid, signal.SIGKILL)
                await until(lambda: keeper.stage is KeeperStage.WAITING)
                assert "no word" in keeper.problem
                assert "has yet to open" not in keeper.problem


class Brief:
    """Launches on virtual time what serves as long as it is told; notes each wait before."""

    def __init__(self, starts_s: float, serves_s: list[float | None]) -> None:
        self.waits: list[float] = []
        self.left = asyncio.Event()
        self._starts_s = starts_s
        self._serves_s = serves_s
        self._ended_s = asyncio.get_running_loop().time()

    async def launch(self, config: TierConfig, sink: TierSink, _: QueueBounds) -> TierProcess:
        loop = asyncio.get_running_loop()
        self.waits.append(round(loop.time() - self._ended_s, 3))
        if not self._serves_s:
            self.left.set()
            await asyncio.Event().wait()
        serves_s = self._serves_s.pop(0)
        await asyncio.sleep(self._starts_s)
        self._ended_s = loop.time() + (serves_s or 0)
        if serves_s is None:
            raise TierStartError("not now")
        loop.call_later(serves_s, sink.tier_gone, config.tier, "ended")
        return cast(TierProcess, SimpleNamespace(pid=1, mounts=()))


@pytest.mark.parametrize("starts_s", [0.0, 100.0])
@pytest.mark.parametrize(
    ("serves_s", "waits"),
    [
        ([None] * 8, [0, 1, 2, 4, 8, 16, 32, 60, 60]),
        ([0.01] * 8, [0, 1, 2, 4, 8, 16, 32, 60, 60]),
        ([None, 0.01, None, 59.9, 60.0, None], [0, 1, 2, 4, 8, 1, 2]),
    ],
    ids=["never started", "ended at once", "served long once"],
)
def test_it_waits_longer_each_time_but_for_who_served_long(
    tmp_path: Path, starts_s: float, serves_s: list[float | None], waits: list[float]
) -> None:
    async def run() -> list[float]:
        heard = Heard()
        heard.deaf = True
        brief = Brief(starts_s, list(serves_s))
        config = TierConfig(TierId(3), MEMORY, {}, ExtentFiles(tmp_path, 0, 1 << 20))
        keeper = TierKeeper(config, heard, heard, launch=brief.launch)
        await brief.left.wait()
        await keeper.close()
        return brief.waits

    with contextlib.closing(VirtualTimeLoop()) as loop:
        assert loop.run_until_complete(run()) == waits


@pytest.mark.parametrize(
    ("serves_s", "counts"),
    [([], 0), ([59.9], 1), ([None, 0.01, None], 3), ([0.01, 60.1], 0), ([0.01, 60.1, 1.0], 1)],
)
def test_short_lives_in_a_row_are_counted_until_one_has_served_long(
    tmp_path: Path, serves_s: list[float | None], counts: int
) -> None:
    async def run() -> list[int]:
        heard, told = Heard(), list[int]()
        heard.deaf = True
        brief = Brief(0.0, [*serves_s, 61.0])

        async def launch(*about: Any) -> TierProcess:
            process = await brief.launch(*about)
            for after_s in (0.0, 60.5):
                loop.call_later(after_s, lambda: told.append(keeper.short_lives))
            return process

        config = TierConfig(TierId(3), MEMORY, {}, ExtentFiles(tmp_path, 0, 1 << 20))
        keeper = TierKeeper(config, heard, heard, launch=launch)
        await brief.left.wait()
        await keeper.close()
        return told[-2:]

    with contextlib.closing(VirtualTimeLoop()) as loop:
        assert loop.run_until_complete(run()) == [counts, 0]


@short_waits
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
            await until(lambda: heard.launches > 3)
            assert not heard.started
            assert sum("not yet" in line for line in caplog.messages) == 1
            assert "tier below: it does not start: not yet" in caplog.text
            r.sign("open")
            await until(lambda: heard.started)
            assert heard.started[0].exists(r.next_order(), keys(1), soon())
            await until(lambda: heard.answers)
            assert heard.answers[1].end is OrderEnd.ANSWERED


@short_waits
@on_loop
async def test_one_that_can_not_be_noted_does_not_serve_until_it_can() -> None:
    async with tier_rig() as r:
        heard = Heard()
        heard.refusals = 2
        async with kept(r, heard) as keeper:
            await until(lambda: heard.started)
            assert "No space left" in keeper.reason
            assert heard.noted == {heard.started[0].pid: heard.started[0].start_time}


@pytest.mark.parametrize("store", ["hangs_in_opening", "can_not_be_opened"])
@on_loop
async def test_a_keeper_can_be_closed_while_there_is_no_process(store: str) -> None:
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard, BAD + store) as keeper:
            await asyncio.sleep(0.4)
            assert await keeper.close()
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
            process = heard.started[0]
            os.kill(process.pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(process._child, "kill", lambda: None)
                assert not await keeper.close()
                assert list(heard.noted) == [process.pid], "the next owner must know of it"
            process._child.kill()


@short_waits
@on_loop
async def test_orders_of_the_last_process_end_before_the_next_begins() -> None:
    async with tier_rig() as r:
        heard = Heard()
        async with kept(r, heard, BAD + "Hangs"):
            await until(lambda: heard.started)
            first = heard.started[0]
            assert first.exists(r.next_order(), keys(1), soon())
            os.kill(first.pid, signal.SIGSTOP)
            assert first.exists(r.next_order(), keys(1), soon())
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: len(heard.started) == 2)
            assert set(heard.answers) == {1, 2}
            assert not first.exists(r.next_order(), keys(1), soon())
            assert heard.started[1].exists(r.next_order(), keys(1), soon())
            await until(lambda: 4 in heard.answers)
