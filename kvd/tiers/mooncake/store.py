"""The Mooncake tier's store: each block is one value, its sealed record before its parts.

A name is `kvd1-`, the scope and the block, in hexadecimal: so those of a namespace begin alike.
Mooncake evicts by itself, and other nodes write and delete the same names. So nothing is kept here
of what is there, and what is read is believed for its seal alone.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvd.tiers.mooncake import codes
from kvd.tiers.mooncake.client import MooncakeClient
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.mooncake.under_way import WritesUnderWay
from kvd.tiers.sealing import has_lengths_of, proves, record_bytes, record_from, wipe
from kvd.tiers.store import (
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierOptions,
    TierReason,
    TierTimeout,
    TierUsage,
    require_blocks,
    require_keys,
    require_scopes,
)
from kvd.tiers.sums import sums_of

NAME_VERSION = "kvd1-"  # other bytes in a value come with another
MAX_PIECE_BYTES = 64 << 20  # in one call of Mooncake's: what the lease of a read must outlast
MAX_PIECE_TRANSFERS = 4096  # records and parts in one, each of which Mooncake moves by itself
MAX_RECORDS_BYTES = 1 << 20  # of a piece's records; enough for one of any block
ROOM_WAIT_S = 0.5  # for Mooncake's eviction, which begins when a block finds no room
MAX_READ_TRIES = 3  # of a value that proves wrong: it may have been replaced meanwhile
REMOVE_AGAIN_S = 0.02
_LEASE_NOTE = "reads took longer than their lease: raise --default_kv_lease_ttl of the master"
_ROOM_NOTE = "blocks found no room: there is no node, or all it holds is being read"
_MASTER_NOTE = "the master does not answer"


@dataclass(slots=True)
class _Move:
    """One block on its way."""

    number: int  # in the caller's batch
    name: str
    block: TierBlock
    record_bytes: int

    @property
    def nbytes(self) -> int:
        """Of the value."""
        return self.record_bytes + self.block.nbytes


class _Records:
    """Memory for the records of one piece, known to the network."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self._memory = memory
        self.address = address

    def put(self, records: Sequence[bytes]) -> None:
        """Lay them end to end."""
        laid = b"".join(records)
        self._memory[: len(laid)] = laid

    def clear(self, nbytes: int) -> None:
        """None of an earlier piece's is left."""
        self._memory[:nbytes] = bytes(nbytes)

    def take(self, moves: Sequence[_Move]) -> list[bytes]:
        """What lies there now, of each block."""
        starts = _starts(moves)
        return [
            bytes(self._memory[start : start + move.record_bytes])
            for start, move in zip(starts, moves, strict=True)
        ]


class MooncakeStore:
    """A `TierStore` in a Mooncake Store. Opening it raises TierError where no master answers.

    Over RDMA blocks must lie in memory that `map_memory` was told of.
    """

    compares_sums = True  # its seals are made of the same

    def __init__(
        self,
        options: TierOptions,
        connect: Callable[[MooncakeOptions], MooncakeClient] = MooncakeClient.connect,
    ) -> None:
        self._options = MooncakeOptions.of(options)
        self._client = connect(self._options)
        self._errors: Counter[TierReason] = Counter()
        self._notes: dict[str, None] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._writes = WritesUnderWay()
        calls = self._options.calls
        self._memory = mmap.mmap(-1, calls * MAX_RECORDS_BYTES)
        base = _address(memoryview(self._memory))
        self._records: queue.SimpleQueue[_Records] = queue.SimpleQueue()
        for start in range(0, calls * MAX_RECORDS_BYTES, MAX_RECORDS_BYTES):
            view = memoryview(self._memory)[start : start + MAX_RECORDS_BYTES]
            self._records.put(_Records(view, base + start))
        try:
            self.map_memory(base, calls * MAX_RECORDS_BYTES)
        except TierError:
            self.close()
            raise

    @property
    def concurrency(self) -> int:
        return self._options.calls

    # -- the pool's memory (MapsMemory) -------------------------------------------------------

    def map_memory(self, address: int, nbytes: int) -> None:
        if not self._client.register(address, nbytes):
            raise TierError(f"{nbytes} bytes can't be had by the network", TierReason.REFUSED)

    def unmap_memory(self, address: int) -> None:
        self._client.unregister(address)

    # -- calls ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        require_keys(keys)
        self._begin_call(deadline)
        answers = self._client.exists(list(map(_name, keys))) if keys else []
        self._require_some(answers)
        return [answer == 1 for answer in answers]

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=False)
        self._begin_call(deadline)
        first: dict[TierKey, int] = {}
        firsts = [first.setdefault(block.key, number) for number, block in enumerate(blocks)]
        outcomes = [Outcome.FAILED] * len(blocks)
        with self._writes.one():
            moves = _moves(blocks, sorted(first.values()))
            self._in_pieces(self._write_piece, moves, outcomes, deadline)
        return [outcomes[number] for number in firsts]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=True)
        self._begin_call(deadline)
        outcomes = [Outcome.FAILED] * len(blocks)
        moves = _moves(blocks, range(len(blocks)))
        self._in_pieces(self._read_piece, moves, outcomes, deadline)
        return outcomes

    def delete(self, keys: Sequence[TierKey], deadline: float) -> None:
        require_keys(keys)
        self._begin_call(deadline)
        left = list(dict.fromkeys(map(_name, keys)))
        while left:
            self._require_time(deadline)
            answers = self._client.remove(left)
            found = zip(left, answers, strict=True)
            left = [name for name, code in found if code not in (codes.OK, codes.NOT_FOUND)]
            self._require_some(answers)
            if left:
                self._client.require_master()
                time.sleep(REMOVE_AGAIN_S)  # being written

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        require_scopes(scopes)
        self._begin_call(deadline)
        if scopes and not self._writes.wait_for_earlier(deadline):
            self._require_time(deadline)
        for scope in scopes:
            removed = 1
            while removed:
                self._require_time(deadline)
                removed = self._client.remove_beginning(NAME_VERSION + scope.hex())
                if removed < 0:
                    reason = codes.reason_of(removed)
                    self._count(reason)
                    raise TierError(f"scopes can't be deleted now (code {removed})", reason)

    def usage(self) -> TierUsage:
        with self._lock:
            errors, notes = dict(self._errors), list(self._notes)
        if not self._client.has_master:
            notes.append(_MASTER_NOTE)
        return TierUsage(0, 0, 0, 0, errors, tuple(notes))

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._client.close()

    # -- what calls have in common ------------------------------------------------------------

    def _begin_call(self, deadline: float) -> None:
        if self._is_closed:
            raise TierError("the store is closed", TierReason.CLOSED)
        self._require_time(deadline)
        try:
            self._client.require_master()
        except TierError as error:
            self._count(error.reason)
            raise

    def _require_time(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            self._count(TierReason.TIMEOUT)
            raise TierTimeout("the deadline passed")

    def _require_some(self, answers: Sequence[int]) -> None:
        """Of a question: TierError where none of it was answered. What failed is counted."""
        bad = [code for code in answers if code < 0 and code not in codes.ABSENT]
        if bad and len(bad) == len(answers):
            self._count(codes.reason_of(bad[0]))
            raise TierError(f"Mooncake gave code {bad[0]}", codes.reason_of(bad[0]))
        for code in bad:
            self._count(codes.reason_of(code))

    def _count(self, reason: TierReason, blocks: int = 1) -> None:
        with self._lock:
            self._errors[reason] += blocks

    def _failed(self, code: int) -> Outcome:
        self._count(codes.reason_of(code))
        if code == codes.LEASE_EXPIRED:
            self._note(_LEASE_NOTE)
        return Outcome.FAILED

    def _note(self, note: str) -> None:
        with self._lock:
            self._notes[note] = None

    def _in_pieces(
        self,
        carry_out: Callable[[list[_Move], _Records, list[Outcome], float], None],
        moves: list[_Move],
        outcomes: list[Outcome],
        deadline: float,
    ) -> None:
        """Carry out a batch in calls of bounded size. What no time is left for has failed."""
        done = 0
        for piece in _pieces(moves):
            if time.monotonic() >= deadline:
                self._count(TierReason.TIMEOUT, len(moves) - done)
                return
            with self._some_records() as records:
                try:
                    carry_out(piece, records, outcomes, deadline)
                except TierError as error:
                    self._count(error.reason, len(moves) - done)
                    if not done:
                        raise
                    return
            done += len(piece)

    @contextlib.contextmanager
    def _some_records(self) -> Iterator[_Records]:
        records = self._records.get()
        try:
            yield records
        finally:
            self._records.put(records)

    # -- writing ------------------------------------------------------------------------------

    def _write_piece(
        self, piece: list[_Move], records: _Records, outcomes: list[Outcome], deadline: float
    ) -> None:
        answers = self._client.exists([move.name for move in piece])
        if all(code < 0 for code in answers):
            raise TierError(f"Mooncake gave code {answers[0]}", codes.reason_of(answers[0]))
        there = [move for move, code in zip(piece, answers, strict=True) if code == 1]
        new = [move for move, code in zip(piece, answers, strict=True) if code != 1]
        if there:
            new += self._not_alike(there, records, outcomes)
        if new:
            self._put(new, records, outcomes, deadline)

    def _not_alike(
        self, there: list[_Move], records: _Records, outcomes: list[Outcome]
    ) -> list[_Move]:
        """Of blocks that are there, those to be written: they have other parts, or left by now."""
        sizes = [move.record_bytes for move in there]
        records.clear(sum(sizes))
        heads = self._client.get_heads([move.name for move in there], records.address, sizes)
        gone: list[_Move] = []
        other: list[_Move] = []
        unclear: list[tuple[_Move, int]] = []
        for move, record, code in zip(there, records.take(there), heads, strict=True):
            if code == move.record_bytes:
                if has_lengths_of(record, move.block):
                    outcomes[move.number] = Outcome.DONE
                else:
                    other.append(move)
            elif code in codes.ABSENT:
                gone.append(move)
            else:
                unclear.append((move, code))
        lengths = self._client.lengths([move.name for move, _ in unclear]) if unclear else []
        for (move, code), length in zip(unclear, lengths, strict=True):
            if length in (None, move.nbytes):
                outcomes[move.number] = self._failed(code)
            else:
                other.append(move)
        removed = self._client.remove([move.name for move in other]) if other else []
        for move, code in zip(other, removed, strict=True):
            if code in (codes.OK, codes.NOT_FOUND):
                gone.append(move)
            else:
                outcomes[move.number] = self._failed(code)
        return gone

    def _put(
        self, moves: list[_Move], records: _Records, outcomes: list[Outcome], deadline: float
    ) -> None:
        moves = self._sealed(moves, records, outcomes)
        places = {move.number: _places(move, at, records) for move, at in _each(moves)}
        patience = min(deadline, time.monotonic() + ROOM_WAIT_S)
        wait_s = 0.002
        while moves:
            found = self._client.put(
                [move.name for move in moves],
                [places[move.number][0] for move in moves],
                [places[move.number][1] for move in moves],
            )
            left: list[_Move] = []
            for move, code in zip(moves, found, strict=True):
                if code == codes.OK:
                    outcomes[move.number] = Outcome.DONE
                elif code in codes.FULL:
                    outcomes[move.number] = Outcome.FULL
                    left.append(move)
                else:
                    outcomes[move.number] = self._failed(code)
            moves = left
            if not moves or time.monotonic() + wait_s >= patience:
                break
            time.sleep(wait_s)  # Mooncake evicts once it had to refuse
            wait_s = min(2 * wait_s, 0.05)
        if moves:
            self._note(_ROOM_NOTE)

    def _sealed(
        self, moves: list[_Move], records: _Records, outcomes: list[Outcome]
    ) -> list[_Move]:
        """Lay the records of these, but for those whose bytes are not what they shall be."""
        sound: list[_Move] = []
        laid: list[bytes] = []
        for move in moves:
            sums = sums_of(move.block.parts)
            if move.block.sums is not None and not np.array_equal(sums, move.block.sums):
                outcomes[move.number] = Outcome.DAMAGED
                self._count(TierReason.CHECKSUM_MISMATCH)
            else:
                sound.append(move)
                laid.append(record_from(move.block, sums))
        records.put(laid)
        return sound

    # -- reading ------------------------------------------------------------------------------

    def _read_piece(
        self, piece: list[_Move], records: _Records, outcomes: list[Outcome], deadline: float
    ) -> None:
        """A value that proves wrong is read again: somebody may have removed or replaced it while
        it came. What proves wrong each time is removed."""
        for _ in range(MAX_READ_TRIES):
            piece = self._read_once(piece, records, outcomes)
            if not piece or time.monotonic() >= deadline:
                break
        if piece:
            self._count(TierReason.CHECKSUM_MISMATCH, len(piece))
            self._client.remove([move.name for move in piece])

    def _read_once(
        self, piece: list[_Move], records: _Records, outcomes: list[Outcome]
    ) -> list[_Move]:
        """Those that came and prove wrong; they are FAILED."""
        records.clear(sum(move.record_bytes for move in piece))
        places = [_places(move, at, records) for move, at in _each(piece)]
        found = self._client.get(
            [move.name for move in piece],
            [each[0] for each in places],
            [each[1] for each in places],
        )
        if all(code in codes.WITHOUT_MASTER for code in found):
            raise TierError("the Mooncake master does not answer", codes.reason_of(found[0]))
        wrong: list[_Move] = []
        unclear: list[tuple[_Move, int]] = []
        for move, record, code in zip(piece, records.take(piece), found, strict=True):
            if code in codes.ABSENT:
                outcomes[move.number] = Outcome.MISSING
            elif code == move.nbytes and proves(record, move.block):
                outcomes[move.number] = Outcome.DONE
            elif code == move.nbytes:
                wipe(move.block)
                outcomes[move.number] = Outcome.MISSING
                if has_lengths_of(record, move.block):
                    outcomes[move.number] = Outcome.FAILED
                    wrong.append(move)
            else:
                wipe(move.block)
                unclear.append((move, code))
        self._clear_up(unclear, outcomes)
        return wrong

    def _clear_up(self, unclear: Sequence[tuple[_Move, int]], outcomes: list[Outcome]) -> None:
        """Of blocks that did not come: whether what is there has another length."""
        odd = [
            move.name
            for move, code in unclear
            if code >= 0 or code in (codes.SIZE_DIFFERS, codes.TRANSFER_FAILED)
        ]
        lengths = dict(zip(odd, self._client.lengths(odd), strict=True)) if odd else {}
        for move, code in unclear:
            if move.name in lengths and lengths[move.name] != move.nbytes:
                outcomes[move.number] = Outcome.MISSING
            else:
                outcomes[move.number] = self._failed(code)


def _name(key: TierKey) -> str:
    return f"{NAME_VERSION}{key.scope.hex()}-{key.block.hex()}"


def _moves(blocks: Sequence[TierBlock], numbers: Sequence[int]) -> list[_Move]:
    return [
        _Move(number, _name(block.key), block, record_bytes(len(block.parts)))
        for number, block in zip(numbers, map(blocks.__getitem__, numbers), strict=True)
    ]


def _pieces(moves: Sequence[_Move]) -> Iterator[list[_Move]]:
    """Blocks that go in one call: bounded, and no name twice."""
    piece: list[_Move] = []
    names: set[str] = set()
    size = records = transfers = 0
    for move in moves:
        size, records = size + move.nbytes, records + move.record_bytes
        transfers += 1 + len(move.block.parts)
        is_full = (
            size > MAX_PIECE_BYTES or records > MAX_RECORDS_BYTES or transfers > MAX_PIECE_TRANSFERS
        )
        if piece and (is_full or move.name in names):
            yield piece
            piece, names = [], set()
            size, records, transfers = move.nbytes, move.record_bytes, 1 + len(move.block.parts)
        piece.append(move)
        names.add(move.name)
    if piece:
        yield piece


def _starts(moves: Sequence[_Move]) -> list[int]:
    starts, at = [], 0
    for move in moves:
        starts.append(at)
        at += move.record_bytes
    return starts


def _each(moves: Sequence[_Move]) -> Iterator[tuple[_Move, int]]:
    return zip(moves, _starts(moves), strict=True)


def _places(move: _Move, start: int, records: _Records) -> tuple[list[int], list[int]]:
    """Addresses and sizes of a value's pieces: the record, and each part."""
    parts = move.block.parts
    return (
        [records.address + start, *map(_address, parts)],
        [move.record_bytes, *(part.nbytes for part in parts)],
    )


def _address(part: memoryview) -> int:
    address: int = np.frombuffer(part, dtype=np.uint8).__array_interface__["data"][0]
    return address
