"""Control's side of one tier: starts its process, orders, and answers for it when it is gone."""

from __future__ import annotations

import asyncio
import enum
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvd.core.keys import RowId, TierId
from kvd.core.model.tiers import TenantShare
from kvd.processes.framing import BadFrame, frame, pack_number, unpack_number
from kvd.processes.launch import how_it_ended, launch
from kvd.processes.parent import OwnedProcess, ProcessStartError
from kvd.tiers import frames
from kvd.tiers.frames import (
    COPIES,
    Order,
    OrderEnd,
    OrderId,
    PlacedBlocks,
    ProcessReason,
    ScopedKeys,
    TierAnswer,
    TierConfig,
    TierFrame,
    TierLeft,
    TierRefusal,
)
from kvd.tiers.kinds import OPEN_DISK
from kvd.tiers.store import Found, TierUsage

__all__ = [
    "OrderEnd",
    "OrderId",
    "PlacedBlocks",
    "ProcessReason",
    "QueueBounds",
    "ScopedKeys",
    "TierAnswer",
    "TierConfig",
    "TierId",
    "TierLeft",
    "TierProcess",
    "TierRefused",
    "TierSink",
    "TierStartError",
]

START_S = 60.0  # a store may wait for a server
START_DISK_S = 600.0  # a disk's reads its index, of a hundred million blocks maybe
# What one tier may owe one tenant that asks it alone, unless the site says less.
MAX_KEYS_QUEUED = 65_536  # and scopes
MAX_READS_QUEUED = 8_192  # blocks
MAX_WRITES_QUEUED = 8_192  # blocks
# How long after its deadline a call may still return. Then its process is ended.
LATE_S = 5.0
UNMAP_S = 3.0  # to unmap a row that no copy uses: somebody waits for its memory
LOOK_AGAIN_S = 0.25  # before that, lest control itself was late and its answer is here already
USAGE_S = 1.0  # between two looks at how a tier fares
NOTES_S = 10.0  # likewise while it has notes, and nothing is asked of it
LEFT_S = 0.02  # between two questions what has left its store


TENANTS_BOUNDS = 2  # times what a tier may owe one tenant that asks it alone: what it may owe all


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What a tenant that asks a tier alone may have it owe: keys, and blocks of each kind.

    All tenants have TENANTS_BOUNDS times as much, each at most as much as it leaves the others.
    """

    keys: int = MAX_KEYS_QUEUED
    reads: int = MAX_READS_QUEUED
    writes: int = MAX_WRITES_QUEUED

    def of(self, lane: TierFrame) -> int:
        """The bound that holds for orders of this kind."""
        return {TierFrame.READ: self.reads, TierFrame.WRITE: self.writes}.get(lane, self.keys)


class TierStartError(ProcessStartError):
    """The tier's process could not be started, or ended or hung before it said hello."""


class TierRefused(TierStartError):
    """The store can't be opened as the site configured it."""

    def __init__(self, refusal: TierRefusal) -> None:
        super().__init__(refusal.message)
        self.reason = refusal.reason
        self.field = refusal.field


class TierSink(Protocol):
    """Hears what a tier's process says. Called on the event loop, never from within a call to the
    process, but for `process_started`."""

    def process_started(self, tier: TierId, pid: int, start_time: int) -> None:
        """There is a process, which maps nothing before this returns. OSError ends the start."""

    def process_ended(self, tier: TierId, pid: int) -> None:
        """The process is gone, whether or not it ever served. Once for each that started."""

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:
        """An order that was taken has ended. Once for each; of a copy nothing runs any more."""

    def row_unmapped(self, tier: TierId, row: RowId) -> None:
        """The process has unmapped a row. Once for each order to do so."""

    def usage_told(self, tier: TierId, usage: TierUsage) -> None:
        """How the store fares has changed."""

    def left_told(self, tier: TierId, left: TierLeft) -> None:
        """Blocks have left the store by themselves. Before any answer that comes later."""

    def tier_gone(self, tier: TierId, reason: str) -> None:
        """One that served has ended, after all else that it or `order_ended` says. Once."""


class OrderState(enum.Enum):
    """How far an order has come, as control knows it."""

    OPEN = "it may still be answered in time"
    LATE = "its deadline passed: a question was answered by control, a copy waits for its end"


@dataclass(slots=True, eq=False)
class _Given:
    """An order that the process has and did not answer."""

    order: Order
    timer: asyncio.TimerHandle | None = None
    state: OrderState = OrderState.OPEN


class TierProcess(OwnedProcess):
    """One tier's process. Lives on the event loop; nothing here blocks.

    Each order that is taken ends in one `order_ended`. Questions and deletes end at their deadline
    at the latest. A copy ends when nothing of it can run any more, however long that takes: its
    process is ended `late_s` after the deadline, and gone only when the kernel says so.
    """

    title = "tier"
    kinds = TierFrame
    start_error = TierStartError

    def __init__(self, config: TierConfig, sink: TierSink, bounds: QueueBounds) -> None:
        super().__init__()
        self.tier = config.tier
        self.mounts: tuple[str, ...] = ()  # points that its store lies below
        self._wants_sums = config.checksums
        self.late_s = LATE_S
        self._sink = sink
        self._bounds = bounds
        self._given: dict[OrderId, _Given] = {}
        self._queued = {lane: TenantShare() for lane in _LANES}  # keys or blocks
        self._unmapping: dict[RowId, asyncio.TimerHandle] = {}
        self._usages_due = 0  # at most: one is being told, and one is asked for
        self._next_look = 0.0  # at the usage
        self._look: asyncio.TimerHandle | None = None
        self._look_at_notes: asyncio.TimerHandle | None = None
        self._names_left = False  # the store names what leaves it
        self._left_asked = False
        self._next_left = 0.0
        self._look_left: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls, config: TierConfig, sink: TierSink, bounds: QueueBounds | None = None
    ) -> TierProcess:
        """Start the process and return once its store is open.

        Raises TierRefused with the field that is to change, or TierStartError; nothing is left
        then, and the sink hears of no tier that is gone.
        """
        process = cls(config, sink, bounds or QueueBounds())
        # It sees no GPU: a library of its store's might make a context there.
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        within_s = START_DISK_S if config.store == OPEN_DISK else START_S
        await process._start(
            lambda: launch("kvd.tiers", (), environment),
            lambda: frame(TierFrame.CONFIGURE, frames.pack_config(config)),
            within_s,
        )
        process._ask_usage()
        return process

    # -- orders -----------------------------------------------------------------------------
    # Each is taken, or refused at once with False: as much is queued as may be, or the process is
    # ending. One order always fits where its tenant has none. `deadline` is seconds of
    # time.monotonic(); `tenant` is whose the blocks are: tenants take turns.

    def exists(
        self, order: OrderId, keys: Sequence[ScopedKeys], deadline: float, tenant: str = ""
    ) -> bool:
        """Ask which of these keys are there."""
        return self._give(Order(order, TierFrame.EXISTS, deadline, tuple(keys), tenant=tenant))

    def read(
        self, order: OrderId, blocks: Sequence[PlacedBlocks], deadline: float, tenant: str = ""
    ) -> bool:
        """Have slots filled with these blocks' bytes; nobody else may use them until it ended."""
        return self._give(Order(order, TierFrame.READ, deadline, tuple(blocks), tenant=tenant))

    def write(
        self,
        order: OrderId,
        blocks: Sequence[PlacedBlocks],
        deadline: float,
        tenant: str = "",
        *,
        again: bool = False,
    ) -> bool:
        """Have these blocks kept; their slots are left alone until it ended.

        `again`: they are likely there.
        """
        return self._give(Order(order, TierFrame.WRITE, deadline, tuple(blocks), again, tenant))

    def delete_scopes(self, order: OrderId, scopes: Sequence[bytes], deadline: float) -> bool:
        """Have every block of scopes that begin with one of these forgotten.

        Also those of writes that were ordered before.
        """
        return self._give(Order(order, TierFrame.DELETE_SCOPES, deadline, tuple(scopes)))

    def unmap_row(self, row: RowId, extents: Sequence[int]) -> bool:
        """Have a row's extents unmapped once no copy uses them; answered by row_unmapped.

        Copies of it that come before that answer never start. False: the process is gone, and
        nothing of it is mapped.
        """
        if self._gone.done():
            return False
        assert row not in self._unmapping, "a row is unmapped twice"
        copies = [order for order, given in self._given.items() if given.order.kind in COPIES]
        self._await_unmapped(row, copies)
        self._write(TierFrame.UNMAP_ROW, frames.pack_row(row, extents))
        return True

    @property
    def ending(self) -> bool:
        """Whether it is gone, or was told to go: it may wait for a disk, and takes no orders."""
        if self._reason or self._how_ended:
            return True
        return self._transport is None or self._transport.is_closing()

    @property
    def why_ending(self) -> str:
        """Why it was told to go; "" where it was not, or nobody knows."""
        return self._reason

    def _give(self, order: Order) -> bool:
        assert order.order not in self._given, "two open orders have one number"
        frames.require_order(order)
        lane = _lane(order)
        if self.ending:
            return False
        most = TENANTS_BOUNDS * self._bounds.of(lane)
        if not self._queued[lane].fits(order.tenant, most, order.count):
            return False
        self._write(order.kind, frames.pack_order(order))
        given = self._given[order.order] = _Given(order)
        left_s = max(0.0, order.deadline - time.monotonic())
        given.timer = self._loop.call_later(left_s, self._pass_deadline, given)
        self._queued[lane].count(order.tenant, order.count)
        return True

    # -- deadlines --------------------------------------------------------------------------

    def _pass_deadline(self, given: _Given) -> None:
        given.state = OrderState.LATE
        self._write(TierFrame.CALL_OFF, pack_number(given.order.order))
        given.timer = self._loop.call_later(self.late_s, self._look_again, given)
        if given.order.kind not in COPIES:
            self._tell(TierAnswer(given.order.order, OrderEnd.FAILED, reason=ProcessReason.LATE))

    def _look_again(self, given: _Given) -> None:
        given.timer = self._loop.call_later(LOOK_AGAIN_S, self._give_up, given)

    def _give_up(self, given: _Given) -> None:
        kind = given.order.kind.name.lower().replace("_", " ")
        self.end_because(
            f"{kind} of {given.order.count} did not end within {self.late_s:g} s of its deadline"
        )

    def _await_unmapped(self, row: RowId, copies: Sequence[OrderId]) -> None:
        """End the process where it does not answer though these, which may use the row, ended."""
        left = [order for order in copies if order in self._given]
        later, *told = (self._await_unmapped, row, left) if copies else (self._look_for_row, row)
        self._unmapping[row] = self._loop.call_later(UNMAP_S, later, *told)

    def _look_for_row(self, row: RowId) -> None:
        reason = f"a row that nothing used was not unmapped within {UNMAP_S:g} s"
        self._unmapping[row] = self._loop.call_later(LOOK_AGAIN_S, self.end_because, reason)

    # -- what the process says --------------------------------------------------------------

    def hear(self, kind: enum.IntEnum, body: bytes) -> None:
        """One frame of the process."""
        match kind:
            case TierFrame.HELLO if not self._hello.done():
                hello = frames.unpack_hello(body)
                self._names_left, self.mounts = hello.names_left, hello.mounts
                self._hello.set_result(None)
            case TierFrame.REFUSED if not self._hello.done():
                self._hello.set_exception(TierRefused(frames.unpack_refusal(body)))
            case TierFrame.ANSWER:
                self._hear_answer(frames.unpack_answer(body))
            case TierFrame.USAGE if self._usages_due:
                self._usages_due -= 1
                usage = frames.unpack_usage(body)
                self._sink.usage_told(self.tier, usage)
                if usage.notes:
                    self._look_at_notes_later()
            case TierFrame.ROW_UNMAPPED:
                row = RowId(unpack_number(body))
                if row not in self._unmapping:
                    raise BadFrame(f"row {row} was not to be unmapped")
                self._unmapping.pop(row).cancel()
                self._sink.row_unmapped(self.tier, row)
            case TierFrame.LEFT if self._left_asked:
                self._hear_left(frames.unpack_left(body))
            case TierFrame.LEAVING:
                self._reason = self._reason or frames.unpack_text(body)  # it may be gone already
                self.end_because(self._reason)  # lest it says so and stays
            case _:
                raise BadFrame(f"{kind.name} at the wrong time")

    def _hear_answer(self, answer: TierAnswer) -> None:
        given = self._given.get(answer.order)
        if given is None:
            raise BadFrame(f"an answer to order {answer.order}, which is not open")
        _require_possible(answer, given.order)
        _require_sums(answer, given.order, wanted=self._wants_sums)
        self._end_order(given, answer)
        self._look_at_usage()
        self._look_at_left()

    def _end_order(self, given: _Given, answer: TierAnswer) -> None:
        order = given.order
        del self._given[order.order]
        self._queued[_lane(order)].count(order.tenant, -order.count)
        if given.timer is not None:
            given.timer.cancel()
        if given.state is OrderState.OPEN or order.kind in COPIES:
            self._tell(answer)

    def _tell(self, answer: TierAnswer) -> None:
        self._sink.order_ended(self.tier, answer)

    # -- how it fares -----------------------------------------------------------------------

    def _look_at_usage(self) -> None:
        if self._look is None:
            self._look = self._loop.call_at(
                max(self._next_look, self._loop.time()), self._ask_usage
            )

    def _ask_usage(self) -> None:
        self._look = None
        self._usages_due = min(2, self._usages_due + 1)
        self._next_look = self._loop.time() + USAGE_S
        self._write(TierFrame.ASK_USAGE)

    def _look_at_notes_later(self) -> None:
        """Notes pass, also where no answer has it looked how the tier fares."""
        if self._look_at_notes is None and not self.ending:
            self._look_at_notes = self._loop.call_later(NOTES_S, self._notes_are_old)

    def _notes_are_old(self) -> None:
        self._look_at_notes = None
        self._look_at_usage()

    # -- what has left ----------------------------------------------------------------------

    def _look_at_left(self) -> None:
        """Ask what has left, not more often than what is told of may cost."""
        if self._names_left and self._look_left is None and not self._left_asked:
            due = max(self._next_left, self._loop.time())
            self._look_left = self._loop.call_at(due, self._ask_left)

    def _ask_left(self) -> None:
        self._look_left = None
        self._left_asked = True
        self._write(TierFrame.TELL_LEFT)

    def _hear_left(self, left: TierLeft) -> None:
        self._left_asked = False
        self._next_left = self._loop.time() + LEFT_S
        if left.parts or left.in_doubt:
            self._sink.left_told(self.tier, left)
        if left.more:
            self._look_at_left()

    # -- life -------------------------------------------------------------------------------

    def _note_start(self) -> None:
        self._sink.process_started(self.tier, self.pid, self.start_time)

    def _note_end(self) -> None:
        self._sink.process_ended(self.tier, self.pid)

    def _tell_gone(self, reason: str) -> None:
        for given in list(self._given.values()):
            failed = TierAnswer(given.order.order, OrderEnd.FAILED, reason=ProcessReason.TIER_GONE)
            self._end_order(given, failed)
        for row, timer in self._unmapping.items():
            timer.cancel()
            self._sink.row_unmapped(self.tier, row)
        self._unmapping.clear()
        self._sink.tier_gone(self.tier, reason)

    def _how_it_ended(self, status: int) -> str:
        reason = how_it_ended(status)
        if -status == signal.SIGKILL:  # a mover's worker may, here only the kernel or an operator
            reason += ", perhaps for want of memory"
        return reason

    def _ask_to_stop(self) -> None:
        self._write(TierFrame.STOP)

    def _let_go(self) -> None:
        for timer in (self._look, self._look_left, self._look_at_notes):
            if timer is not None:
                timer.cancel()
        self._look = self._look_left = self._look_at_notes = None


_LANES = (TierFrame.EXISTS, TierFrame.READ, TierFrame.WRITE)


def _lane(order: Order) -> TierFrame:
    """Of which bound it takes: of the keys' where it is no copy."""
    return order.kind if order.kind in COPIES else TierFrame.EXISTS


def _require_possible(answer: TierAnswer, order: Order) -> None:
    """BadFrame where it is no answer to this order."""
    values = answer.values
    if answer.end is not OrderEnd.ANSWERED or order.kind is TierFrame.DELETE_SCOPES:
        if len(values):
            raise BadFrame(f"{len(values)} values of an order that has none")
        return
    if len(values) != order.count:
        raise BadFrame(f"{len(values)} values of an order of {order.count}")
    possible = frames.OUTCOMES[order.kind] if order.kind in COPIES else tuple(Found)
    said = np.flatnonzero(np.bincount(values)).tolist()
    if not set(said) <= set(map(int, possible)):
        raise BadFrame(f"values {said} of {order.kind.name}")


def _require_sums(answer: TierAnswer, order: Order, *, wanted: bool) -> None:
    """BadFrame where not as many sums came as are wanted: a block without would prove nothing."""
    due = 0
    if wanted and order.kind is TierFrame.READ and answer.end is OrderEnd.ANSWERED:
        due = frames.count_parts(order)
    if len(answer.sums) != due:
        raise BadFrame(f"{len(answer.sums)} sums of an order of {due} parts")
