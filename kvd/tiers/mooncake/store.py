"""The Mooncake tier's store: each block is one value, its sealed record before its parts.

A block is begun with the master, moved, and then ended, so that it can be seen; or it is given up.

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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from kvd.native import address_of
from kvd.tiers.gang import Gang
from kvd.tiers.mooncake import codes
from kvd.tiers.mooncake.client import MooncakeClient
from kvd.tiers.mooncake.in_use import NamesInUse
from kvd.tiers.mooncake.moves import (
    MAX_STAGED_BYTES,
    NAME_VERSION,
    MooncakeMove,
    moves_of,
    name_of,
    pieces_of,
)
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.mooncake.staging import NetworkMemory
from kvd.tiers.mooncake.under_way import WritesUnderWay
from kvd.tiers.sealing import has_lengths_of, wipe
from kvd.tiers.store import (
    Found,
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierOptions,
    TierReason,
    TierTimeout,
    TierUsage,
    firsts_of,
    require_blocks,
    require_call,
    require_keys,
    require_scopes,
)

PIECES_AT_ONCE = 2  # of one batch
ROOM_WAIT_S = 0.5  # for Mooncake's eviction, which begins when a block finds no room
MAX_READ_TRIES = 3  # of a value that proves wrong: it may have been replaced meanwhile
# Blocks with parts up to this go as one stretch of memory each, for a copy of them. By RDMA a
# second stretch costs little.
STAGED_PART_BYTES = {"tcp": 256 << 10, "rdma": 16 << 10}
NOTED_S = 10.0  # since it happened the last time
_LEASE_NOTE = "reads took longer than their lease: raise --default_kv_lease_ttl of the master"
_ROOM_NOTE = "blocks found no room: there is no node, or all it holds is being read"
_MASTER_NOTE = "the master does not answer"


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
        self._notes: dict[str, float] = {}  # and when each was true the last time
        self._lock = threading.Lock()
        self._is_closed = False
        self._writes = WritesUnderWay()
        self._in_use = NamesInUse()
        calls = self._options.calls
        self._gang = Gang("mooncake", calls * PIECES_AT_ONCE)
        self._staged_part_bytes = STAGED_PART_BYTES[self._options.protocol]
        staged_bytes = calls * PIECES_AT_ONCE * MAX_STAGED_BYTES
        self._memory = mmap.mmap(-1, staged_bytes)
        base = address_of(self._memory)
        self._stagings: queue.LifoQueue[NetworkMemory] = queue.LifoQueue()  # warm ones first
        for start in range(0, staged_bytes, MAX_STAGED_BYTES):
            view = memoryview(self._memory)[start : start + MAX_STAGED_BYTES]
            self._stagings.put(NetworkMemory(view, base + start))
        try:
            self.map_memory(base, staged_bytes)
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

    def exists(self, keys: Sequence[TierKey], deadline: float) -> Sequence[Found | bool]:
        require_keys(keys)
        self._begin_call(deadline)
        answers = self._client.exists(list(map(name_of, keys))) if keys else []
        self._require_some(answers)
        return list(map(_found, answers))

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=False)
        self._begin_call(deadline)
        firsts = firsts_of(blocks)
        outcomes = [Outcome.FAILED] * len(blocks)
        with self._writes.one():
            moves = moves_of(blocks, sorted(set(firsts)), self._staged_part_bytes)
            self._in_pieces(self._write_piece, moves, outcomes, deadline)
        return [outcomes[number] for number in firsts]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=True)
        self._begin_call(deadline)
        outcomes = [Outcome.FAILED] * len(blocks)
        moves = moves_of(blocks, range(len(blocks)), self._staged_part_bytes)
        self._in_pieces(self._read_piece, moves, outcomes, deadline)
        return outcomes

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
        since = time.monotonic() - NOTED_S
        with self._lock:
            errors = dict(self._errors)
            notes = [note for note, at in self._notes.items() if at >= since]
        if not self._client.has_master:
            notes.append(_MASTER_NOTE)
        return TierUsage(0, 0, 0, 0, errors, tuple(notes))

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._gang.close()
        self._client.close()

    # -- what calls have in common ------------------------------------------------------------

    def _begin_call(self, deadline: float) -> None:
        with self._lock:
            require_call(deadline, self._errors, is_closed=self._is_closed)
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
            self._notes[note] = time.monotonic()

    def _in_pieces(
        self,
        carry_out: Callable[[list[MooncakeMove], NetworkMemory, list[Outcome], float], None],
        moves: list[MooncakeMove],
        outcomes: list[Outcome],
        deadline: float,
    ) -> None:
        """Carry out a batch in calls of bounded size, some at once: one's bytes move while
        another's are copied and summed up. What no time is left for has failed."""
        pieces = deque(pieces_of(moves))
        left, refused = [len(moves)], list[tuple[str, TierReason]]()

        def carry_out_some() -> None:
            while not refused and time.monotonic() < deadline:
                try:
                    piece = pieces.popleft()
                except IndexError:
                    return
                names = [move.name for move in piece]
                with self._in_use.held(names, deadline) as may, self._some_staging() as staging:
                    if not may:
                        return
                    try:
                        carry_out(piece, staging, outcomes, deadline)
                    except TierError as error:
                        refused.append((str(error), error.reason))
                        return
                with self._lock:
                    left[0] -= len(piece)

        if len(pieces) == 1:
            carry_out_some()
        else:
            self._gang.do([carry_out_some] * min(PIECES_AT_ONCE, len(pieces)))
        if refused:
            message, reason = refused[0]
            self._count(reason, left[0])
            if left[0] == len(moves):
                raise TierError(message, reason)
        elif left[0]:
            self._count(TierReason.TIMEOUT, left[0])

    @contextlib.contextmanager
    def _some_staging(self) -> Iterator[NetworkMemory]:
        staging = self._stagings.get()
        try:
            yield staging
        finally:
            self._stagings.put(staging)

    # -- writing ------------------------------------------------------------------------------

    def _write_piece(
        self,
        piece: list[MooncakeMove],
        staging: NetworkMemory,
        outcomes: list[Outcome],
        deadline: float,
    ) -> None:
        there = self._put(piece, staging, outcomes, deadline)
        gone = self._not_alike(there, staging, outcomes) if there else []
        for move in self._put(gone, staging, outcomes, deadline) if gone else ():
            outcomes[move.number] = Outcome.DONE  # somebody else writes it

    def _not_alike(
        self, there: list[MooncakeMove], staging: NetworkMemory, outcomes: list[Outcome]
    ) -> list[MooncakeMove]:
        """Of blocks that are there, those to be written: they have other parts, or left by now."""
        staging.place(there)
        heads = self._client.get_heads(
            [move.name for move in there],
            staging.address,
            [(move.at, move.record_bytes) for move in there],
        )
        gone: list[MooncakeMove] = []
        other: list[MooncakeMove] = []
        unclear: list[tuple[MooncakeMove, int]] = []
        for move, code in zip(there, heads, strict=True):
            if code == move.record_bytes:
                if has_lengths_of(staging.record(move), move.block):
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
        self,
        moves: list[MooncakeMove],
        staging: NetworkMemory,
        outcomes: list[Outcome],
        deadline: float,
    ) -> list[MooncakeMove]:
        """Write these, but for those that are there, or are being written: they are given back."""
        there: list[MooncakeMove] = []
        patience = min(deadline, time.monotonic() + ROOM_WAIT_S)
        wait_s = 0.002
        while True:
            begun: list[MooncakeMove] = []
            left: list[MooncakeMove] = []
            found = self._client.begin_puts(
                [move.name for move in moves], [move.nbytes for move in moves]
            )
            _require_master(found)
            for move, code in zip(moves, found, strict=True):
                if code == codes.OK:
                    begun.append(move)
                elif code in codes.THERE:
                    there.append(move)
                elif code in codes.FULL:
                    outcomes[move.number] = Outcome.FULL
                    left.append(move)
                else:
                    outcomes[move.number] = self._failed(code)
            if begun:
                self._fill(begun, staging, outcomes)
            moves = left
            if not moves or time.monotonic() + wait_s >= patience:
                break
            time.sleep(wait_s)  # Mooncake evicts once it had to refuse
            wait_s = min(2 * wait_s, 0.05)
        if moves:
            self._note(_ROOM_NOTE)
        return there

    def _fill(
        self, begun: list[MooncakeMove], staging: NetworkMemory, outcomes: list[Outcome]
    ) -> None:
        """Write blocks for which there is room. What does not become whole is given up."""
        written: list[MooncakeMove] = []
        ended: list[MooncakeMove] = []
        try:
            staging.place(begun)
            for move in staging.seal(begun):
                outcomes[move.number] = Outcome.DAMAGED
                self._count(TierReason.CHECKSUM_MISMATCH)
            sound = [move for move in begun if outcomes[move.number] is not Outcome.DAMAGED]
            found = self._client.put([move.name for move in sound], *_stretches(sound, staging))
            for move, code in zip(sound, found, strict=True):
                if code == move.nbytes:
                    written.append(move)
                elif code == codes.OK:
                    outcomes[move.number] = Outcome.DONE
                    ended.append(move)
                else:
                    outcomes[move.number] = self._failed(code)
        finally:
            if len(written) + len(ended) < len(begun):
                whole = {move.number for move in (*written, *ended)}
                self._client.give_up_puts([move.name for move in begun if move.number not in whole])
        found = self._client.end_puts([move.name for move in written]) if written else []
        for move, code in zip(written, found, strict=True):
            outcomes[move.number] = Outcome.DONE if code == codes.OK else self._failed(code)

    # -- reading ------------------------------------------------------------------------------

    def _read_piece(
        self,
        piece: list[MooncakeMove],
        staging: NetworkMemory,
        outcomes: list[Outcome],
        deadline: float,
    ) -> None:
        """A value that proves wrong is read again: somebody may have removed or replaced it while
        it came. What proves wrong each time is removed."""
        for _ in range(MAX_READ_TRIES):
            piece = self._read_once(piece, staging, outcomes)
            if not piece or time.monotonic() >= deadline:
                break
        if piece:
            self._count(TierReason.CHECKSUM_MISMATCH, len(piece))
            self._client.remove([move.name for move in piece])

    def _read_once(
        self, piece: list[MooncakeMove], staging: NetworkMemory, outcomes: list[Outcome]
    ) -> list[MooncakeMove]:
        """Those that came and prove wrong; they are FAILED."""
        names = [move.name for move in piece]
        found = self._client.begin_gets(names)
        _require_master(found)
        came: list[MooncakeMove] = []
        unclear: list[tuple[MooncakeMove, int]] = []
        begun: list[MooncakeMove] = []
        for move, code in zip(piece, found, strict=True):
            if code == codes.OK:
                begun.append(move)
            elif code in codes.ABSENT:
                outcomes[move.number] = Outcome.MISSING
            else:
                unclear.append((move, code))
        if begun:
            staging.place(begun)
            try:
                found = self._client.get([move.name for move in begun], *_stretches(begun, staging))
            finally:
                self._client.end_gets(names)
            for move, code in zip(begun, found, strict=True):
                if code == move.nbytes:
                    came.append(move)
                else:
                    if not move.is_staged:
                        wipe(move.block)
                    unclear.append((move, code))
        unproved = staging.deliver(came)
        for move in came:
            outcomes[move.number] = Outcome.DONE
        wrong: list[MooncakeMove] = []
        for move in unproved:
            outcomes[move.number] = Outcome.MISSING
            if has_lengths_of(staging.record(move), move.block):
                outcomes[move.number] = Outcome.FAILED
                wrong.append(move)
        self._clear_up(unclear, outcomes)
        return wrong

    def _clear_up(
        self, unclear: Sequence[tuple[MooncakeMove, int]], outcomes: list[Outcome]
    ) -> None:
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


def _found(code: int) -> Found:
    if code < 0 and code not in codes.ABSENT:
        return Found.UNKNOWN
    return Found.THERE if code == 1 else Found.ABSENT


def _require_master(answers: Sequence[int]) -> None:
    """TierError where it answered for none of these."""
    if all(code in codes.WITHOUT_MASTER for code in answers):
        raise TierError("the Mooncake master does not answer", codes.reason_of(answers[0]))


def _stretches(
    moves: Sequence[MooncakeMove], staging: NetworkMemory
) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes of these, as Mooncake takes them."""
    each = [staging.stretches(move) for move in moves]
    return [addresses for addresses, _ in each], [sizes for _, sizes in each]
