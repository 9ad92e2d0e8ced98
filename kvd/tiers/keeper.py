"""Keeps one tier's process alive: starts it, and again, later and later, when it has ended."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from kvd.core.keys import RowId, TierId
from kvd.core.lifecycle import step
from kvd.processes.parent import ProcessStartError
from kvd.tiers.process import (
    QueueBounds,
    TierAnswer,
    TierConfig,
    TierLeft,
    TierProcess,
    TierSink,
)
from kvd.tiers.store import TierUsage

log = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0  # before the first new start; then twice as long, and so on
LONGEST_WAIT_S = 60.0  # who has served so long is started again at once, as it were for the first
SLOW_START_S = 10.0  # then the log says that a process has yet to serve
CLOSE_S = 5.0  # for a process to end when the daemon does
TierLauncher = Callable[[TierConfig, TierSink, QueueBounds], Awaitable[TierProcess]]


class KeeperStage(enum.Enum):
    """What the keeper of a tier does now."""

    STARTING = "a process begins"
    SERVING = "a process serves"
    WAITING = "the last one ended, or could not begin; another is started after a while"
    CLOSED = "there is no process, and none is started"


KEEPER_STEPS: frozenset[tuple[KeeperStage, KeeperStage]] = frozenset(
    {
        (KeeperStage.STARTING, KeeperStage.SERVING),
        (KeeperStage.STARTING, KeeperStage.WAITING),
        (KeeperStage.SERVING, KeeperStage.WAITING),
        (KeeperStage.WAITING, KeeperStage.STARTING),
        (KeeperStage.STARTING, KeeperStage.CLOSED),
        (KeeperStage.WAITING, KeeperStage.CLOSED),
    }
)


class ProcessRecords(Protocol):
    """Where the pool's next owner finds who may still write into its extents: the pool."""

    def record_mover(self, pid: int, start_time: int) -> None:
        """Before the process maps anything. OSError: it can't be noted, and must not serve."""

    def forget_mover(self, pid: int) -> None:
        """The process has ended."""


class TierListener(Protocol):
    """Hears of one tier, by whatever process. Called on the event loop."""

    def tier_started(self, tier: TierId, process: TierProcess) -> None:
        """There is a process, and it takes orders."""

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:
        """As TierSink says."""

    def row_unmapped(self, tier: TierId, row: RowId) -> None:
        """As TierSink says."""

    def usage_told(self, tier: TierId, usage: TierUsage) -> None:
        """As TierSink says."""

    def left_told(self, tier: TierId, left: TierLeft) -> None:
        """As TierSink says."""

    def tier_gone(self, tier: TierId, reason: str) -> None:
        """The process has ended, last of all that is told of it. Another may start."""


class TierKeeper:
    """One tier over its processes' lives. Lives on the event loop; is its processes' sink.

    Never are there two processes of a tier: another begins only when the kernel has said that the
    last one is gone, since both would use the same store.
    """

    def __init__(
        self,
        config: TierConfig,
        records: ProcessRecords,
        listener: TierListener,
        bounds: QueueBounds | None = None,
        launch: TierLauncher = TierProcess.start,
    ) -> None:
        self.stage = KeeperStage.STARTING
        self.reason = ""  # why there is none, or was none before this one
        self.process: TierProcess | None = None
        self._short_lives = 0  # of the processes before this one, since one that served long
        self._served_since = 0.0  # by the loop's time
        self._config = config
        self._records = records
        self._listener = listener
        self._bounds = bounds or QueueBounds()
        self._launch = launch
        self._ended: asyncio.Future[None] | None = None  # of the process that serves
        self._starting = 0  # pid of one that has yet to serve, or to end
        self._task = asyncio.get_running_loop().create_task(self._keep())
        # What breaks it must be heard of now, not when it is collected.
        self._task.add_done_callback(lambda task: task.cancelled() or task.result())

    async def close(self) -> bool:
        """End the process, and start no other; returns when it is gone.

        False: the kernel does not end it in time, as where it waits for a disk. It stays noted for
        the pool's next owner.
        """
        self._task.cancel()
        stopping: set[asyncio.Future[None]] = {self._task}
        if self.process is not None:
            stopping.add(asyncio.ensure_future(self.process.stop()))
        _, left = await asyncio.wait(stopping, timeout=CLOSE_S)
        if left:
            log.warning("%s: its process can't be ended now", self._config.title)
            return False
        if self.stage is not KeeperStage.CLOSED:
            self.stage = step(KEEPER_STEPS, self.stage, KeeperStage.CLOSED)
        return True

    @property
    def is_ending(self) -> bool:
        """Whether there is a process that takes no orders: it was told to end, and has yet to."""
        return self.process is not None and self.process.ending

    @property
    def problem(self) -> str:
        """Why nothing serves the tier, or why nothing did before this process."""
        if self.process is not None and self.is_ending:
            return f"its process has yet to end: {self.process.why_ending}"
        return self._yet_to_serve if self._starting else self.reason

    @property
    def short_lives(self) -> int:
        """How many processes in a row ended soon or never served; 0 while one has served long."""
        return 0 if self.process is not None and self._has_served_long() else self._short_lives

    def _has_served_long(self) -> bool:
        return asyncio.get_running_loop().time() - self._served_since >= LONGEST_WAIT_S

    @property
    def _yet_to_serve(self) -> str:
        """It may read a large index, or hang in the kernel, where nobody can end it."""
        why = f"its process (pid {self._starting}) has yet to open its store"
        return f"{why}; before, {self.reason}" if self.reason else why

    async def _keep(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            await self._serve()
            if not self._short_lives:
                wait_s = FIRST_WAIT_S
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            self.stage = step(KEEPER_STEPS, self.stage, KeeperStage.STARTING)

    async def _serve(self) -> None:
        """One process, from its start to its end."""
        self._ended = None
        slow = asyncio.get_running_loop().call_later(SLOW_START_S, self._say_slow_start)
        try:
            process = await self._launch(self._config, self, self._bounds)
        except ProcessStartError as error:
            self._short_lives += 1
            self._wait_after(f"it does not start: {error}")
            return
        finally:
            slow.cancel()
            self._starting = 0
        self._config = replace(self._config, mounts=process.mounts)
        self._served_since = asyncio.get_running_loop().time()  # how long it took to start is not
        self._ended = asyncio.get_running_loop().create_future()
        self.process = process
        self.stage = step(KEEPER_STEPS, self.stage, KeeperStage.SERVING)
        log.info("%s serves (pid %d)", self._config.title, process.pid)
        self._listener.tier_started(self._config.tier, process)
        await asyncio.shield(self._ended)

    def _say_slow_start(self) -> None:
        log.warning("%s: %s", self._config.title, self._yet_to_serve)

    def _wait_after(self, reason: str) -> None:
        served = self.stage is KeeperStage.SERVING
        known = reason == self.reason and not served  # said at an earlier try
        said = log.debug if known or self._task.done() else log.warning  # done: it is wanted
        said("%s: %s", self._config.title, reason)
        self.reason = reason
        self.stage = step(KEEPER_STEPS, self.stage, KeeperStage.WAITING)

    # -- what its process says (TierSink) -----------------------------------------------------

    def process_started(self, tier: TierId, pid: int, start_time: int) -> None:  # noqa: ARG002
        """Note it for the pool's next owner, or let it not begin."""
        self._records.record_mover(pid, start_time)
        self._starting = pid

    def process_ended(self, tier: TierId, pid: int) -> None:  # noqa: ARG002
        """Nobody has to end it any more."""
        try:
            self._records.forget_mover(pid)
        except OSError:  # the next owner looks at the process and finds that it is another
            log.exception("%s (pid %d) ended and stays noted", self._config.title, pid)

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:
        self._listener.order_ended(tier, answer)

    def row_unmapped(self, tier: TierId, row: RowId) -> None:
        self._listener.row_unmapped(tier, row)

    def usage_told(self, tier: TierId, usage: TierUsage) -> None:
        self._listener.usage_told(tier, usage)

    def left_told(self, tier: TierId, left: TierLeft) -> None:
        self._listener.left_told(tier, left)

    def tier_gone(self, tier: TierId, reason: str) -> None:
        self.process = None
        self._short_lives = 0 if self._has_served_long() else self._short_lives + 1
        self._wait_after(f"its process ended: {reason}")
        try:
            self._listener.tier_gone(tier, reason)
        finally:
            if self._ended is not None and not self._ended.done():
                self._ended.set_result(None)
