"""Orders of one tier from control's word to their end, and which a free thread takes next.

Questions come before reads, reads before writes. Beyond that, writes leave room, and deletes: one
kind never takes all the calls that a store takes at once while another may come. So a read waits
for no write or delete where a store takes two calls, and a question for neither, nor for a read,
where it takes three.

Of each kind, tenants take one in turn. Where a store takes four calls, one tenant never has them
all, and what it may have is shared among its kinds likewise: who asks little waits for no call of
somebody who asks much.

First comes a kind of which none runs, of a tenant that has no call: however many tenants ask
without end, another's read has its turn, and its write.

Nor does a kind wait for ever for those before it, though it be the same tenant's: reads have their
turn after some rounds of all calls, and writes and deletes have theirs.

A delete waits for the writes that were ordered before it, running ones too: what it deletes is not
written again by them.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvd.core.in_turn import InTurn
from kvd.core.lifecycle import step
from kvd.tiers.frames import Order, OrderId, TierFrame

PATIENT_ROUNDS = 4  # calls for each that a store takes at once, while a kind waits for its turn


class WorkState(enum.Enum):
    """How far an order has come in the tier's process."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


WORK_STEPS: frozenset[tuple[WorkState, WorkState]] = frozenset(
    {
        (WorkState.QUEUED, WorkState.RUNNING),
        (WorkState.QUEUED, WorkState.ENDED),
        (WorkState.RUNNING, WorkState.ENDED),
    }
)


@dataclass(slots=True, eq=False)
class Work:
    """One order and how far it has come. `extents`: what it keeps mapped."""

    order: Order
    extents: frozenset[int] = frozenset()
    state: WorkState = WorkState.QUEUED


class CallRoom:
    """So many calls, of how many kinds they run, and which may yet begin."""

    def __init__(self, calls: int) -> None:
        self._most = calls
        self._most_copies = calls - 1 if calls > 2 else calls
        self._most_writes = max(1, self._most_copies - 1)
        self._running: Counter[TierFrame] = Counter()

    def has(self, kind: TierFrame) -> bool:
        """Whether one of this kind may begin."""
        if kind is TierFrame.EXISTS:
            return self._running.total() < self._most
        others = self._running.total() - self._running[TierFrame.EXISTS]
        if self._running.total() >= self._most or others >= self._most_copies:
            return False
        changes = others - self._running[TierFrame.READ]
        return kind is TierFrame.READ or changes < self._most_writes

    def lacks(self, kind: TierFrame) -> bool:
        """Likewise, and none of this kind runs."""
        return not self._running[kind] and self.has(kind)

    def count(self, kind: TierFrame, change: int) -> None:
        """One begins (1), or has ended (-1)."""
        self._running[kind] += change

    @property
    def writes(self) -> int:
        """That run."""
        return self._running[TierFrame.WRITE]

    @property
    def is_empty(self) -> bool:
        """Whether none runs."""
        return not self._running.total()


class TenantLanes:
    """Orders of one kind that wait: of each tenant the first come first, and tenants in turn."""

    def __init__(self) -> None:
        self._waiting: InTurn[str, Work] = InTurn()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, work: Work) -> None:
        """One is there."""
        self._waiting.add(work.order.tenant, [work])

    def remove(self, work: Work) -> None:
        """One is taken back."""
        self._waiting.remove(work.order.tenant, work)

    def __contains__(self, work: Work) -> bool:
        return self._waiting.has(work.order.tenant, work)

    def next(self, may: Callable[[str], bool]) -> Work | None:
        """The next one, of a tenant that may. None: there is none."""
        taken = self._waiting.take(may)
        return None if taken is None else taken[1]


class ChangeLanes:
    """Writes and deletes that wait. No write passes a delete, or is passed by one."""

    def __init__(self) -> None:
        self._parts: deque[TenantLanes | Work] = deque()  # writes without a delete between; deletes

    def __bool__(self) -> bool:
        return bool(self._parts)

    def append(self, work: Work) -> None:
        """One is there."""
        if work.order.kind is not TierFrame.WRITE:
            self._parts.append(work)
            return
        if not self._parts or isinstance(self._parts[-1], Work):
            self._parts.append(TenantLanes())
        last = self._parts[-1]
        assert isinstance(last, TenantLanes), "it was just added"
        last.append(work)

    def remove(self, work: Work) -> None:
        """One is taken back."""
        if work.order.kind is not TierFrame.WRITE:
            self._parts.remove(work)
            return
        part = next(p for p in self._parts if isinstance(p, TenantLanes) and work in p)
        part.remove(work)
        if not part:
            self._parts.remove(part)

    @property
    def kind(self) -> TierFrame:
        """What comes next: writes, or a delete."""
        first = self._parts[0] if self._parts else None
        return first.order.kind if isinstance(first, Work) else TierFrame.WRITE

    def next(self, may: Callable[[str], bool], *, writes: int) -> Work | None:
        """The next one, of a tenant that may, while so many writes run. None: there is none."""
        if not self._parts:
            return None
        first = self._parts[0]
        if isinstance(first, Work):
            if writes or not may(first.order.tenant):
                return None
            self._parts.popleft()
            return first
        work = first.next(may)
        if not first:
            self._parts.popleft()
        return work


class Lanes:
    """The orders that wait and run. Any thread; the sender of orders bounds how many there are."""

    def __init__(self, calls: int) -> None:
        self._room = CallRoom(calls)
        self._calls_of_one = calls - 1 if calls > 3 else calls
        self._rooms: dict[str, CallRoom] = {}  # of tenants that have some running
        self._open: dict[OrderId, Work] = {}
        self._questions = TenantLanes()
        self._reads = TenantLanes()
        self._changes = ChangeLanes()
        self._patience = PATIENT_ROUNDS * calls
        self._reads_waited = self._changes_waited = 0  # calls that began since such had their turn
        self._closed = False
        self._changed = threading.Condition()

    def put(self, work: Work) -> None:
        """An order is there."""
        with self._changed:
            assert work.order.order not in self._open, "an order came twice"
            self._open[work.order.order] = work
            self._lane(work).append(work)
            self._changed.notify()

    def take(self) -> Work | None:
        """Wait for the next order that may run now; it does from here on. None: closed."""
        with self._changed:
            while not self._closed:
                work = self.take_now()
                if work is not None:
                    return work
                self._changed.wait()
            return None

    def take_now(self) -> Work | None:
        """Likewise, without waiting. None: none may run now."""
        with self._changed:
            work = self._next()
            if work is not None:
                work.state = step(WORK_STEPS, work.state, WorkState.RUNNING)
                self._count(work.order, 1)
            return work

    def end(self, work: Work) -> None:
        """One that ran has ended."""
        with self._changed:
            work.state = step(WORK_STEPS, work.state, WorkState.ENDED)
            del self._open[work.order.order]
            self._count(work.order, -1)
            # Its end may let one of each lane run, and whoever waits can't know which.
            self._changed.notify_all()

    def withdraw(self, order: OrderId) -> Work | None:
        """Take an order back that has not started; None when it's too late."""
        with self._changed:
            work = self._open.get(order)
            if work is None or work.state is not WorkState.QUEUED:
                return None
            work.state = step(WORK_STEPS, work.state, WorkState.ENDED)
            del self._open[order]
            self._lane(work).remove(work)
            self._changed.notify_all()  # a delete may have waited for it, or others for a delete
            return work

    def close(self) -> None:
        """Send the threads home; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _lane(self, work: Work) -> TenantLanes | ChangeLanes:
        match work.order.kind:
            case TierFrame.EXISTS:
                return self._questions
            case TierFrame.READ:
                return self._reads
            case _:
                return self._changes

    def _count(self, order: Order, change: int) -> None:
        self._room.count(order.kind, change)
        room = self._rooms.setdefault(order.tenant, CallRoom(self._calls_of_one))
        room.count(order.kind, change)
        if room.is_empty:
            del self._rooms[order.tenant]

    def _may(self, kind: TierFrame, tenant: str) -> bool:
        """Whether one more of the tenant's may run."""
        room = self._rooms.get(tenant)
        return room is None or room.has(kind)

    def _is_idle(self, _kind: TierFrame, tenant: str) -> bool:
        return tenant not in self._rooms

    def _next(self) -> Work | None:
        overdue = self._overdue()
        due = overdue or self._next_of(self._room.lacks, self._is_idle)
        work = due or self._next_of(self._room.has, self._may)
        if work is not None:
            self._reads_waited = self._reads_waited + 1 if self._reads else 0
            self._changes_waited = self._changes_waited + 1 if self._changes else 0
        return work

    def _overdue(self) -> Work | None:
        """The next of a kind for which enough others began; its turn is over then."""
        if self._changes_waited >= self._patience:
            work = self._next_change(self._room.has, self._may)
            if work is not None:
                self._changes_waited = 0
                return work
        if self._reads_waited >= self._patience and self._room.has(TierFrame.READ):
            work = self._reads.next(partial(self._may, TierFrame.READ))
            if work is not None:
                self._reads_waited = 0
                return work
        return None

    def _next_of(
        self, has_room: Callable[[TierFrame], bool], may: Callable[[TierFrame, str], bool]
    ) -> Work | None:
        """Of a kind that has room: else all tenants that wait would be looked at in vain."""
        for kind, lanes in ((TierFrame.EXISTS, self._questions), (TierFrame.READ, self._reads)):
            if has_room(kind) and (work := lanes.next(partial(may, kind))) is not None:
                return work
        return self._next_change(has_room, may)

    def _next_change(
        self, has_room: Callable[[TierFrame], bool], may: Callable[[TierFrame, str], bool]
    ) -> Work | None:
        kind = self._changes.kind
        if not has_room(kind):
            return None
        return self._changes.next(partial(may, kind), writes=self._room.writes)
