"""Cutting large calls into pieces, so that small ones are not held up behind them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvd.core.actions import Answer
from kvd.core.events import LeaseMode, Query, Run, StoreRequested
from kvd.core.keys import LeaseId
from kvd_proto.key_status import HIT

# Keys handled without yielding to other calls: about 1 ms of the event loop for a store.
PIECE_KEYS = 256
# Of a lookup, that takes 0.2 to 0.3 ms. Half of that is what a piece costs whatever its size.
LOOKUP_PIECE_KEYS = 1024
# A query and a run cost something whatever their size: a run of a store up to half a millisecond.
PIECE_QUERIES = 16
PIECE_RUNS = 4
# Small stores that begin in one event: about 1.5 ms, of which a third is for all of them. One that
# the worker is never ready for, or gives up, takes the others with it.
STORES_TOGETHER = 32
SMALL_STORE_KEYS = PIECE_KEYS // STORES_TOGETHER
RUNS_TOGETHER = 64
GROUPS_TOGETHER = 8  # of all of them: 3 to 4 ms
PIECE_TOLD = 16  # requests of which a client tells: half a millisecond
PIECE_IDS = 256  # of jobs, leases or requests that have ended
_ONE_HIT = bytes([HIT])


@dataclass(frozen=True, slots=True, eq=False)
class QueryPiece:
    """Some keys of one query; `number` is the query's place in the call."""

    number: int
    query: Query


def query_pieces(queries: Sequence[Query]) -> Iterator[list[QueryPiece]]:
    """Cut queries into pieces of a few, with at most LOOKUP_PIECE_KEYS keys, in order.

    Of a request that is too large for one, each piece has as large a part of every query, and one
    that fits is not cut: what may be leased is shared by its groups. Not so beyond PIECE_QUERIES.
    """
    piece: list[QueryPiece] = []
    room = LOOKUP_PIECE_KEYS
    for together in _parts_of_requests(queries):
        count = sum(len(part) for _, part in together)
        if piece and (count > room or len(piece) + len(together) > PIECE_QUERIES):
            yield piece
            piece, room = [], LOOKUP_PIECE_KEYS
        for number, part in together:
            query, start = queries[number], part.start
            while True:
                stop = min(part.stop, start + room)
                keys, first = query.keys[start:stop], query.first_block + start
                piece.append(QueryPiece(number, replace(query, keys=keys, first_block=first)))
                room -= stop - start
                if room == 0 or len(piece) == PIECE_QUERIES:
                    yield piece
                    piece, room = [], LOOKUP_PIECE_KEYS
                if stop == part.stop:
                    break
                start = stop
    if piece:
        yield piece


def _parts_of_requests(queries: Sequence[Query]) -> Iterator[list[tuple[int, range]]]:
    """Numbers of a request's queries, and which of their keys belong into one piece."""
    for _, some in groupby(enumerate(queries), key=lambda each: each[1].context.request):
        sizes = [(number, len(query.keys)) for number, query in some]
        if not 1 < len(sizes) <= PIECE_QUERIES:  # no groups of one prompt
            yield from ([(number, range(size))] for number, size in sizes)
            continue
        most = max(1, LOOKUP_PIECE_KEYS - len(sizes))  # one of each may be cut off too late
        parts = max(1, -(-sum(size for _, size in sizes) // most))
        for part in range(parts):
            cut = [(n, range(s * part // parts, s * (part + 1) // parts)) for n, s in sizes]
            # One without keys is answered, too.
            yield [
                each for each in cut if each[1] or (part == 0 and not len(queries[each[0]].keys))
            ]


class PiecewiseAnswers:
    """Puts the answers of a call's pieces together; one lease for each query."""

    def __init__(self, queries: int) -> None:
        self._statuses = [bytearray() for _ in range(queries)]
        self._sources = [bytearray() for _ in range(queries)]
        self._leases: list[LeaseId | None] = [None] * queries
        self._unbroken = [True] * queries  # hits only, so far

    def continue_in(self, pieces: list[QueryPiece]) -> list[QueryPiece]:
        """The pieces as they are to be asked now: a prefix lease goes on only behind hits."""
        return [QueryPiece(piece.number, self._continued(piece)) for piece in pieces]

    def _continued(self, piece: QueryPiece) -> Query:
        query = piece.query
        if query.lease is LeaseMode.PREFIX and not self._unbroken[piece.number]:
            return replace(query, lease=LeaseMode.NONE)
        return replace(query, extends=self._leases[piece.number])

    def take(self, pieces: Sequence[QueryPiece], answers: Sequence[Answer]) -> None:
        """The machine's answers to these pieces."""
        for piece, answer in zip(pieces, answers, strict=True):
            self._statuses[piece.number] += answer.statuses
            self._sources[piece.number] += answer.sources or bytes(len(answer.statuses))
            if answer.statuses != _ONE_HIT * len(answer.statuses):
                self._unbroken[piece.number] = False
            if answer.lease is not None:
                self._leases[piece.number] = answer.lease

    def whole(self) -> tuple[Answer, ...]:
        """One answer for each query."""
        return tuple(
            Answer(bytes(statuses), lease, bytes(sources) if any(sources) else b"")
            for statuses, lease, sources in zip(
                self._statuses, self._leases, self._sources, strict=True
            )
        )


async def answer_in_pieces(
    queries: Sequence[Query],
    ask: Callable[[tuple[Query, ...]], tuple[Answer, ...]],
    let_others_in: Callable[[], Awaitable[None]],
) -> tuple[Answer, ...]:
    """Answers in the order of the queries; yields to other calls between pieces."""
    keys = sum(len(query.keys) for query in queries)
    if keys <= LOOKUP_PIECE_KEYS and len(queries) <= PIECE_QUERIES:
        return ask(tuple(queries))
    answers = PiecewiseAnswers(len(queries))
    for number, piece in enumerate(query_pieces(queries)):
        if number:
            await let_others_in()
        cut = answers.continue_in(piece)
        answers.take(cut, ask(tuple(each.query for each in cut)))
    return answers.whole()


def run_pieces(runs: Sequence[Run]) -> Iterator[tuple[Run, ...]]:
    """Cut runs into pieces of a few, with at most PIECE_KEYS keys, in order."""
    piece: list[Run] = []
    room = PIECE_KEYS
    for run in runs:
        start = 0
        while start < len(run.keys):
            stop = min(len(run.keys), start + room)
            rows = slice(start, stop)
            piece.append(
                Run(run.group, run.keys[rows], run.engine_blocks[rows], run.first_block + start)
            )
            room -= stop - start
            start = stop
            if room == 0 or len(piece) == PIECE_RUNS:
                yield tuple(piece)
                piece, room = [], PIECE_KEYS
    if piece or not any(len(run.keys) for run in runs):
        yield tuple(piece)


def stores_together(stores: Sequence[StoreRequested]) -> Iterator[list[StoreRequested]]:
    """Cut a step's stores into those that may begin in one event, in their order.

    Small ones may, of few groups, that wait for no others, and for which the client says that its
    workers are ready at the same moment. Each of the rest is alone.
    """
    few: list[StoreRequested] = []
    runs, groups = 0, set[int]()
    for store in stores:
        named = {run.group for run in store.runs}
        fits = (
            few
            and len(few) < STORES_TOGETHER
            and runs + len(store.runs) <= RUNS_TOGETHER
            and len(groups | named) <= GROUPS_TOGETHER
            and store.ready_together == few[0].ready_together
            and _may_share(few[0])
            and _may_share(store)
        )
        if few and not fits:
            yield few
            few, runs, groups = [], 0, set()
        few.append(store)
        runs += len(store.runs)
        groups |= named
    if few:
        yield few


def _may_share(store: StoreRequested) -> bool:
    is_small = sum(len(run.keys) for run in store.runs) <= SMALL_STORE_KEYS
    return is_small and store.ready_together > 0 and not store.request_level
