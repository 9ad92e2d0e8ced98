"""An engine of one rank before the daemon's core, for a replay: a mover's copies end at once.

With device memory it looks up what that lacks. It then stores eagerly, which is all that a
request computed and the daemon lacks; or lazily, which is what leaves the device, and of this what
the daemon has becomes young there: its last use was the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvd.cli.replay.device import LAZY, DeviceMemory, StoreRule
from kvd.cli.replay.tiers import ReplayTiers
from kvd.cli.replay.trace import BlockIds, TraceRequest
from kvd.core import actions, events
from kvd.core.blocks.reading import locate
from kvd.core.keys import (
    JobId,
    KeyBatch,
    LeaseId,
    MoverId,
    RequestId,
    SessionId,
    TenantId,
    TierId,
)
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.index import NOWHERE
from kvd.core.model.reuse import ReuseCurve
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.runtime.probes import native_probes
from kvd_proto.groups import GroupKind
from kvd_proto.key_status import HIT, PENDING, STATUS_BITS
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE

BLOCK_BYTES = 4096  # the smallest that fills a slot; no byte of it exists
HASH_BYTES = 8
TRACKER_BLOCKS = 65536
NS_PER_MS = 1_000_000
_TICK = 250 * NS_PER_MS  # as in the daemon
_REST = 180_000 * NS_PER_MS  # with the tiers' longest deadline: then nothing is due any more

_SESSION = SessionId(1)
_MOVER = MoverId(1)

Statuses = np.ndarray[tuple[int], np.dtype[np.uint8]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class ReplayEngine:
    """Runs requests through a core with a pool of so many blocks, and with these tiers below."""

    def __init__(
        self,
        policy: str,
        capacity_blocks: int,
        rule: StoreRule,
        below: ReplayTiers | None = None,
    ) -> None:
        self._device = DeviceMemory(rule.device_blocks) if rule.device_blocks else None
        self._is_lazy = rule.store == LAZY
        self._below = below if below is not None else ReplayTiers((), BLOCK_BYTES)
        block_bytes = self._block_bytes = self._below.block_bytes
        group = GroupSpec(GroupKind.FULL_ATTENTION, 1, (block_bytes,))
        spec = NamespaceSpec("replay", TenantId("replay"), HASH_BYTES, (group,))
        pool_bytes = capacity_blocks * block_bytes
        config = MachineConfig(
            extents=1,
            extent_bytes=pool_bytes,
            policy=policy,
            store_threshold=rule.threshold,
            tracker_blocks=TRACKER_BLOCKS,
            lease_share=1.0,
            spare_bytes=0,
            tag_secret=bytes(16),
            tiers=self._below.terms(pool_bytes),
        )
        self._machine = Machine(config, native_probes())
        self._now_ns = 0
        self._ticked_ns = 0
        self._busy_ns = 0  # when the core last heard or ordered anything but of the time
        self._rest_ns = _REST + self._below.longest_deadline_ns
        self._requests = 0
        self._job = 0
        self._came_from: dict[int, int] = {}  # of the request under way: block -> tier
        self.found_in = [0] * len(self._below)  # leading blocks, by tier
        self.found_on_device = 0
        self.blocks_stored = 0
        self.blocks_evicted = 0
        self.blocks_without_room = 0
        self._drive(events.PoolRecovered())
        accepted = self._ask(events.SessionOpened(_SESSION, spec, "", 1))
        assert isinstance(accepted, actions.SessionAccepted)
        self._namespace = accepted.namespace
        self._drive(events.RankAttached(_SESSION, _MOVER, rank=0, shard=0, writer=True))
        for number in range(len(self._below)):
            self._drive(events.TierStarted(TierId(number), MoverId(2 + number)))

    @property
    def dropped(self) -> list[int]:
        """Blocks that the core left out when they were to be written, by tier."""
        return [tier.counters.dropped for tier in self._machine.state.below.tiers]

    def serve(self, request: TraceRequest) -> int:
        """Run one request through; how many of its leading blocks were found."""
        self._pass_time(request.timestamp_ms * NS_PER_MS)
        self._requests += 1
        name = RequestId(str(self._requests))
        context = events.RequestContext(name)
        self._came_from.clear()
        had = self._device.leading(request.blocks.tolist()) if self._device is not None else 0
        self.found_on_device += had
        first = had if self._is_lazy else 0
        present, lease = self._look_up(context, request.blocks, first)
        self._settle()
        found = had + leading(present[had:])
        self._begin_on_device(request.blocks)
        self._count_tiers(request.blocks[had:found])
        if found > had:
            self._load(context, request.blocks[had:found])
        if lease is not None:
            self._drive(events.LeasesReleased(_SESSION, (lease,)))
        if not self._is_lazy:
            # As vLLM: what comes before a load is not offered again, what the device had is.
            loaded = found if found > had else 0
            self._store_computed(context, request.blocks, present, loaded)
        self._drive(events.RequestsEnded(_SESSION, (name,)))
        self._drive(events.StepEnded(_SESSION))
        self._settle()
        if self._device is not None:
            self._device.end()
        return found

    def curve(self) -> ReuseCurve | None:
        """What the core estimates for pools of other sizes."""
        return self._machine.statistics().curve

    def _begin_on_device(self, blocks: BlockIds) -> None:
        """Make place for the request; what leaves for it is stored in lazy mode."""
        if self._device is None:
            return
        left = self._device.begin(blocks.tolist())
        if self._is_lazy and left:
            self._store_leaving(np.array(left[::-1], np.int64))

    def _count_tiers(self, blocks: BlockIds) -> None:
        for block in blocks.tolist() if self._came_from else ():
            tier = self._came_from.get(block)
            if tier is not None:
                self.found_in[tier] += 1

    # -- the calls of an engine -----------------------------------------------------------------

    def _look_up(
        self, context: events.RequestContext, blocks: BlockIds, first: int
    ) -> tuple[Flags, LeaseId | None]:
        """Ask for those from `first` on until nothing is pending; the leading ones of them are
        leased then. Those before `first` count as missing.
        """
        lease: LeaseId | None = None
        while first < blocks.size:
            statuses, lease = self._look_up_once(context, blocks[first:], first, lease)
            if not (statuses == PENDING).any():
                return np.concatenate([np.zeros(first, np.bool_), statuses == HIT]), lease
            self._drive(events.StepEnded(_SESSION))
            self._settle()
            self._wait_for_tiers()
        return np.zeros(blocks.size, np.bool_), None

    def _look_up_once(
        self, context: events.RequestContext, blocks: BlockIds, first: int, lease: LeaseId | None
    ) -> tuple[Statuses, LeaseId | None]:
        """Statuses of blocks that stand from `first` on, and the lease of the leading hits: by
        `lease`, where there is one, else by a new one.
        """
        found: list[int] = []
        mode = events.LeaseMode.PREFIX
        for start, piece in _pieces(blocks):
            query = events.Query(context, 0, _keys(piece), mode, lease, first + start)
            (answer,) = self._ask(events.LookupRequested(_SESSION, (query,)))
            lease = answer.lease if answer.lease is not None else lease
            found += answer.statuses
            if any(status & STATUS_BITS != HIT for status in answer.statuses):
                mode = events.LeaseMode.NONE  # what comes behind a hole is no leading one
        return np.array(found, np.uint8) & np.uint8(STATUS_BITS), lease

    def _load(self, context: events.RequestContext, blocks: BlockIds) -> None:
        for _, piece in _pieces(blocks):
            verdict = self._ask(
                events.LoadRequested(_SESSION, self._next_job(), context, (_run(piece),))
            )
            assert verdict.accepted, f"a leased block could not be loaded: {verdict.reason}"

    def _store_computed(
        self, context: events.RequestContext, blocks: BlockIds, present: Flags, first: int
    ) -> None:
        """Store what the pool lacks of those from `first` on, head first, while it fits. Touch
        what is there behind the hole, but not with a device before the pool: vLLM touches nothing.
        """
        present = present.copy()
        present[:first] = True
        if present.all():
            return
        head = leading(present)
        room = max(0, self._machine.room(self._namespace)[0] - head)  # its own head stays
        if self._device is None:
            self._touch(context, blocks[head:][present[head:]])
        self._store(context, blocks[~present], head, room)

    def _store_leaving(self, blocks: BlockIds) -> None:
        """These leave the device, the last of them first: what is there is touched."""
        self._requests += 1
        context = events.RequestContext(RequestId(str(self._requests)))
        there = self._holds(blocks)
        self._touch(context, blocks[there])
        self._store(context, blocks[~there], 0, self._machine.room(self._namespace)[0])
        self._drive(events.RequestsEnded(_SESSION, (context.request,)))

    def _store(
        self, context: events.RequestContext, missing: BlockIds, first: int, room: int
    ) -> None:
        self.blocks_without_room += max(0, missing.size - room)
        for start, piece in _pieces(missing[:room]):
            run = _run(piece, first + start)
            verdict = self._ask(events.StoreRequested(_SESSION, self._next_job(), context, (run,)))
            if verdict.accepted:
                self.blocks_stored += verdict.blocks
                continue
            # Slow copies hold what the request's own blocks left of the room.
            assert self._below.next_end_ns() is not None, f"refused with room: {verdict.reason}"
            self.blocks_without_room += piece.size

    def _holds(self, blocks: BlockIds) -> Flags:
        """What the index page would show of these."""
        session = self._machine.state.require_session(_SESSION)
        located = locate(self._machine.state, session, "", 0, _keys(blocks).words)
        there: Flags = located.slots != NOWHERE
        return there

    def _touch(self, context: events.RequestContext, blocks: BlockIds) -> None:
        for _, piece in _pieces(blocks):
            self._drive(events.Touched(_SESSION, context, 0, _keys(piece)))

    # -- time -----------------------------------------------------------------------------------

    def _pass_time(self, until_ns: int) -> None:
        """Time goes on: copies of tiers end, and the core looks at its clock."""
        if len(self._below):
            self._settle()
            while (end_ns := self._next_moment(until_ns)) is not None:
                self._now_ns = max(self._now_ns, end_ns)
                self._look_at_clock()
                self._settle()
        self._now_ns = max(self._now_ns, until_ns)

    def _next_moment(self, until_ns: int) -> int | None:
        """When something is to be done next, by then.

        Once nothing has been under way for long, only the last look at the clock is left: it does
        what all would.
        """
        next_ns = self._ticked_ns + _TICK
        end_ns = self._below.next_end_ns()
        if end_ns is not None:
            next_ns = min(next_ns, end_ns)
        elif self._ticked_ns > self._busy_ns + self._rest_ns:
            next_ns = max(next_ns, until_ns // _TICK * _TICK)
        return next_ns if next_ns <= until_ns else None

    def _look_at_clock(self) -> None:
        if self._now_ns >= self._ticked_ns + _TICK:
            self._ticked_ns = self._now_ns
            self._drive(events.TimerTicked())

    def _wait_for_tiers(self) -> None:
        """Until one of their copies ends, or the core's next look at its clock."""
        if self._below.next_end_ns() is None:
            self._pass_time(self._now_ns + _TICK)  # nothing is under way: deadlines pass
        else:
            moment = self._next_moment(self._now_ns + _TICK)
            assert moment is not None, "a tick comes at the latest"
            self._pass_time(moment)

    def _settle(self) -> None:
        """Do all that can be done now: work in pieces, and what tiers have ended."""
        while True:
            end_ns = self._below.next_end_ns()
            if end_ns is not None and end_ns <= self._now_ns:
                for word in self._below.end_next():
                    self._drive(word)
            elif len(self._below) and self._machine.has_work():
                self._drive(events.WorkContinued())
            else:
                return

    # -- the core -------------------------------------------------------------------------------

    def _ask(self, event: events.Event) -> Any:
        """Drive an event; the payload of the reply to it."""
        replies = [a.payload for a in self._drive(event) if isinstance(a, actions.Reply)]
        assert len(replies) == 1
        return replies[0]

    def _drive(self, event: events.Event) -> list[actions.Action]:
        """Hand an event to the core, and end at once every copy of the mover that it orders."""
        ordered = self._machine.handle(event, self._now_ns)
        if not isinstance(event, events.TimerTicked):
            self._busy_ns = self._now_ns
        for action in ordered:
            match action:
                case actions.StartTransfer():
                    blocks = sum(part.slots.size for part in action.parts)
                    self._drive(
                        events.TransferFinished(
                            action.mover,
                            action.transfer,
                            events.TransferOutcome.DONE,
                            blocks * self._block_bytes,
                            duration_ns=0,
                        )
                    )
                case actions.WriteFree():
                    self.blocks_evicted += int(action.slots.size)
                case actions.AskTier() | actions.WriteToTier() | actions.ReadFromTier():
                    if isinstance(action, actions.ReadFromTier):
                        blocks_read = action.keys.words[:, 0].tolist()
                        self._came_from.update(dict.fromkeys(blocks_read, int(action.tier)))
                    self._below.give(action, self._now_ns)
                    self._busy_ns = self._now_ns
                case _:
                    pass
        return ordered

    def _next_job(self) -> JobId:
        self._job += 1
        return JobId(self._job)


def leading(flags: Flags) -> int:
    """How many of the first ones are set, without a gap."""
    return int(flags.size if flags.all() else flags.argmin())


def _pieces(blocks: BlockIds) -> Iterator[tuple[int, BlockIds]]:
    """What one message may name at once, and the place of its first block among all."""
    for start in range(0, blocks.size, MAX_KEYS_PER_MESSAGE):
        yield start, blocks[start : start + MAX_KEYS_PER_MESSAGE]


def _keys(blocks: BlockIds) -> KeyBatch:
    return KeyBatch(blocks.astype(np.uint64).reshape(-1, 1), HASH_BYTES)


def _run(blocks: BlockIds, first_block: int = 0) -> events.Run:
    engine_blocks = np.arange(blocks.size, dtype=np.uint32).reshape(-1, 1)
    return events.Run(0, _keys(blocks), engine_blocks, first_block)
