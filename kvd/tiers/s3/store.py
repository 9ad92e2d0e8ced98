"""The store of an S3 tier: sealed blocks, one object each, many requests at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvd.tiers.gang import Gang
from kvd.tiers.s3.bucket import Bucket
from kvd.tiers.s3.options import S3Options
from kvd.tiers.sealing import wipe
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

CALLS_AT_ONCE = 5
_NO_LIST = (
    "what it lists lacks what was just put there: what answers is no bucket, or lists in part"
)
_T = TypeVar("_T")


class S3Store:
    """A `TierStore` in a bucket. Opening it may raise TierUnusable.

    A bucket that is away when it is opened is met when it comes.
    """

    compares_sums = True
    moves_what_is_there = True

    def __init__(self, options: TierOptions) -> None:
        self._options = S3Options.of(options)
        self._bucket = Bucket(self._options)
        self._bucket.meet()
        self._gang = Gang("kvd-s3", self._options.threads)
        self._errors: Counter[TierReason] = Counter()
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def concurrency(self) -> int:
        return CALLS_AT_ONCE

    def exists(self, keys: Sequence[TierKey], deadline: float) -> Sequence[Found | bool]:
        require_keys(keys)
        self._begin_call(deadline)
        found = self._each(keys, lambda key: self._bucket.has(self._bucket.name_of(key)), deadline)
        if found and all(isinstance(each, TierError) for each in found):
            first = found[0]
            assert isinstance(first, TierError), "all are"
            raise TierError(str(first), first.reason)
        return [_found(each) for each in found]

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=False)
        self._begin_call(deadline)
        firsts = firsts_of(blocks)
        numbers = sorted(set(firsts))
        found = self._each(
            [blocks[number] for number in numbers],
            lambda block: self._bucket.write(self._bucket.name_of(block.key), block),
            deadline,
            is_patient=True,
        )
        outcomes = dict(zip(numbers, map(_outcome, found), strict=True))
        return [outcomes[number] for number in firsts]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=True)
        self._begin_call(deadline)
        found = self._each(blocks, self._read, deadline)
        return list(map(_outcome, found))

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        require_scopes(scopes)
        self._begin_call(deadline)
        above: dict[str, list[bytes]] = {}
        for scope in scopes:
            above.setdefault(self._bucket.below_scopes(scope), []).append(scope)
        for below in above:
            self._require_no_late_writes(below)
        sweeps = [self._sweep(below, some, deadline) for below, some in above.items()]
        self._raise_first(self._in_turn(sweeps))

    def usage(self) -> TierUsage:
        return TierUsage(
            blocks=0,
            bytes=0,
            capacity_bytes=0,
            errors=dict(self._errors),
            notes=self._bucket.notes,
        )

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._gang.close()

    def _read(self, block: TierBlock) -> Outcome:
        name = self._bucket.name_of(block.key)
        try:
            outcome = self._bucket.read(name, block)
        except TierError:
            wipe(block)
            raise
        if outcome is Outcome.FAILED:
            wipe(block)
            with self._lock:
                self._errors[TierReason.CHECKSUM_MISMATCH] += 1
            self._bucket.remove([name])
        return outcome

    def _in_turn(self, sweeps: Sequence[Iterator[None]]) -> list[object]:
        """Go through these to their ends; what requests wait for has its turn after each step."""
        found: list[object] = [None] * len(sweeps)
        with self._gang.flow(is_patient=True) as flow:

            def go_on(number: int) -> None:
                try:
                    for _ in sweeps[number]:
                        flow.add([partial(go_on, number)])
                        return
                except TierError as error:
                    found[number] = self._noted(error)

            flow.add([partial(go_on, number) for number in range(len(sweeps))])
        return found

    def _sweep(self, below: str, scopes: list[bytes], deadline: float) -> Iterator[None]:
        """Remove what lies below a name and is of these scopes, until nothing of it is listed."""
        self._bucket.take_turn(deadline)
        witness = self._bucket.bear_witness(below)
        try:
            left = True
            while left:
                left = has_witness = False
                self._bucket.take_turn(deadline)
                for names in self._bucket.names(below, deadline):
                    has_witness |= witness in names
                    self._bucket.take_turn(deadline)
                    mine = [n for n in names if any(self._bucket.is_of(n, s) for s in scopes)]
                    if mine:
                        left = True
                        self._bucket.remove(mine)
                    yield
                if not has_witness:
                    raise TierError(_NO_LIST, TierReason.IO_ERROR)
        finally:
            self._bucket.dismiss(witness)

    def _require_no_late_writes(self, below: str) -> None:
        try:
            self._bucket.require_no_late_writes(below)
        except TierError as error:
            with self._lock:
                self._errors[error.reason] += 1
            raise

    def _each(
        self,
        given: Sequence[_T],
        call: Callable[[_T], object],
        deadline: float,
        *,
        is_patient: bool = False,
    ) -> list[object]:
        """What the call gives for each, or the TierError that it ended in."""
        found: list[object] = [None] * len(given)

        def one(number: int) -> None:
            try:
                self._bucket.take_turn(deadline)
                found[number] = call(given[number])
            except TierError as error:
                found[number] = self._noted(error)

        pieces = [partial(one, number) for number in range(len(given))]
        self._gang.do(pieces, is_patient=is_patient)
        return found

    def _noted(self, error: TierError) -> TierError:
        """Counted, and without its frames: views of lent memory hang on them."""
        with self._lock:
            self._errors[error.reason] += 1
        return TierError(str(error), error.reason)

    def _raise_first(self, found: list[object]) -> None:
        for each in found:
            if isinstance(each, TierError):
                raise each

    def _begin_call(self, deadline: float) -> None:
        with self._lock:
            require_call(deadline, self._errors, is_closed=self._is_closed)


def _found(found: object) -> Found:
    if isinstance(found, TierError):
        return Found.UNKNOWN
    return Found.THERE if found is True else Found.ABSENT


def _outcome(found: object) -> Outcome:
    if isinstance(found, TierError):
        return Outcome.FULL if found.reason is TierReason.NO_SPACE else Outcome.FAILED
    assert isinstance(found, Outcome), "a call gives an outcome"
    return found
