"""A tier's process on virtual time: keeps numbers for bytes; late, forgetful, dying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core.keys import RowId
from kvd.processes.parent import ProcessStartError
from kvd.tiers.frames import OrderEnd, OrderId, PlacedBlocks, ScopedKeys, TierAnswer, TierLeft
from kvd.tiers.process import TierConfig, TierSink
from kvd.tiers.store import Outcome, TierUsage
from tests.simulation.whole.bytes import ROTTEN, Content
from tests.simulation.whole.movers import FIRST_PID, Surroundings

Name = tuple[bytes, bytes]  # scope, key


@dataclass
class SimStore:
    """What a tier keeps; outlives its processes, and the daemon."""

    room: int
    blocks: dict[Name, list[list[Content]]] = field(default_factory=dict)  # by shard


@dataclass
class TierTemper:
    """How badly a tier behaves: chances."""

    fail: float = 0.05
    slow: float = 0.05
    hang: float = 0.01
    full: float = 0.05
    forget: float = 0.05
    lack: float = 0.25  # one of the blocks that are read has just gone

    def calm(self) -> None:
        self.fail = self.slow = self.hang = self.full = 0.0
        self.forget = self.lack = 0.0


@dataclass(eq=False)
class SimTier:
    """Stands in for TierProcess, and for the process."""

    config: TierConfig
    sink: TierSink
    store: SimStore
    temper: TierTemper
    around: Surroundings
    pid: int = FIRST_PID
    is_alive: bool = True
    is_heard: bool = True  # its daemon lives
    mounts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.rows: dict[RowId, int] = {}  # copies that use each extent are counted by `busy`
        self.waiting: list[tuple[RowId, set[int]]] = []
        self.busy: dict[OrderId, set[int]] = {}

    # -- what the daemon orders ---------------------------------------------------------------

    def exists(
        self,
        order: OrderId,
        keys: Sequence[ScopedKeys],
        deadline: float,
        tenant: str = "",
    ) -> bool:
        return self._take(order, deadline, self._look, keys)

    def write(
        self,
        order: OrderId,
        blocks: Sequence[PlacedBlocks],
        deadline: float,
        tenant: str = "",
        *,
        again: bool = False,
    ) -> bool:
        """A block that is there is not written again, whether `again` is said or not."""
        return self._take(order, deadline, self._write, blocks, _extents(blocks))

    def read(
        self,
        order: OrderId,
        blocks: Sequence[PlacedBlocks],
        deadline: float,
        tenant: str = "",
    ) -> bool:
        return self._take(order, deadline, self._read, blocks, _extents(blocks))

    def delete_scopes(self, order: OrderId, scopes: Sequence[bytes], deadline: float) -> bool:
        return self._take(order, deadline, self._delete, scopes)

    def unmap_row(self, row: RowId, extents: Sequence[int]) -> bool:
        self.waiting.append((row, set(extents)))
        self.around.loop.outside(0.001, self._look_for_rows)
        return True

    async def stop(self) -> None:
        self.kill("the daemon is stopping")

    def kill(self, reason: str) -> None:
        """Its end; control hears of what it had first, as `TierProcess` says it."""
        if self.is_alive:
            self.is_alive = False
            self.around.loop.outside(0.01, self._end, reason)

    def _end(self, reason: str) -> None:
        if not self.is_heard:
            return
        for order in list(self.busy):
            self._answer(order, TierAnswer(order, OrderEnd.FAILED))
        self._look_for_rows()
        self.sink.process_ended(self.config.tier, self.pid)
        self.sink.tier_gone(self.config.tier, reason)

    # -- what it does ---------------------------------------------------------------------------

    def _take(
        self, order: OrderId, deadline: float, work: Any, what: Any, uses: set[int] | None = None
    ) -> bool:
        random, temper, loop = self.around.random, self.temper, self.around.loop
        if not self.is_alive or random.random() < 0.02:
            return False
        self.busy[order] = uses or set()
        if random.random() < temper.hang:
            loop.outside(deadline - loop.now + 5.0, self.kill, "a call did not return")
            return True
        delay = random.random() * (3.0 if random.random() < temper.slow else 0.005)
        loop.outside(delay, self._do, order, work, what)
        return True

    def _do(self, order: OrderId, work: Any, what: Any) -> None:
        if not self.is_alive:
            return
        if self.around.random.random() < self.temper.fail:
            self._answer(order, TierAnswer(order, OrderEnd.FAILED))
        else:
            self._forget_some()
            self._answer(order, work(order, what))
        self._look_for_rows()

    def _answer(self, order: OrderId, answer: TierAnswer) -> None:
        if self.busy.pop(order, None) is not None:
            self.sink.order_ended(self.config.tier, answer)

    def _look(self, order: OrderId, what: Sequence[ScopedKeys]) -> TierAnswer:
        held = [name in self.store.blocks for part in what for name in _names(part)]
        return TierAnswer(order, OrderEnd.ANSWERED, np.array(held, dtype=np.uint8))

    def _write(self, order: OrderId, what: Sequence[PlacedBlocks]) -> TierAnswer:
        values = []
        for part in what:
            for place, name in enumerate(_names(part)):
                values.append(self._write_one(part, place, name))
        self._tell_usage()
        return TierAnswer(order, OrderEnd.ANSWERED, np.array(values, dtype=np.uint8))

    def _write_one(self, part: PlacedBlocks, place: int, name: Name) -> Outcome:
        store, random = self.store, self.around.random
        if len(store.blocks) >= store.room or random.random() < self.temper.full:
            return Outcome.FULL
        shards = self._slots(part, place)
        if part.sums is not None:
            sums = [self.around.meanings.sum_of(each) for each in shards]
            if sums != part.sums[:, place].tolist():
                return Outcome.DAMAGED
        store.blocks.setdefault(name, shards)
        return Outcome.DONE

    def _slots(self, part: PlacedBlocks, place: int) -> list[list[Content]]:
        pool = self.around.pool.extents
        found = []
        for shard in range(len(part.extents)):
            extent, offset = int(part.extents[shard][place]), int(part.offsets[shard][place])
            found.append(list(pool.get(extent, {}).get(offset, [0])))
        return found

    def _read(self, order: OrderId, what: Sequence[PlacedBlocks]) -> TierAnswer:
        values, sums = [], []
        names = [name for part in what for name in _names(part)]
        if self.around.random.random() < self.temper.lack:
            self.store.blocks.pop(self.around.random.choice(names), None)
        for part in what:
            for place, name in enumerate(_names(part)):
                kept = self.store.blocks.get(name)
                values.append(Outcome.MISSING if kept is None else Outcome.DONE)
                shards = kept or [[ROTTEN]] * len(part.extents)  # what a failed read leaves
                for shard, content in enumerate(shards):
                    extent, offset = (
                        int(part.extents[shard][place]),
                        int(part.offsets[shard][place]),
                    )
                    self.around.pool.write(extent, offset, list(content))
                sums += [self.around.meanings.sum_of(content) for content in shards]
        answer = TierAnswer(order, OrderEnd.ANSWERED, np.array(values, dtype=np.uint8))
        if self.config.checksums:
            object.__setattr__(answer, "sums", np.array(sums, dtype=np.uint64))
        return answer

    def _delete(self, order: OrderId, scopes: Sequence[bytes]) -> TierAnswer:
        for name in list(self.store.blocks):
            if any(name[0].startswith(scope) for scope in scopes):
                del self.store.blocks[name]
        return TierAnswer(order, OrderEnd.ANSWERED)

    def _forget_some(self) -> None:
        random = self.around.random
        if random.random() < self.temper.forget and self.store.blocks:
            name = random.choice(list(self.store.blocks))
            del self.store.blocks[name]
            if random.random() < 0.5:
                self.sink.left_told(self.config.tier, TierLeft((), in_doubt=True))

    def _tell_usage(self) -> None:
        count = len(self.store.blocks)
        self.sink.usage_told(self.config.tier, TierUsage(count, count, self.store.room))

    def _look_for_rows(self) -> None:
        if not self.is_heard:
            return
        used = set().union(*self.busy.values()) if self.busy else set()
        for row, extents in list(self.waiting):
            if not extents & used:
                self.waiting.remove((row, extents))
                self.sink.row_unmapped(self.config.tier, row)


def _extents(blocks: Sequence[PlacedBlocks]) -> set[int]:
    return {int(each) for part in blocks for each in part.extents.reshape(-1)}


def _names(part: ScopedKeys | PlacedBlocks) -> list[Name]:
    raw, size = part.keys.to_bytes(), part.keys.hash_bytes
    return [(part.scope, raw[i : i + size]) for i in range(0, len(raw), size)]


@dataclass
class SimTiers:
    """Starts the tiers' processes, over stores that stay."""

    around: Surroundings
    temper: TierTemper
    stores: dict[int, SimStore]
    running: dict[int, SimTier] = field(default_factory=dict)
    started: int = 0

    def daemon_ends(self) -> None:
        """They end with it."""
        for tier in self.running.values():
            tier.is_alive = tier.is_heard = False
        self.running.clear()

    async def launch(self, config: TierConfig, sink: TierSink, _bounds: object) -> Any:
        self.started += 1
        pid = FIRST_PID + 1_000_000 + self.started
        try:
            sink.process_started(config.tier, pid, 1)
        except OSError as error:
            raise ProcessStartError(str(error)) from error
        tier = SimTier(config, sink, self.stores[config.tier], self.temper, self.around, pid)
        self.running[config.tier] = tier
        return tier
