"""The store of a Valkey tier: sealed blocks in the servers' memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvd.tiers.gang import Gang, require_time
from kvd.tiers.sealing import record_bytes
from kvd.tiers.store import (
    Found,
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierOptions,
    TierReason,
    TierUsage,
    firsts_of,
    require_blocks,
    require_call,
    require_keys,
    require_scopes,
)
from kvd.tiers.valkey.line import Command, ServerRefusal
from kvd.tiers.valkey.moves import Move, Moves
from kvd.tiers.valkey.names import NameBook, slot_of
from kvd.tiers.valkey.options import ValkeyOptions
from kvd.tiers.valkey.servers import Servers, count_in, keys_of

CALLS_AT_ONCE = 5
NAMES_AT_ONCE = 1024  # that one command asks for
RUN_BYTES = 16 << 20  # whose names are made and looked for at once, while others move
LEAST_IN_RUN = 64  # blocks
MAX_UNFINISHED = 256  # deletions that are remembered how far they have come
_SCAN_COUNT = "1000"
_BEGIN = b"0"  # the cursor with which SCAN begins and ends


@dataclass(slots=True)
class _Sweep:
    """How far the names of one server were gone through."""

    run: str = ""  # of the server's process, whose cursors mean nothing to the next
    cursor: bytes = _BEGIN
    found: bool = False
    is_over: bool = False

    def begin_run(self, run: str) -> None:
        """What another run's cursors mean is forgotten: from the beginning then."""
        if self.run != run:
            self.run, self.cursor, self.is_over = run, _BEGIN, False


@dataclass(slots=True)
class _Deletion:
    """How far the names of all servers were gone through, once more, for what is to go."""

    homes: list[str] = field(default_factory=list)
    sweeps: dict[str, _Sweep] = field(default_factory=dict)
    clean: int = 0  # looks in a row that found none

    def go_through(self, homes: list[str]) -> None:
        """Look through these servers: where they are others than before, from the beginning."""
        if homes != self.homes:
            self.homes, self.sweeps, self.clean = homes, {}, 0
        for home in homes:
            self.sweeps.setdefault(home, _Sweep())

    def end_look(self, homes: list[str]) -> None:
        """All were gone through; these are the servers now."""
        is_clean = homes == self.homes and not any(each.found for each in self.sweeps.values())
        self.clean = self.clean + 1 if is_clean else 0
        self.sweeps.clear()

    @property
    def is_done(self) -> bool:
        # Between the looks at two servers a name may move to the one that was looked at.
        return self.clean >= (2 if len(self.homes) > 1 else 1)


class ValkeyStore:
    """A `TierStore` in a Valkey cluster, or in one server. Opening it may raise TierUnusable.

    Servers that are away when it is opened are met when they come.
    """

    compares_sums = True

    def __init__(self, options: TierOptions) -> None:
        self._options = ValkeyOptions.of(options)
        self._book = NameBook(self._options.prefix, self._options.value_bytes)
        self._servers = Servers(self._options)
        self._servers.open()
        self._gang = Gang("kvd-valkey", self._options.threads)
        self._moves = Moves(self._servers, self._gang, self._book, self._options.ttl_seconds)
        self._errors: Counter[TierReason] = Counter()
        self._moved = Counter(blocks=1, values=1)
        self._evicted_blocks = 0.0
        self._evicted_keys: dict[str, int] = {}  # by server, of which it told last
        self._unfinished: dict[tuple[bytes, ...], _Deletion] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def concurrency(self) -> int:
        return CALLS_AT_ONCE

    def exists(self, keys: Sequence[TierKey], deadline: float) -> Sequence[Found | bool]:
        require_keys(keys)
        self._begin_call(deadline)
        names = [self._book.record_name(key) for key in keys]
        there: dict[bytes, Found] = {}
        failed: Counter[TierReason] = Counter()

        def look(home: str, some: list[bytes]) -> None:
            answers = self._servers.run(home, [[b"EXISTS", name] for name in some], deadline)
            for name, answer in zip(some, answers, strict=True):
                there[name] = _found(answer)

        self._each(self._groups(names), look, failed, deadline)
        if failed and not there:
            raise TierError("no server answered", failed.most_common(1)[0][0])
        return [there.get(name, Found.UNKNOWN) for name in names]

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=False)
        self._begin_call(deadline)
        if self._unfinished:
            self._begin_sweeps_anew(block.key.scope for block in blocks)
        firsts = firsts_of(blocks)
        moves: dict[int, Move] = {}
        self._moves.write(self._runs(blocks, sorted(set(firsts)), moves), deadline)
        self._count(moves.values())
        return [moves[number].outcome or Outcome.FAILED for number in firsts]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=True)
        self._begin_call(deadline)
        moves: dict[int, Move] = {}
        self._moves.read(self._runs(blocks, range(len(blocks)), moves), deadline)
        self._count(moves.values())
        return [move.outcome or Outcome.FAILED for move in moves.values()]

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        require_scopes(scopes)
        self._begin_call(deadline)
        if scopes:
            self._told(partial(self._delete_scopes, scopes, deadline))

    def usage(self) -> TierUsage:
        told = dict(self._servers.told)
        keys = sum(keys_of(said) for said in told.values())
        limits = [count_in(said, "maxmemory") for said in told.values()]
        each = self._moved["values"] / self._moved["blocks"]
        now = {home: count_in(said, "evicted_keys") for home, said in told.items()}
        for home, count in now.items():
            before = self._evicted_keys.get(home, count)
            # One that was started again counts from 0.
            self._evicted_blocks += (count - before if count >= before else count) / each
        self._evicted_keys = now
        return TierUsage(
            blocks=-int(-keys // each),
            bytes=sum(count_in(said, "used_memory") for said in told.values()),
            capacity_bytes=sum(limits) if all(limits) else 0,
            evicted_blocks=int(self._evicted_blocks),
            errors=dict(self._errors),
            notes=self._servers.notes,
        )

    def was_emptied(self) -> bool:
        """Whether a server was emptied or started anew since the last call (`NoticesEmptying`)."""
        if not self._servers.was_emptied:
            return False
        self._servers.was_emptied = False  # before it is told: what is lost from now on is, too
        return True

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._gang.close()
        self._servers.close()

    # -- deleting -----------------------------------------------------------------------------

    def _delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        """Look through all names of each server, again and again until there is none.

        Once would do, but for names that move from a server to another meanwhile: of several
        servers there is none once two looks in a row have found none. What the deadline cuts short
        the next call goes on with: all names may take longer than any deadline.
        """
        self._servers.settle_doubts(deadline)
        begins = tuple(self._book.begin_of_scope(scope) for scope in scopes)
        with self._lock:
            work = self._unfinished.pop(begins, None) or _Deletion()
        try:
            while not work.is_done:
                self._servers.refresh()
                work.go_through(self._servers.holders(deadline))
                self._sweep_all(work, begins, deadline)
                self._servers.refresh()
                work.end_look(self._servers.holders(deadline))
        except TierError:
            with self._lock:
                self._unfinished[begins] = work
                if len(self._unfinished) > MAX_UNFINISHED:
                    del self._unfinished[next(iter(self._unfinished))]
            raise

    def _sweep_all(self, work: _Deletion, begins: tuple[bytes, ...], deadline: float) -> None:
        pattern = begins[0] if len(begins) == 1 else self._book.begin_of_scope(b"")
        failed: Counter[TierReason] = Counter()
        with self._gang.flow(is_patient=True) as flow:

            def go_on(step: Callable[[str, _Sweep], None], home: str) -> None:
                """A piece for each look: questions and reads have their turn between two."""
                sweep = work.sweeps[home]
                well = self._ends_well(partial(step, home, sweep), failed, 1, deadline)
                if well and not sweep.is_over:
                    flow.add([partial(go_on, look, home)])

            def begin(home: str, sweep: _Sweep) -> None:
                sweep.begin_run(self._servers.run_of(home, deadline))

            def look(home: str, sweep: _Sweep) -> None:
                self._sweep_some(home, sweep, pattern + b"*", begins, deadline)

            flow.add([partial(go_on, begin, home) for home in work.homes])
        _require_none(failed)

    def _sweep_some(
        self, home: str, sweep: _Sweep, pattern: bytes, begins: tuple[bytes, ...], deadline: float
    ) -> None:
        """Look at the next names of one server, and remove what is meant."""
        command = ["SCAN", sweep.cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT]
        (said,) = self._servers.run(home, [command], deadline)
        _require_done([said])
        cursor, names = _found_names(said)
        some = [name for name in names if name.startswith(begins)]
        if some:
            sweep.found = True
            self._unlink(home, some, deadline)
        sweep.cursor, sweep.is_over = cursor, cursor == _BEGIN
        if sweep.is_over:  # another run may have gone on with it: once more then
            sweep.begin_run(self._servers.run_of(home, deadline))

    def _unlink(self, home: str, names: Sequence[bytes], deadline: float) -> None:
        """Also of slots that are on their way to this server: they may stay so for ever."""
        answers = self._servers.run(
            home, [["UNLINK", name] for name in names], deadline, changes=True
        )
        coming = [name for name, said in zip(names, answers, strict=True) if _is_elsewhere(said)]
        _require_done([said for said in answers if not _is_elsewhere(said)])
        if coming:
            commands: list[Command] = [["ASKING"], ["UNLINK", b""]] * len(coming)
            commands[1::2] = [["UNLINK", name] for name in coming]
            _require_done(self._servers.run(home, commands, deadline, changes=True)[1::2])

    def _begin_sweeps_anew(self, scopes: Iterable[bytes]) -> None:
        """What is written now may have names that a deletion has gone past."""
        begins = [self._book.begin_of_scope(scope) for scope in set(scopes)]
        with self._lock:
            for known in list(self._unfinished):
                if any(begin.startswith(known) for begin in begins):
                    del self._unfinished[known]

    # -- calls --------------------------------------------------------------------------------

    def _begin_call(self, deadline: float) -> None:
        with self._lock:
            require_call(deadline, self._errors, is_closed=self._is_closed)

    def _told(self, call: Callable[[], None]) -> None:
        try:
            call()
        except TierError as error:
            with self._lock:
                self._errors[error.reason] += 1
            raise

    def _runs(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], moves: dict[int, Move]
    ) -> Iterator[list[Move]]:
        """The moves of some blocks, a run of them at a time; noted by the blocks' numbers."""
        at = 0
        while at < len(numbers):
            size = max(1, blocks[numbers[at]].nbytes)
            some = numbers[at : at + max(LEAST_IN_RUN, RUN_BYTES // size)]
            at += len(some)
            run = [self._move(number, blocks[number]) for number in some]
            moves.update(zip(some, run, strict=True))
            yield run

    def _move(self, number: int, block: TierBlock) -> Move:
        name, slot = self._book.place_of(block.key)
        shape = self._book.shape_of(block)
        home = self._servers.home_of(slot)
        self._moved.update(blocks=1, values=1 + len(shape.spans))
        record = bytearray(record_bytes(len(block.parts)))
        return Move(number, block, name, shape, home, record)

    def _count(self, moves: Iterable[Move]) -> None:
        with self._lock:
            for move in moves:
                if move.reason is not None and move.outcome is None:
                    self._errors[move.reason] += 1

    def _groups(self, names: Sequence[bytes]) -> list[tuple[str, list[bytes]]]:
        """Names by their server, so many at once as one command takes."""
        groups: dict[str, list[bytes]] = {}
        for name in names:
            groups.setdefault(self._servers.home_of(slot_of(name)), []).append(name)
        return [
            (home, group[begin : begin + NAMES_AT_ONCE])
            for home, group in groups.items()
            for begin in range(0, len(group), NAMES_AT_ONCE)
        ]

    def _each(
        self,
        groups: Sequence[tuple[str, list[bytes]]],
        call: Callable[[str, list[bytes]], None],
        failed: Counter[TierReason],
        deadline: float,
    ) -> None:
        """Call for each server; `failed` has what went wrong."""

        def one(home: str, some: list[bytes]) -> None:
            self._ends_well(partial(call, home, some), failed, len(some), deadline)

        self._gang.do([partial(one, home, some) for home, some in groups])

    def _ends_well(
        self, call: Callable[[], None], failed: Counter[TierReason], blocks: int, deadline: float
    ) -> bool:
        """Call, if there is time; `failed` has what went wrong."""
        try:
            require_time(deadline)
            call()
        except TierError as error:
            with self._lock:
                failed[error.reason] += 1
                self._errors[error.reason] += blocks
            return False
        return True


def _found(answer: object) -> Found:
    if isinstance(answer, int) and 0 <= answer <= 1:
        return Found(answer)
    return Found.UNKNOWN


def _require_none(failed: Counter[TierReason]) -> None:
    if failed:
        reason = failed.most_common(1)[0][0]
        raise TierError(f"{sum(failed.values())} of the servers failed: {reason}", reason)


def _require_done(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, TierError):
            raise answer


def _is_elsewhere(answer: object) -> bool:
    return isinstance(answer, ServerRefusal) and answer.code == "MOVED"


def _found_names(said: object) -> tuple[bytes, list[bytes]]:
    """What SCAN says: where to go on, and names. TierError where it is something else."""
    match said:
        case [bytes(cursor), list(names)] if all(isinstance(name, bytes) for name in names):
            return cursor, names
    raise TierError("a server names nothing when it is asked for names", TierReason.REFUSED)
