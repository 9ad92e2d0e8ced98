"""What runs in a tier's process: one thread listens, others call the store, one asks how it fares,
and one looks whether the store's files still have their names.

Nothing else here times out or polls: control calls an order off when its deadline has passed, and
ends the process when a call doesn't return.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvd.core.keys import U64, RowId
from kvd.linux import calls
from kvd.linux.proc import is_mounted
from kvd.processes.child import EXIT_BROKEN, ChannelToControl, bind_life_to
from kvd.processes.complaints import (
    COMPLAINT_SECONDS,
    finds_no_thread,
    introduce,
    log_limited,
    why_no_thread,
)
from kvd.processes.framing import BadFrame, FrameReader, pack_number, unpack_number
from kvd.processes.mappings import Bytes
from kvd.tiers import frames, sums
from kvd.tiers.departures import Departures
from kvd.tiers.extents import SharedExtents, most_mapped
from kvd.tiers.frames import (
    COPIES,
    ORDERS,
    U8,
    Order,
    OrderEnd,
    OrderId,
    PlacedBlocks,
    ProcessReason,
    ScopedKeys,
    TierAnswer,
    TierConfig,
    TierFrame,
    TierHello,
    TierRefusal,
    no_sums,
)
from kvd.tiers.lanes import Lanes, Work
from kvd.tiers.store import (
    Found,
    HasAPlace,
    LiesBelowMounts,
    MapsMemory,
    OpenStore,
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierReason,
    TierStore,
    TierUsage,
)

MAX_CALLS_AT_ONCE = 64  # whatever a store would take
PLACE_S = 1.0  # between looks whether what it keeps its blocks in was taken away
_STOP_S = 1.0  # for calls under way

_REASONS = frozenset(TierReason)


class Answered(NamedTuple):
    """What a store's answer comes to."""

    values: U8 = np.empty(0, dtype=np.uint8)
    bytes_copied: int = 0
    sums: U64 = no_sums()


class StoreLied(Exception):
    """A store answered what was not asked, or what can't be."""


class TierLoop:
    """A tier's process, wired together. `run` returns when control says stop."""

    def __init__(self, config: TierConfig, store: TierStore, control: ChannelToControl) -> None:
        self._store = store
        self._store_compares = bool(getattr(store, "compares_sums", False))
        self._looks_first = bool(getattr(store, "moves_what_is_there", False))
        self._checksums = config.checksums
        self._control = control
        told = store if isinstance(store, MapsMemory) else None
        self._extents = SharedExtents(config.extents, self._report_unmapped, most_mapped(), told)
        calls_at_once = max(1, min(store.concurrency, MAX_CALLS_AT_ONCE))
        self._lanes = Lanes(calls_at_once)
        self.left = Departures(store)
        self._stopping = False
        # Monotonic: when the next line may come of orders of a kind that fail for a reason.
        self._say_at: dict[tuple[TierFrame, str], float] = {}
        self._usage_wanted = threading.Semaphore(0)
        self._usage_told: TierUsage | None = None
        self._callers = [
            threading.Thread(target=self._call_all, name=f"call-{number}", daemon=True)
            for number in range(calls_at_once)
        ]

    # -- the listening thread ---------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        threading.Thread(target=self._tell_usage, name="usage", daemon=True).start()
        if isinstance(self._store, HasAPlace):
            look = threading.Thread(
                target=self._look_at_place, args=(self._store,), name="place", daemon=True
            )
            look.start()
        for caller in self._callers:
            caller.start()

    def run(self) -> None:
        """Listen until control says stop or is gone."""
        reader = FrameReader(TierFrame)
        while not self._stopping:
            for kind, body in reader.feed(self._control.receive()):
                self._obey(kind, body)
        self._lanes.close()
        end_s = time.monotonic() + _STOP_S
        for caller in self._callers:
            caller.join(max(0.0, end_s - time.monotonic()))
        if not any(caller.is_alive() for caller in self._callers):
            try:
                self._store.close()
            except Exception as error:  # noqa: BLE001 - the process ends in any case
                log_limited(f"the store was not closed: {error!r}")

    def _obey(self, kind: TierFrame, body: bytes) -> None:
        match kind:
            case _ if kind in ORDERS:
                self._accept(frames.unpack_order(kind, body))
            case TierFrame.CALL_OFF:
                work = self._lanes.withdraw(OrderId(unpack_number(body)))
                if work is not None:
                    self._refuse(work, ProcessReason.LATE)
            case TierFrame.ASK_USAGE:
                self._usage_wanted.release()
            case TierFrame.TELL_LEFT:
                with self.left.lock:
                    self._control.send(TierFrame.LEFT, frames.pack_left(self.left.some()))
            case TierFrame.UNMAP_ROW:
                self._extents.retire(*frames.unpack_row(body))
            case TierFrame.STOP:
                self._stopping = True
            case _:
                raise BadFrame(f"{kind.name} is not for a tier")

    def _accept(self, order: Order) -> None:
        work = Work(order)
        if order.kind in COPIES:
            parts = [part for part in order.content if isinstance(part, PlacedBlocks)]
            _require_within(parts, self._extents.extent_bytes)
            extents = frames.every_extent(parts)
            try:
                usable = self._extents.use(extents)
            except OSError as error:
                log_limited(f"an extent can't be mapped: {error}")
                usable = False
            if not usable:
                self._refuse(work, ProcessReason.NOT_MAPPED)
                return
            work.extents = extents
        self._lanes.put(work)

    def _refuse(self, work: Work, reason: ProcessReason) -> None:
        """End an order of which the store never heard."""
        self._answer(TierAnswer(work.order.order, OrderEnd.NEVER_STARTED, reason=reason))
        self._extents.release(work.extents)

    def _answer(self, answer: TierAnswer) -> None:
        self._control.send(TierFrame.ANSWER, frames.pack_answer(answer))

    def _report_unmapped(self, row: RowId) -> None:
        self._control.send(TierFrame.ROW_UNMAPPED, pack_number(row))

    # -- the threads that call --------------------------------------------------------------

    def _call_all(self) -> None:
        while (work := self._lanes.take()) is not None:
            self.left.begin(work.order.order)
            answer = self._ask(work)
            # Answered before it ends: what waits for it, as a delete for writes, is answered later.
            with self.left.lock:
                self._answer(self.left.checked(work.order, answer, _keys))
            self._lanes.end(work)
            self._extents.release(work.extents)

    def _ask(self, work: Work) -> TierAnswer:
        """Ask the store. When this returns it has nothing in its hands that it was lent."""
        order = work.order.order
        if time.monotonic() >= work.order.deadline:
            return TierAnswer(order, OrderEnd.NEVER_STARTED, reason=ProcessReason.LATE)
        if self._stopping:
            return TierAnswer(order, OrderEnd.NEVER_STARTED, reason=ProcessReason.CALLED_OFF)
        lent = self._extents.lend(work.extents)
        marks = [weakref.ref(each) for each in lent.values()]
        answered, reason = Answered(), ""
        began = time.monotonic_ns()
        try:
            answered = self._call(work.order, lent)
        except TierError as error:
            known = error.reason in _REASONS  # they are labels of a metric: no store makes others
            reason = str(error.reason) if known else ProcessReason.STORE_RAISED
            self._say(work.order, reason, error)
        except StoreLied as error:
            reason = ProcessReason.STORE_LIED
            log_limited(f"the store lied: {error}")
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread unheard
            reason = ProcessReason.STORE_RAISED
            log_limited(f"the store raised {error!r}")
        duration_ns = time.monotonic_ns() - began
        del lent
        self._require_returned(marks)
        end = OrderEnd.FAILED if reason else OrderEnd.ANSWERED
        values, copied, summed = answered
        return TierAnswer(order, end, values, copied, duration_ns, reason, summed)

    def _say(self, order: Order, reason: str, error: TierError) -> None:
        """Once in a while: a store that is away fails many, and no other line would have room."""
        now = time.monotonic()
        if now < self._say_at.get((order.kind, reason), 0.0):
            return
        self._say_at[order.kind, reason] = now + COMPLAINT_SECONDS
        log_limited(f"{order.kind.name} of {order.count}: {error}")

    def _require_returned(self, marks: Sequence[weakref.ref[Bytes]]) -> None:
        """End the process where its store kept some of what it was lent: it might write there."""
        if all(mark() is None for mark in marks):
            return
        gc.collect()  # what the store left behind in circles
        if any(mark() is not None for mark in marks):
            self._leave("its store kept hold of memory after a call had returned")

    def _leave(self, reason: str) -> None:
        log_limited(f"this process ends: {reason}")
        self._control.send(TierFrame.LEAVING, frames.pack_text(reason))
        os._exit(EXIT_BROKEN)

    def _call(self, order: Order, lent: dict[int, Bytes]) -> Answered:
        deadline = order.deadline
        match order.kind:
            case TierFrame.EXISTS:
                found = self._store.exists(_keys(order), deadline)
                return Answered(_checked(found, order.count, tuple(Found)))
            case TierFrame.READ:
                return self._read(order, lent)
            case TierFrame.WRITE:
                return self._write(order, lent)
            case _:
                scopes = [part for part in order.content if isinstance(part, bytes)]
                self._store.delete_scopes(scopes, deadline)
        return Answered()

    def _read(self, order: Order, lent: dict[int, Bytes]) -> Answered:
        summed = np.zeros(frames.count_parts(order) if self._checksums else 0, dtype=np.uint64)
        blocks = _blocks(order, lent, summed)
        answers = self._store.read(blocks, order.deadline)
        outcomes = _checked(answers, len(blocks), frames.OUTCOMES[order.kind])
        if self._checksums:
            sums.complete(blocks, outcomes.tolist())
        return Answered(outcomes, _copied(order, outcomes), summed)

    def _write(self, order: Order, lent: dict[int, Bytes]) -> Answered:
        """The store is given no block whose bytes are not those that were stored."""
        blocks = _blocks(order, lent)
        outcomes = np.full(len(blocks), Outcome.DAMAGED, dtype=np.uint8)
        damaged = [not self._store_compares and sums.is_damaged(block) for block in blocks]
        left = ~np.array(damaged, dtype=np.bool_)
        if order.again and self._looks_first:
            found = self._store.exists([block.key for block in blocks], order.deadline)
            there = _checked(found, len(blocks), tuple(Found)) == Found.THERE
            outcomes[there & left] = Outcome.DONE
            left &= ~there
        right = np.flatnonzero(left)
        given = [blocks[row] for row in right.tolist()]
        answers = self._store.write(given, order.deadline) if given else ()
        outcomes[right] = _checked(answers, len(given), frames.OUTCOMES[order.kind])
        sums.doubt(blocks, outcomes)
        return Answered(outcomes, _copied(order, outcomes))

    def _look_at_place(self, store: HasAPlace) -> None:
        while not self._stopping:
            time.sleep(PLACE_S)
            try:
                lost = store.taken_away()
            except Exception as error:  # noqa: BLE001 - a store of a site's own may raise anything
                log_limited(f"the store does not say whether its place is there: {error!r}")
                return
            if lost and not self._stopping:
                self._leave(lost)

    def _tell_usage(self) -> None:
        while self._usage_wanted.acquire():
            while self._usage_wanted.acquire(blocking=False):
                pass  # one word answers all that was asked so far
            try:
                usage = self._store.usage()
                body = frames.pack_usage(usage)
                frames.unpack_usage(body)
            except BaseException as error:  # noqa: BLE001 - control can do without
                log_limited(f"the store's usage is not known: {error!r}")
                continue
            if usage != self._usage_told:
                self._usage_told = usage
                self._control.send(TierFrame.USAGE, body)


def _require_within(parts: Sequence[PlacedBlocks], extent_bytes: int) -> None:
    """BadFrame for parts beyond their extent's end."""
    for part in parts:
        sizes = np.array(part.part_bytes, dtype=np.uint64)[:, None]
        if (sizes > extent_bytes).any() or (part.offsets > extent_bytes - sizes).any():
            raise BadFrame("a part beyond the end of its extent")


def _keys(order: Order) -> list[TierKey]:
    """Of all keys or blocks of an order; a whole scope has none."""
    keys: list[TierKey] = []
    for part in order.content:
        if not isinstance(part, bytes):
            keys += _named(part)
    return keys


def _named(part: ScopedKeys | PlacedBlocks) -> list[TierKey]:
    raw, size = part.keys.to_bytes(), part.keys.hash_bytes
    hashes = (raw[at : at + size] for at in range(0, len(raw), size))
    return list(map(TierKey, itertools.repeat(part.scope), hashes))


def _blocks(order: Order, lent: dict[int, Bytes], to_sum: U64 | None = None) -> list[TierBlock]:
    """The order's blocks; `to_sum` is for the checksums of their parts, block after block."""
    views = {extent: memoryview(each) for extent, each in lent.items()}  # type: ignore[arg-type]
    blocks: list[TierBlock] = []
    first = 0
    for part in order.content:
        assert isinstance(part, PlacedBlocks), "an order of blocks"
        shards = [
            [views[extent][at : at + size] for extent, at in zip(extents, offsets, strict=True)]
            for extents, offsets, size in zip(
                part.extents.tolist(), part.offsets.tolist(), part.part_bytes, strict=True
            )
        ]
        summed: Iterable[U64 | None] = itertools.repeat(None)
        if part.sums is not None:
            summed = np.ascontiguousarray(part.sums.T)
        elif to_sum is not None and len(to_sum):
            count = len(part.keys) * len(part.part_bytes)
            summed = to_sum[first : first + count].reshape(len(part.keys), -1)
            first += count
        blocks += map(TierBlock, _named(part), zip(*shards, strict=True), summed)
    return blocks


def _copied(order: Order, outcomes: U8) -> int:
    """Bytes of the blocks that are DONE."""
    sizes = [
        np.full(len(part.keys), sum(part.part_bytes))
        for part in order.content
        if isinstance(part, PlacedBlocks)
    ]
    return int(np.concatenate(sizes)[outcomes == Outcome.DONE].sum())


def _checked(answers: Sequence[int], count: int, possible: Sequence[int]) -> U8:
    """A store's answers as numbers. StoreLied where they are not so many, or can't be."""
    try:
        values = [int(answer) for answer in answers]
    except (TypeError, ValueError) as error:
        raise StoreLied(f"its answers are no numbers: {error}") from None
    if len(values) != count:
        raise StoreLied(f"{len(values)} answers, and {count} were asked for")
    if not set(values) <= set(map(int, possible)):
        raise StoreLied(f"answers that can't be: {set(values) - set(map(int, possible))}")
    return np.array(values, dtype=np.uint8)


def open_store(config: TierConfig) -> TierStore | TierRefusal:
    """The store that the configuration names, or what to change in it."""
    unmounted = [point for point in config.mounts if not is_mounted(point)]
    if unmounted:
        why = (
            f"not mounted any more: {', '.join(unmounted)}; mount it, or restart kvd to do without"
        )
        return TierRefusal(TierReason.UNUSABLE, "options", why)
    module, _, name = config.store.partition(":")
    try:
        opener: OpenStore = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - whatever its import raises, the site must hear of it
        why = f"{config.store} can't be imported: {error!r}"
        return TierRefusal(TierReason.UNUSABLE, "store", why)
    try:
        return opener(config.options)
    except TierError as error:
        return TierRefusal(error.reason, "options", str(error))
    except Exception as error:  # noqa: BLE001 - likewise
        if finds_no_thread(error):
            return _no_threads()
        why = f"{config.store} can't be opened with these options: {error!r}"
        return TierRefusal(TierReason.UNUSABLE, "options", why)


def _mounts_of(store: TierStore) -> tuple[str, ...]:
    return tuple(store.mount_points()) if isinstance(store, LiesBelowMounts) else ()


def _no_threads() -> TierRefusal:
    return TierRefusal(TierReason.UNUSABLE, "", f"it has no threads: {why_no_thread()}")


def serve(control_fd: int, parent: int) -> None:
    """Be a tier's process of the parent that sits behind this descriptor, until it is gone."""
    bind_life_to(parent)
    control = ChannelToControl(socket.socket(fileno=control_fd))
    config = frames.unpack_config(control.receive_first(TierFrame.CONFIGURE))
    calls.name_process(f"kvd-tier-{config.tier}")
    introduce(config.title)
    opened = open_store(config)
    if isinstance(opened, TierRefusal):
        control.send(TierFrame.REFUSED, frames.pack_refusal(opened))
        return
    loop = TierLoop(config, opened, control)
    try:
        loop.start()
    except RuntimeError:
        control.send(TierFrame.REFUSED, frames.pack_refusal(_no_threads()))
        os._exit(EXIT_BROKEN)  # beside the threads that there are
    gc.freeze()
    sys.setswitchinterval(0.0005)
    hello = TierHello(loop.left.are_named, _mounts_of(opened))
    control.send(TierFrame.HELLO, frames.pack_hello(hello))
    loop.run()
