"""Moves blocks to and from Valkey: their pieces in units, several units at once.

A unit is what goes to one server in one go. Most blocks are one value: the record and the parts,
end to end, out of where they lie. A larger one is in pieces, and its record is written after all of
them; only with it is the block there. So what was written in part is a miss, and in time leaves.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvd.tiers.gang import Flow, Gang
from kvd.tiers.sealing import (
    has_lengths_of,
    prove_all,
    record_in,
    sound_records_of,
    wipe,
)
from kvd.tiers.store import Outcome, TierBlock, TierError, TierReason
from kvd.tiers.valkey.line import Command, Room
from kvd.tiers.valkey.names import BlockShape, NameBook
from kvd.tiers.valkey.servers import ELSEWHERE, Servers

# One piece may have more. Less keeps the interpreter at handing its lock from thread to thread.
UNIT_BYTES = 2 << 20
UNIT_NAMES = 512  # of small ones


@dataclass(slots=True)
class Move:
    """One block on its way. `reason` says why it failed."""

    number: int  # in the caller's batch
    block: TierBlock
    name: bytes  # of its record
    shape: BlockShape
    home: str
    record: bytearray
    left: int = 0  # pieces that have not come yet
    outcome: Outcome | None = None
    reason: TierReason | None = None
    is_partly_missing: bool = False
    has_come: bool = False  # some of it, be it wrong
    is_known: bool = False  # its record was there, whatever else was
    is_cut: bool = False  # its pieces go in several units
    leftover: Sequence[bytes] = ()  # names of what it replaces

    @property
    def is_one(self) -> bool:
        """Whether its record and its parts are one value."""
        return not self.shape.spans

    @property
    def names(self) -> list[bytes]:
        """Of all its values."""
        return [self.name, *(self.name + suffix for suffix in self.shape.suffixes)]

    @property
    def parts_of_value(self) -> tuple[memoryview, ...]:
        """What its one value is made of, or goes to."""
        return (memoryview(self.record), *self.block.parts)

    def piece(self, number: int) -> memoryview:
        span = self.shape.spans[number]
        return self.block.parts[span.part][span.begin : span.end]

    def fail(self, reason: TierReason) -> None:
        self.reason = self.reason or reason


@dataclass(slots=True)
class _Look:
    """Which blocks of a run are there."""

    run: Sequence[Move]
    left: int  # groups of it that were not looked for yet
    flow: Flow  # of the pieces that write it
    new: Sequence[Move] = ()  # to be written


# Pieces by their numbers, of blocks at one server; of a block that is one value that is number 0.
Unit = list[tuple[Move, int]]


class Moves:
    """What moves blocks of one store."""

    def __init__(self, servers: Servers, gang: Gang, book: NameBook, ttl_seconds: float) -> None:
        self._servers = servers
        self._book = book
        self._gang = gang
        self._expiry = ["PX", str(round(ttl_seconds * 1000))] if ttl_seconds else []
        self._lock = threading.Lock()

    # -- writing ------------------------------------------------------------------------------

    def write(self, runs: Iterable[Sequence[Move]], deadline: float) -> None:
        """Write what is not there yet. Each has an outcome or a reason when this returns.

        While one run is looked for, or is made, others are written.
        """
        looks: list[_Look] = []
        with self._gang.flow(is_patient=True) as flow:
            for run in runs:
                groups = list(_by_home(run, 2 * UNIT_NAMES))
                looks.append(_Look(run, len(groups), flow))
                flow.add([partial(self._look, looks[-1], each, deadline) for each in groups])
        new = [move for look in looks for move in look.new]
        cut = [m for m in new if m.is_cut and m.reason is None and m.outcome is None]
        records = _by_home(cut, UNIT_NAMES)
        pieces = [partial(self._write_records, group, deadline) for group in records]
        self._gang.do(pieces, is_patient=True)
        for move in new:
            if move.reason is None:
                move.outcome = move.outcome or Outcome.DONE
            elif move.reason is TierReason.NO_SPACE:
                move.outcome = Outcome.FULL
        self.forget([name for move in new for name in _left_behind(move)], new, deadline)

    def _look(self, look: _Look, group: Sequence[Move], deadline: float) -> None:
        """Once all of a run was looked for, what is to be written of it is."""
        self._see_which_are_there(group, deadline)
        with self._lock:
            look.left -= 1
            if look.left:
                return
        look.new = [m for m in look.run if m.outcome is None and m.reason is None]
        look.flow.add([partial(self._write_unit, unit, deadline) for unit in _units(look.new)])

    def _see_which_are_there(self, group: Sequence[Move], deadline: float) -> None:
        try:
            in_pieces = self._see_heads(group, deadline)
            if in_pieces:
                self._see_pieces(in_pieces, deadline)
        except TierError as error:
            for move in group:
                move.fail(error.reason)

    def _see_heads(self, group: Sequence[Move], deadline: float) -> list[Move]:
        """Values that are there in one are done; the answer is those of which pieces may be."""
        home = group[0].home
        asked: list[Command] = [[b"EXISTS", move.name] for move in group]
        found = self._servers.run(home, asked, deadline)
        there = [move for move, count in zip(group, found, strict=True) if count == 1]
        if not there:
            return []
        in_pieces: list[Move] = []
        heads = self._servers.heads(home, [move.name for move in there], deadline)
        for move, head in zip(there, heads, strict=True):
            record = record_in(head)
            if not record:
                continue
            is_whole = len(head) > len(record)  # its bytes follow the record
            if not has_lengths_of(record, move.block):
                move.leftover = self._names_of(move, record)
            elif move.is_one and is_whole:
                move.outcome = Outcome.DONE
            elif not move.is_one and not is_whole:
                in_pieces.append(move)
        return in_pieces

    def _see_pieces(self, moves: Sequence[Move], deadline: float) -> None:
        """Those of which all pieces are there are done."""
        commands: list[Command] = [[b"EXISTS", *move.names[1:]] for move in moves]
        answers = self._servers.run(moves[0].home, commands, deadline)
        for move, count in zip(moves, answers, strict=True):
            if count == len(move.shape.spans):
                move.outcome = Outcome.DONE

    def _names_of(self, move: Move, record: bytes) -> list[bytes]:
        """Names of the pieces that a record is of."""
        return [move.name + suffix for suffix in self._book.suffixes_told(record)]

    def _write_unit(self, unit: Unit, deadline: float) -> None:
        """The pieces, and then the records of those that have no piece elsewhere."""
        _seal([move for move, number in unit if number == 0])
        unit = [(move, number) for move, number in unit if move.outcome is None]
        begun = {move.number for move, number in unit if number == 0}
        ends = [move for move, number in unit if number + 1 == len(move.shape.spans)]
        whole = [move for move in ends if move.number in begun]
        for move, _ in unit:
            move.is_cut = not move.is_one
        for move in whole:
            move.is_cut = False
        values: list[tuple[Move, bytes, Any]] = [
            (move, move.name, move.parts_of_value)
            if move.is_one
            else (move, move.name + move.shape.suffixes[n], move.piece(n))
            for move, n in unit
        ]
        self._write_values(values, whole, deadline)

    def _write_records(self, moves: Sequence[Move], deadline: float) -> None:
        self._write_values([], moves, deadline)

    def _write_values(
        self, pieces: list[tuple[Move, bytes, Any]], whole: Sequence[Move], deadline: float
    ) -> None:
        concerned = [move for move, _, _ in pieces] + list(whole)
        if not concerned:
            return
        try:
            commands = [self._set(name, value) for _, name, value in pieces]
            commands += [self._set(move.name, move.record) for move in whole]
            answers = self._servers.set(concerned[0].home, commands, deadline)
        except TierError as error:
            for move in concerned:
                move.fail(error.reason)
            return
        for move, answer in zip(concerned, answers, strict=True):
            if isinstance(answer, TierError):
                move.fail(answer.reason)

    def _set(self, name: bytes, value: Any) -> Command:
        return [b"SET", name, value, *self._expiry]

    # -- reading ------------------------------------------------------------------------------

    def read(self, runs: Iterable[Sequence[Move]], deadline: float) -> None:
        """Fill the blocks' parts. Each has an outcome or a reason when this returns."""
        moves: list[Move] = []
        with self._gang.flow() as flow:
            for run in runs:
                moves += run
                for move in run:
                    move.left = len(move.shape.spans) or 1
                flow.add([partial(self._read_unit, unit, deadline) for unit in _units(run)])
        useless = [
            move
            for move in moves
            if move.is_known
            and move.is_partly_missing
            and move.reason in (None, TierReason.CHECKSUM_MISMATCH)
        ]
        self.forget([name for move in useless for name in move.names], useless, deadline)

    def _read_unit(self, unit: Unit, deadline: float) -> None:
        names: list[bytes] = []
        rooms: list[Room] = []
        for move, number in unit:
            if move.is_one:
                names.append(move.name)
                rooms.append(move.parts_of_value)
                continue
            if number == 0:
                names.append(move.name)
                rooms.append((memoryview(move.record),))
            names.append(move.name + move.shape.suffixes[number])
            rooms.append((move.piece(number),))
        try:
            lengths = iter(self._servers.fill(unit[0][0].home, names, rooms, deadline))
        except TierError as error:
            for move, _ in unit:
                move.fail(error.reason)
        else:
            for move, number in unit:
                count = 2 if number == 0 and not move.is_one else 1
                came = list(itertools.islice(lengths, count))
                if ELSEWHERE in came:
                    move.fail(TierReason.UNREACHABLE)
                _look_at_lengths(move, number, iter(came))
        whole: list[Move] = []
        with self._lock:
            for move, _ in unit:
                move.left -= 1
                if not move.left:
                    whole.append(move)
        _end_reads(whole)

    # -- forgetting ---------------------------------------------------------------------------

    def forget(self, names: list[bytes], moves: Sequence[Move], deadline: float) -> None:
        """Remove what is of no use, as far as can be done now."""
        homes = {move.name: move.home for move in moves}
        groups: dict[str, list[Command]] = {}
        for name in names:
            home = homes.get(name[: name.index(b"}") + 1])
            if home is not None:
                groups.setdefault(home, []).append(["UNLINK", name])
        pieces = [partial(self._unlink, home, some, deadline) for home, some in groups.items()]
        self._gang.do(pieces, is_patient=True)

    def _unlink(self, home: str, commands: list[Command], deadline: float) -> None:
        try:
            self._servers.run(home, commands, deadline)
        except TierError:
            pass  # it stays until the server makes room; nobody is served it


def _look_at_lengths(move: Move, number: int, lengths: Iterator[int | None]) -> None:
    """What came of a piece, and of the record before it where it is the first."""
    if move.is_one:
        came = next(lengths)
        move.has_come = came is not None
        if came != len(move.record) + move.block.nbytes:
            move.is_partly_missing = True
            # One that is longer or shorter than its record says is useless, but for a record alone:
            # that is of a node that keeps the parts elsewhere.
            is_ours = move.has_come and came != len(move.record)
            move.is_known = is_ours and has_lengths_of(bytes(move.record), move.block)
        else:
            move.is_known = True
        return
    if number == 0:
        # A record of other parts is not useless: its pieces have other names.
        is_whole = next(lengths) == len(move.record)
        move.is_known = is_whole and has_lengths_of(bytes(move.record), move.block)
        move.is_partly_missing |= not move.is_known
    came = next(lengths)
    move.has_come |= came is not None
    move.is_partly_missing |= came != move.shape.spans[number].nbytes


def _seal(moves: Sequence[Move]) -> None:
    records = sound_records_of([move.block for move in moves])
    for move, record in zip(moves, records, strict=True):
        if record is None:
            move.outcome = Outcome.DAMAGED
        else:
            move.record[:] = record


def _end_reads(moves: Sequence[Move]) -> None:
    """All pieces of these have come, or never will."""
    come: list[Move] = []
    for move in moves:
        if move.reason is not None:
            wipe(move.block)
        elif move.is_partly_missing:
            move.outcome = Outcome.MISSING
            if move.has_come:
                wipe(move.block)
        else:
            come.append(move)
    records = [bytes(move.record) for move in come]
    proven = prove_all(records, [move.block for move in come])
    for move, record, is_proven in zip(come, records, proven, strict=True):
        if is_proven:
            move.outcome = Outcome.DONE
            continue
        wipe(move.block)
        if has_lengths_of(record, move.block):
            move.is_partly_missing = True
            move.fail(TierReason.CHECKSUM_MISMATCH)
        else:  # of other parts
            move.outcome = Outcome.MISSING


def _left_behind(move: Move) -> list[bytes]:
    """Names of values that are of no use after a write: replaced, or written in part."""
    if move.outcome is Outcome.DONE:
        return list(move.leftover)
    refused = move.reason in (TierReason.NO_SPACE, TierReason.REFUSED)
    return move.names if refused or (move.is_cut and move.outcome is Outcome.DAMAGED) else []


def _by_home(moves: Sequence[Move], most: int) -> Iterator[list[Move]]:
    groups: dict[str, list[Move]] = {}
    for move in moves:
        groups.setdefault(move.home, []).append(move)
    for group in groups.values():
        for begin in range(0, len(group), most):
            yield group[begin : begin + most]


def _units(moves: Sequence[Move]) -> Iterator[Unit]:
    """All pieces of all blocks; each server's turn comes as often as any other's."""
    groups = [list(_units_of(group)) for group in _by_home(moves, len(moves) or 1)]
    for some in itertools.zip_longest(*groups):
        yield from filter(None, some)


def _units_of(group: Sequence[Move]) -> Iterator[Unit]:
    unit: Unit = []
    size = 0
    for move in group:
        sizes = [span.nbytes for span in move.shape.spans] or [move.block.nbytes]
        for number, nbytes in enumerate(sizes):
            if unit and (size + nbytes > UNIT_BYTES or len(unit) >= UNIT_NAMES):
                yield unit
                unit, size = [], 0
            unit.append((move, number))
            size += nbytes
    if unit:
        yield unit
