"""A mover on virtual time: late, in any order, half done, failing, hanging, dying."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.keys import JobId, MoverId, RowId, TransferId
from kvd.mover.facts import MoverFacts
from kvd.mover.layout import LocatedPart, MoverConfig
from kvd.mover.process import Finished, MoverSink
from kvd_proto.board import BoardRecord
from kvd_proto.layout import NULL_ENGINE_BLOCK
from tests.simulation.whole.bytes import ROTTEN, Content, Meanings, PoolBytes, RankBytes
from tests.simulation.whole.loop import SimLoop

FIRST_PID = 4_194_304  # above the largest that Linux gives: never a real process
QUICK_S = 0.01
SLOW_S = 5.0
END_S = 0.05
FACTS = MoverFacts()


@dataclass
class Temper:
    """How badly movers behave: chances, each 0..1."""

    fail: float = 0.05  # a copy ends after some of its blocks
    hang: float = 0.01  # a copy starts and never ends
    slow: float = 0.05  # a copy takes up to 5 s
    halves: float = 0.3  # a copy is seen half done
    full: float = 0.02  # it takes no order
    no_start: float = 0.03
    die: float = 0.01  # it dies as a row is taken from it, or in a copy

    def calm(self) -> None:
        """Faults stop."""
        self.fail = self.hang = self.slow = self.full = self.no_start = self.die = 0.0


@dataclass
class Surroundings:
    """What every mover shares."""

    loop: SimLoop
    random: Random
    temper: Temper
    pool: PoolBytes
    meanings: Meanings
    memories: dict[int, RankBytes] = field(default_factory=dict)  # by memory token
    after_store: Callable[[], None] | None = None  # done once, right after a store's end is told
    news: Callable[[], None] = lambda: None  # a mover or the daemon has ended


@dataclass(eq=False)
class Order:
    """A transfer that the mover was given."""

    transfer: TransferId
    jobs: tuple[JobId, ...]
    kind: JobKind
    blocks: list[tuple[int, int, int, list[int]]]  # group, extent, offset, engine blocks
    sums: list[int] | None
    started: bool = False


@dataclass(eq=False)
class SimMover:
    """Stands in for MoverProcess, and for the process."""

    config: MoverConfig
    sink: MoverSink
    memory: RankBytes
    around: Surroundings
    pid: int
    start_time: int = 1
    facts: MoverFacts = FACTS
    board: deque[BoardRecord] = field(default_factory=deque)
    is_alive: bool = True
    is_heard: bool = True  # its daemon lives
    ring_fd: int = ROTTEN
    board_fd: int = ROTTEN
    event_fd: int = ROTTEN
    pidfd: int = ROTTEN

    def __post_init__(self) -> None:
        self.mover: MoverId = self.config.mover
        self.engine_blocks = tuple(group.num_blocks for group in self.config.groups)
        self.ready: set[JobId] = set()
        self.abandoned: set[int] = set()
        self.orders: dict[TransferId, Order] = {}
        self.extents: dict[RowId, int] = {}
        self.unsaid = 0  # orders that it gave up, and is about to say so

    @property
    def is_behind(self) -> bool:
        """Whether it copies, or has yet to say what became of an order."""
        return bool(self.unsaid) or any(each.started for each in self.orders.values())

    # -- what the daemon orders ---------------------------------------------------------------

    def map_row(self, row: RowId, extent: int) -> None:
        self.extents[row] = extent

    def unmap_row(self, row: RowId) -> None:
        if self.around.random.random() < 5 * self.around.temper.die:
            self.kill()
        self._later(self._unmapped, row)

    def _unmapped(self, row: RowId) -> None:
        if self.is_alive:
            self.extents.pop(row, None)
            self.sink.row_unmapped(self.mover, row)

    async def warm(self, within_s: float) -> bool:
        return True

    def start_transfer(
        self,
        transfer: TransferId,
        jobs: tuple[JobId, ...],
        kind: JobKind,
        parts: Sequence[LocatedPart],
    ) -> bool:
        if not self.is_alive or self.around.random.random() < self.around.temper.full:
            return False
        blocks, sums = [], None
        for part in parts:
            places = zip(
                part.extents.tolist(),
                part.offsets.tolist(),
                part.engine_blocks.tolist(),
                strict=True,
            )
            blocks += [(part.group, extent, offset, row) for extent, offset, row in places]
            if part.checksums is not None:
                sums = [*(sums or []), *part.checksums.tolist()]
        mapped = set(self.extents.values())
        assert all(extent in mapped for _, extent, _, _ in blocks), "an extent that is not mapped"
        self.orders[transfer] = Order(transfer, jobs, kind, blocks, sums)
        self._match()
        return True

    def revoke(self, transfer: TransferId) -> None:
        order = self.orders.get(transfer)
        if order is not None and not order.started:
            del self.orders[transfer]
            self.unsaid += 1
            self._later(self._report, order, Finished(transfer, TransferOutcome.REVOKED))

    def post(
        self, job: JobId, kind: JobKind, status: JobStatus, bytes_copied: int, duration_ns: int
    ) -> None:
        self.board.append(BoardRecord(job, kind, status, bytes_copied, duration_ns))

    def kill(self) -> None:
        """By control or by the world: from now on it does nothing, and control hears of it."""
        if self.is_alive:
            self.is_alive = False
            self.around.news()
            self.around.loop.outside(self.around.random.random() * END_S, self._end)

    def _end(self) -> None:
        if not self.is_heard:
            return
        self.sink.process_ended(self.mover, self.pid)
        self.sink.mover_gone(self.mover, "killed")

    # -- what its worker says -------------------------------------------------------------------

    def mark_ready(self, *jobs: JobId) -> None:
        self.ready.update(jobs)
        self._match()

    # -- what it does ---------------------------------------------------------------------------

    def _later(self, act: Callable[..., None], *args: Any) -> None:
        self.around.loop.outside(self._delay(), act, *args)

    def _delay(self) -> float:
        random = self.around.random
        slow = random.random() < self.around.temper.slow
        return random.random() * (SLOW_S if slow else QUICK_S)

    def _match(self) -> None:
        for order in list(self.orders.values()):
            if self.ready.issuperset(order.jobs) and not order.started:
                order.started = True
                self._begin(order)

    def _begin(self, order: Order) -> None:
        random, temper = self.around.random, self.around.temper
        if random.random() < temper.hang:
            return  # until somebody kills it
        if random.random() < temper.die:
            self.kill()
            return
        fails = random.random() < temper.fail
        first = len(order.blocks)
        if fails or random.random() < temper.halves:
            first = random.randrange(len(order.blocks) + 1)
        if first < len(order.blocks):
            self._later(self._copy_first, order, first, fails)
        else:
            self._later(self._copy_rest, order, 0, fails)

    def _copy_first(self, order: Order, count: int, fails: bool) -> None:
        if not self.is_alive:
            return
        if order.kind is JobKind.STORE or not self._damaged(order):
            for place in range(count):
                self._copy_block(order, place)
        self._later(self._copy_rest, order, count, fails)

    def _copy_rest(self, order: Order, first: int, fails: bool) -> None:
        if not self.is_alive:
            return
        damaged = self._damaged(order)
        given_up = not self.abandoned.isdisjoint(order.jobs)
        outcome = TransferOutcome.DONE
        if fails or damaged or given_up:
            broke = fails or not given_up or order.kind is JobKind.LOAD
            outcome = TransferOutcome.FAILED if broke else TransferOutcome.ABANDONED
        fails = outcome is not TransferOutcome.DONE
        if not fails:
            for place in range(first, len(order.blocks)):
                self._copy_block(order, place)
        del self.orders[order.transfer]
        if order.kind is JobKind.LOAD:
            self._tell_worker(order, JobStatus.FAILED if fails else JobStatus.DONE)
        sums = np.empty(0, dtype=np.uint64)
        if self.config.checksums and order.kind is JobKind.STORE and not fails:
            sums = np.array([self._sum(b) for b in order.blocks], dtype=np.uint64)
        copied = 0 if fails else len(order.blocks)
        wrong = np.array(damaged, dtype=np.uint64)
        self._report(order, Finished(order.transfer, outcome, copied, 1000, sums, wrong))

    def _copy_block(self, order: Order, place: int) -> None:
        group, extent, offset, blocks = order.blocks[place]
        if order.kind is JobKind.STORE:
            # All groups here have full attention, of which only whole blocks may be stored.
            assert NULL_ENGINE_BLOCK not in blocks, "a block is stored that is not whole"
            content = [_kept(self.memory.read(group, block)) for block in blocks]
            self.around.pool.write(extent, offset, content)
            return
        found = self.around.pool.read(extent, offset, len(blocks))
        for block, each in zip(blocks, found, strict=True):
            if block != NULL_ENGINE_BLOCK:
                self.memory.land(order.jobs[0], group, block, _kept(each))

    def _sum(self, block: tuple[int, int, int, list[int]]) -> int:
        _, extent, offset, blocks = block
        return self.around.meanings.sum_of(self.around.pool.read(extent, offset, len(blocks)))

    def _damaged(self, order: Order) -> list[int]:
        """Numbers of a load's slots whose bytes are not those that were stored."""
        if order.kind is JobKind.STORE or order.sums is None:
            return []
        wrong = [n for n, b in enumerate(order.blocks) if self._sum(b) != order.sums[n]]
        for number in wrong:
            _, extent, offset, blocks = order.blocks[number]
            rotten = ROTTEN in self.around.pool.read(extent, offset, len(blocks))
            assert rotten, (
                f"sums of block {number} of job {order.jobs[0]} are not those of its bytes"
            )
        return wrong

    def _tell_worker(self, order: Order, status: JobStatus) -> None:
        self.board.append(BoardRecord(order.jobs[0], order.kind, status, len(order.blocks), 1000))

    def _report(self, order: Order, finished: Finished) -> None:
        if finished.outcome is TransferOutcome.REVOKED:
            self.unsaid -= 1
        if self.is_alive:
            if order.kind is JobKind.LOAD and finished.outcome is TransferOutcome.REVOKED:
                self._tell_worker(order, JobStatus.FAILED)
            self.sink.transfer_finished(self.mover, finished)
            then = self.around.after_store
            if then is not None and order.kind is JobKind.STORE:
                self.around.after_store = None
                then()


def _kept(content: Content) -> Content:
    """A copy: what is written later elsewhere does not change it."""
    return dict(content) if isinstance(content, dict) else content
