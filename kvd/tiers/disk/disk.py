"""One directory of the disk tier: a slab, what is known of its blocks, and who uses them now."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvd.core.keys import U32, U64, Slots
from kvd.linux.proc import is_mounted
from kvd.linux.standing import Standing
from kvd.tiers.disk import warm
from kvd.tiers.disk.failures import DiskFailures
from kvd.tiers.disk.files import DiskFiles
from kvd.tiers.disk.index_file import GONE, ROW_WORDS, STAMP, IndexFile, check_of
from kvd.tiers.disk.kinds import MAX_LENGTHS_KNOWN, Kinds, stride_of
from kvd.tiers.disk.options import ALIGN, DiskOptions
from kvd.tiers.disk.owner import mount_point_of, owned
from kvd.tiers.disk.rows import RowWriter
from kvd.tiers.disk.size_class import NOWHERE, DiskSizeClass, PlaceState
from kvd.tiers.disk.slab import HEADER_BYTES, Slab
from kvd.tiers.disk.space import DiskSpace
from kvd.tiers.disk.stamps import UseClock
from kvd.tiers.disk.transfers import BlockMove, Transfers
from kvd.tiers.disk.wiping import steps_of
from kvd.tiers.sealing import lengths_of
from kvd.tiers.store import (
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierReason,
    TierTimeout,
)

MAX_SCOPES_KNOWN = 1 << 20  # of one disk; scopes without blocks are forgotten then
FORGET_SCOPES_AGAIN_S = 60.0  # after a look for those, of a tenth of a second, that found few
FEW_SCOPES = 16  # few is such a part of MAX_SCOPES_KNOWN
MAX_LEFT = 131_072  # blocks of one disk that have left, and that nobody was told of yet
PLACES_AT_ONCE = 8192  # that a deletion looks at before others may take the lock
BREATH_S = 0.0002  # for them to take it
USE_NOTED_S = 300  # a block's use is noted for the next start once in so many seconds
UNKNOWN_SCOPE = 0
_Begin = Callable[[Sequence[BlockMove], float], list[Future[None]]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one call that belong to one disk. `digests` has shape [n, 2]."""

    numbers: list[int]  # in the caller's batch
    blocks: list[TierBlock]
    digests: U64
    deadline: float

    def hashes(self, rows: Slots) -> list[bytes]:
        """By which engines know these blocks."""
        return [self.blocks[row].key.block for row in rows.tolist()]


@dataclass(slots=True)
class UnderWay:
    """A batch that was begun. `pieces` stand by class; what needs no byte moved is answered."""

    pieces: list[tuple[DiskSizeClass, list[BlockMove], U64]]
    moves: list[Future[None]]


class Disk:
    """Any thread may call. The lock is never held while the disk is waited for."""

    def __init__(
        self, directory: Path, options: DiskOptions, files: DiskFiles, taken: Collection[bytes]
    ) -> None:
        self.failures = DiskFailures(directory)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)  # told when a read or write has ended
        self._deleting = threading.Lock()
        self._unwiped: list[tuple[DiskSizeClass, Slots]] = []
        self._unnamed: list[int] = []  # deleted scopes whose places are all in there, or wiped
        self._scopes: dict[bytes, int] = {}
        self._forget_scopes_at = 0.0
        self.directory = directory
        self._owner = owned(directory)
        try:
            self.slab = Slab(directory / "slab", options, files, taken)
        except BaseException:
            os.close(self._owner)
            raise
        self.mount_point = mount_point_of(self._owner)
        self._standing = Standing((directory, directory / "lock", directory / "slab"))
        self.seed = int.from_bytes(self.slab.identity[8:], "little")
        regions, size = self.slab.regions, options.region_bytes
        self._space = DiskSpace(regions, size, options.policy, self._leave)
        self._left: list[TierKey] | None = []  # None: more than anybody knows
        self._index = IndexFile(directory / "index.sqlite", self.slab.identity)
        self._threads = options.threads

    def begin(self, seeds: Sequence[int], own: int, until: float = 0.0) -> None:
        """Read the index, until then though the disk refuses, and be ready. TierUnusable."""
        known = self._index.open(until)
        if known.damaged_rows or known.was_lost:
            self.failures.count(TierReason.INDEX_DAMAGED, max(1, known.damaged_rows))
        self._half_deleted = [n for n, scope in known.scopes.items() if scope == GONE]
        self._scopes = {scope: n for n, scope in known.scopes.items() if scope != GONE}
        self._scope_names = {number: scope for scope, number in self._scopes.items()}
        self._next_scope = known.next_scope
        kinds = {n: each for n, each in known.lengths.items() if n <= MAX_LENGTHS_KNOWN}
        strides = {number: stride_of(lengths) for number, lengths in kinds.items()}
        wrong = warm.fill(self._space, known, strides, seeds, own)
        self._rows = RowWriter(self._index, self._tell_rows)
        self._rows.remove([int(place) for place in wrong[:, 3]])
        self._kinds = Kinds(kinds, self._rows, self._give_up)
        self._clock = UseClock(int(known.rows[:, STAMP].max(initial=0)))
        self._transfers = Transfers(self.slab, self._threads)

    # -- lookups ----------------------------------------------------------------------------

    def exists(self, keys: Sequence[TierKey], digests: U64) -> np.ndarray:
        """Which of these blocks there are."""
        with self._lock:
            known = self._scope_numbers([key.scope for key in keys])
            there = np.zeros(len(digests), dtype=np.bool_)
            for size_class in self._space.classes.values():
                found = size_class.find(digests, known)
                here = np.flatnonzero(found != NOWHERE)
                size_class.name(found[here], [keys[row].block for row in here.tolist()])
                there[here] = True
            return there

    # -- writing ----------------------------------------------------------------------------

    def begin_write(self, batch: Batch, outcomes: list[Outcome]) -> UnderWay:
        """Give the blocks places and begin to write them."""
        under_way = UnderWay([], [])
        if not self._rows.wait_for_room(batch.deadline):
            self.failures.count(TierReason.TIMEOUT, len(batch.numbers))
            for number in batch.numbers:
                outcomes[number] = Outcome.FAILED
            return under_way
        with self._lock:
            scopes = self._scope_numbers([block.key.scope for block in batch.blocks], add=True)
            for lengths, rows in _by_lengths(batch.blocks).items():
                kind = self._kinds.add(lengths, self._space.classes.values())
                size_class = self._space.class_of(stride_of(lengths))
                known = rows[scopes[rows] != UNKNOWN_SCOPE]
                if size_class is not None and kind is not None and known.size:
                    new = self._new_ones(size_class, batch, known, scopes, kind, outcomes)
                    places = self._space.take(size_class, len(new))
                    new = new[: len(places)]
                    size_class.scopes[places] = scopes[new]
                    size_class.lengths[places] = kind
                    size_class.digests[places] = batch.digests[new]
                    size_class.name(places, batch.hashes(new))
                    pieces = self._pieces(size_class, batch, new, places)
                    under_way.pieces.append((size_class, pieces, batch.digests[new]))
        self._start(under_way, batch.deadline, self._transfers.write)
        return under_way

    def _new_ones(
        self,
        size_class: DiskSizeClass,
        batch: Batch,
        rows: Slots,
        scopes: U32,
        lengths: int,
        outcomes: list[Outcome],
    ) -> Slots:
        """Rows of the batch that are to be written; the others are there and done."""
        found = size_class.find(batch.digests[rows], scopes[rows])
        there = (found != NOWHERE) & (size_class.lengths[found] == lengths)
        self._use(size_class, found[there])
        size_class.name(found[there], batch.hashes(rows[there]))
        for row in rows[there].tolist():
            outcomes[batch.numbers[row]] = Outcome.DONE
        new: Slots = rows[~there]
        return new

    def end_write(self, under_way: UnderWay, outcomes: list[Outcome]) -> None:
        """Wait until no byte of the batch is read any more, and keep what was written."""
        _wait(under_way.moves)
        for size_class, pieces, digests in under_way.pieces:
            with self._lock:
                self._settle_writes(size_class, pieces, digests, outcomes)
                self._idle.notify_all()

    def _settle_writes(
        self,
        size_class: DiskSizeClass,
        pieces: list[BlockMove],
        digests: U64,
        outcomes: list[Outcome],
    ) -> None:
        places = np.array([piece.place for piece in pieces], dtype=np.int64)
        size_class.pins[places] = 0
        self.failures.heed("writes", pieces)
        written = np.array([piece.reason is None for piece in pieces], dtype=np.bool_)
        for piece in pieces:
            outcomes[piece.number] = _outcome_of_write(piece.reason)
            if piece.reason not in (None, TierReason.CHECKSUM_MISMATCH):  # that was before the disk
                self.failures.count(piece.reason, why=piece.why)
        wanted = size_class.states[places] == PlaceState.WRITING  # not deleted meanwhile
        size_class.free(places[wanted & ~written])
        keep = wanted & written
        places, digests = places[keep], digests[keep]
        scopes, lengths = size_class.scopes[places], size_class.lengths[places]
        found = size_class.find(digests, scopes)
        double = (found != NOWHERE) & (size_class.lengths[found] == lengths)
        size_class.free(places[double])  # another call was faster
        self._drop(size_class, found[(found != NOWHERE) & ~double])
        for other in list(self._space.classes.values()):
            if other is not size_class and len(other):
                older = other.find(digests, scopes)
                self._drop(other, older[older != NOWHERE])
        places = places[~double]
        seals = np.array([piece.seal for piece in pieces], dtype=np.uint64)
        size_class.seals[places] = seals[keep][~double]
        size_class.stamps[places] = self._clock.now()
        size_class.keep(places)
        self._rows.put(self._rows_of(size_class, places))

    # -- reading ----------------------------------------------------------------------------

    def begin_read(self, batch: Batch, outcomes: list[Outcome]) -> UnderWay:
        """Pin the blocks that are there and begin to read them."""
        under_way = UnderWay([], [])
        with self._lock:
            scopes = self._scope_numbers([block.key.scope for block in batch.blocks])
            for lengths, rows in _by_lengths(batch.blocks).items():
                size_class = self._space.classes.get(stride_of(lengths))
                if size_class is None:
                    continue
                found = size_class.find(batch.digests[rows], scopes[rows])
                there = found != NOWHERE
                there &= size_class.lengths[found] == self._kinds.number_of(lengths)
                size_class.policy.missed(batch.digests[rows[~there], 0])
                places = found[there]
                size_class.name(places, batch.hashes(rows[there]))
                np.add.at(size_class.pins, places, 1)  # a place may stand in it twice
                pieces = self._pieces(size_class, batch, rows[there], places)
                for piece, seal in zip(pieces, size_class.seals[places].tolist(), strict=True):
                    piece.seal = seal
                    outcomes[piece.number] = Outcome.DONE
                under_way.pieces.append((size_class, pieces, batch.digests[rows[there]]))
        self._start(under_way, batch.deadline, self._transfers.read)
        return under_way

    def end_read(self, under_way: UnderWay, outcomes: list[Outcome]) -> None:
        """Wait until nothing is written into the batch's parts any more."""
        _wait(under_way.moves)
        for size_class, pieces, _ in under_way.pieces:
            with self._lock:
                places = np.array([piece.place for piece in pieces], dtype=np.int64)
                np.subtract.at(size_class.pins, places, 1)
                right = np.array([piece.reason is None for piece in pieces], dtype=np.bool_)
                self.failures.heed("reads", pieces)
                self._use(size_class, places[right])
                for piece in pieces:
                    if piece.reason is not None:
                        outcomes[piece.number] = Outcome.FAILED
                        self.failures.count(piece.reason, why=piece.why)
                        self._drop_wrong(size_class, piece)
                last = np.unique(places)
                last = last[(size_class.states[last] == PlaceState.UNREAD)]
                size_class.free(last[size_class.pins[last] == 0])
                self._idle.notify_all()

    def _drop_wrong(self, size_class: DiskSizeClass, piece: BlockMove) -> None:
        place = piece.place
        is_it = (
            size_class.states[place] == PlaceState.READY
            and int(size_class.seals[place]) == piece.seal
        )
        if is_it and piece.reason is not TierReason.TIMEOUT:
            self._note_left(size_class, np.array([place]))
            self._drop(size_class, np.array([place]))

    # -- deleting ---------------------------------------------------------------------------

    def delete_scopes(self, scopes: Iterable[bytes], deadline: float) -> None:
        """Forget every block of scopes that begin with one of these for good. TierError."""
        prefixes = tuple(scopes)
        with self._lock:
            named = [scope for scope in self._scopes if scope.startswith(prefixes)]
            numbers = [self._scopes.pop(scope) for scope in named]
            for number in numbers:
                del self._scope_names[number]
                self._rows.add_scope(number, GONE)
            numbers += self._half_deleted
            self._half_deleted = []
            classes = list(self._space.classes.values())
        # From here on no lookup finds them, and nothing new is written under these numbers.
        for size_class in classes:
            self._take_out_scopes(size_class, numbers)
        with self._lock:
            self._unnamed += numbers
        self._wipe_out(deadline)

    def _take_out_scopes(self, size_class: DiskSizeClass, numbers: Sequence[int]) -> None:
        """Some places at a time: others wait for the lock, and a scope may have millions."""
        first = 0
        while numbers and first < size_class.size:
            with self._lock:
                span = slice(first, min(first + PLACES_AT_ONCE, size_class.in_use().stop))
                mine = np.isin(size_class.scopes[span], numbers)
                mine &= np.isin(size_class.states[span], (PlaceState.READY, PlaceState.WRITING))
                self._take_out(size_class, first + np.flatnonzero(mine))
                first = span.stop if span.stop == first + PLACES_AT_ONCE else size_class.size
            time.sleep(BREATH_S)

    def _take_out(self, size_class: DiskSizeClass, places: Slots) -> None:
        if not places.size:
            return
        size_class.take_out(places[size_class.states[places] == PlaceState.READY])
        size_class.states[places] = PlaceState.LEAVING
        self._unwiped.append((size_class, places))

    def _wipe_out(self, deadline: float) -> None:
        """Zero what was deleted, once nobody uses it, have that on the disk, and free it.

        Its rows stay until then: what a process that is killed has left, the next one wipes.
        TierTimeout where the time is not enough for all: the next call goes on with what is left.
        """
        if not self._deleting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TierTimeout("another deletion is under way")
        try:
            with self._lock:
                leaving, unnamed = list(self._unwiped), list(self._unnamed)
                while any(size_class.pins[places].any() for size_class, places in leaving):
                    if not self._idle.wait(max(0.0, deadline - time.monotonic())):
                        raise TierTimeout("what is deleted is still being read or written")
            until = (time.monotonic() + deadline) / 2  # the other half is for the disk to have it
            wiped: list[tuple[DiskSizeClass, Slots]] = []
            left = list(leaving)
            while left and not (wiped and time.monotonic() >= until):
                size_class, places = left.pop(0)
                count = self._wipe(size_class, places, until)
                wiped.append((size_class, places[:count]))
                if count < len(places):
                    left.insert(0, (size_class, places[count:]))
            if wiped:
                self.slab.sync()
            done = self._forget_wiped(wiped, deadline)
            wiped, left = wiped[:done], wiped[done:] + left
            for number in () if left else unnamed:
                self._rows.remove_scope(number)
            self._rows.write_now(deadline)
            with self._lock:
                self._unwiped[: len(leaving)] = left
                del self._unnamed[: 0 if left else len(unnamed)]
            for size_class, places in wiped:
                with self._lock:
                    size_class.free(places)
                time.sleep(BREATH_S)
            if left:
                raise TierTimeout("not all that was deleted is wiped")
        except OSError as error:
            raise TierError(f"what was deleted can't be wiped: {error.strerror}") from error
        finally:
            self._deleting.release()

    def _forget_wiped(self, wiped: list[tuple[DiskSizeClass, Slots]], deadline: float) -> int:
        """Have no row lead there; of how many, while the index is written no slower than told."""
        for number, (size_class, places) in enumerate(wiped):
            if not self._rows.wait_for_room(deadline):
                return number
            self._forget_rows(size_class, places)
        return len(wiped)

    def _wipe(self, size_class: DiskSizeClass, places: Slots, until: float) -> int:
        """Zero some of them, until then: how many of the first."""
        done = 0
        for start, size, count in steps_of(self._offsets(size_class, places), size_class.stride):
            self.slab.wipe(start, size)
            done = count
            if time.monotonic() >= until:
                break
        return done

    # -- the rest ---------------------------------------------------------------------------

    def usage(self) -> tuple[int, int, int]:
        """Blocks, the bytes of their places, and how many blocks had to leave."""
        with self._lock:
            classes = list(self._space.classes.values())
            held = sum(len(each) for each in classes)
            return held, sum(len(each) * each.stride for each in classes), self._space.evicted

    @property
    def notes(self) -> list[str]:
        lost = f"{self.directory}: the index is given up until it can be written again"
        return [*self.slab.notes, *self.failures.notes, *([lost] if self._rows.is_lost else [])]

    def taken_away(self) -> str:
        """What was removed or replaced of what the next start looks for; an index is made anew."""
        try:
            lost = self._standing.missing()
            if lost is None:
                self._rows.keep_findable()
                return ""
        except OSError:  # an ill disk has lost nothing yet
            return ""
        if self.mount_point and not is_mounted(self.mount_point):
            return f"{self.mount_point} was unmounted while {self.directory} was used"
        return f"{lost.path} {lost.how} while it ran: its blocks are lost, and it begins anew"

    def close(self) -> None:
        """Write the last rows and let go of everything."""
        for name in ("_transfers", "_rows"):
            if hasattr(self, name):
                getattr(self, name).close()
        self._index.close()
        self.slab.close()
        os.close(self._owner)

    def _start(self, under_way: UnderWay, deadline: float, begin: _Begin) -> None:
        for _, pieces, _ in under_way.pieces:
            under_way.moves.extend(begin(pieces, deadline))

    def _pieces(
        self, size_class: DiskSizeClass, batch: Batch, rows: Slots, places: Slots
    ) -> list[BlockMove]:
        offsets = self._offsets(size_class, places).tolist()
        return [
            BlockMove(batch.numbers[row], block, lengths_of(block), block.nbytes, place, offset)
            for row, place, offset in zip(rows.tolist(), places.tolist(), offsets, strict=True)
            for block in (batch.blocks[row],)
        ]

    def _offsets(self, size_class: DiskSizeClass, places: Slots) -> Slots:
        return size_class.offsets(places, self._space.region_bytes) + HEADER_BYTES

    def _drop(self, size_class: DiskSizeClass, places: Slots) -> None:
        """Nobody finds these blocks any more; their places are free when nobody reads them."""
        if not places.size:
            return
        self._forget_rows(size_class, places)
        size_class.take_out(places)
        read = size_class.pins[places] > 0
        size_class.states[places[read]] = PlaceState.UNREAD
        size_class.free(places[~read])

    def _use(self, size_class: DiskSizeClass, places: Slots) -> None:
        """These blocks were used. A start finds that noted, but for the last USE_NOTED_S."""
        now = self._clock.now()
        kept = np.unique(places[size_class.states[places] == PlaceState.READY])
        due = kept[size_class.stamps[kept] // USE_NOTED_S != now // USE_NOTED_S]
        size_class.used(places, now)
        if due.size and self._rows.has_room:
            self._rows.put(self._rows_of(size_class, due))

    def _leave(self, size_class: DiskSizeClass, places: Slots) -> None:
        """These blocks have to make room."""
        self._note_left(size_class, places)
        self._forget_rows(size_class, places)

    def _give_up(self, size_class: DiskSizeClass, places: Slots) -> None:
        """These blocks, which nobody reads or writes, leave."""
        self._space.evicted += len(places)
        self._note_left(size_class, places)
        self._drop(size_class, places)

    def _note_left(self, size_class: DiskSizeClass, places: Slots) -> None:
        if self._left is None:
            return
        for scope, block in size_class.names_of(places):
            known = self._scope_names.get(scope)
            if known is not None:
                self._left.append(TierKey(known, block))
        if len(self._left) > MAX_LEFT:
            self._left = None

    def take_left(self) -> list[TierKey] | None:
        """Blocks that have left by themselves since the last call; None: nobody knows which."""
        if self._left == []:
            return []
        with self._lock:
            left, self._left = self._left, []
            return left

    def _forget_rows(self, size_class: DiskSizeClass, places: Slots) -> None:
        self._rows.remove((self._offsets(size_class, places) // ALIGN).tolist())

    def _rows_of(self, size_class: DiskSizeClass, places: Slots) -> U64:
        rows = np.empty((len(places), ROW_WORDS), dtype=np.uint64)
        rows[:, :2] = size_class.digests[places]
        rows[:, 2] = size_class.seals[places]
        rows[:, 3] = self._offsets(size_class, places) // ALIGN
        lengths = size_class.lengths[places].astype(np.uint64)
        rows[:, 4] = size_class.scopes[places] | lengths << np.uint64(32)
        rows[:, 5] = size_class.stamps[places]
        rows[:, 6] = check_of(rows, self.slab.identity)
        return rows

    def _tell_rows(self) -> Iterator[None]:
        """Tell an index that is empty all that there is, some places a step."""
        with self._lock:
            for number, scope in self._scope_names.items():
                self._rows.add_scope(number, scope)
            self._kinds.tell()
            classes = list(self._space.classes.values())
        for size_class in classes:
            for first in range(0, size_class.size, PLACES_AT_ONCE):
                with self._lock:
                    span = slice(first, min(first + PLACES_AT_ONCE, size_class.in_use().stop))
                    if span.stop <= first:  # also of a class that has gone
                        break
                    ready = first + np.flatnonzero(size_class.states[span] == PlaceState.READY)
                    if ready.size:
                        self._rows.put(self._rows_of(size_class, ready))
                yield

    def _scope_numbers(self, scopes: Sequence[bytes], *, add: bool = False) -> U32:
        """The number of each; UNKNOWN_SCOPE where there is none and none is to be added."""
        known = self._scopes
        if add:
            for scope in dict.fromkeys(scopes):
                if scope not in known and self._has_room_for_scope():
                    known[scope] = self._next_scope
                    self._scope_names[self._next_scope] = scope
                    self._rows.add_scope(self._next_scope, scope)
                    self._next_scope += 1
        return np.array([known.get(s, UNKNOWN_SCOPE) for s in scopes], dtype=np.uint32)

    def _has_room_for_scope(self) -> bool:
        if len(self._scopes) >= MAX_SCOPES_KNOWN:
            now = time.monotonic()
            if now >= self._forget_scopes_at:
                found = self._forget_unused_scopes()
                if found <= MAX_SCOPES_KNOWN // FEW_SCOPES:
                    self._forget_scopes_at = now + FORGET_SCOPES_AGAIN_S
        return len(self._scopes) < MAX_SCOPES_KNOWN and self._next_scope < 1 << 32

    def _forget_unused_scopes(self) -> int:
        """How many had no blocks."""
        known = np.fromiter(self._scope_names, dtype=np.uint32, count=len(self._scope_names))
        for size_class in self._space.classes.values():
            span = size_class.in_use()
            live = size_class.states[span] != PlaceState.FREE
            known = known[np.isin(known, size_class.scopes[span][live], invert=True)]
        for number in known.tolist():
            del self._scopes[self._scope_names.pop(number)]
            self._rows.remove_scope(number)
        return len(known)


def _by_lengths(blocks: Sequence[TierBlock]) -> dict[bytes, Slots]:
    """Rows of a batch by the lengths of their parts."""
    rows: dict[bytes, list[int]] = {}
    for row, block in enumerate(blocks):
        rows.setdefault(lengths_of(block), []).append(row)
    return {lengths: np.array(found, dtype=np.int64) for lengths, found in rows.items()}


def _outcome_of_write(reason: TierReason | None) -> Outcome:
    if reason is None:
        return Outcome.DONE
    if reason is TierReason.CHECKSUM_MISMATCH:
        return Outcome.DAMAGED
    return Outcome.FULL if reason is TierReason.NO_SPACE else Outcome.FAILED


def _wait(moves: Sequence[Future[None]]) -> None:
    """Until all have ended: whatever one raised, none touches the blocks' parts then."""
    raised = [move.exception() for move in moves]
    for error in raised:
        if error is not None:
            raise error
