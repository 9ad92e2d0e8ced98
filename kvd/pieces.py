"""Cutting large calls into pieces, so that small ones are not held up behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvd.core.events import Query, Run

# Keys handled without yielding to other calls: about 0.2 ms of the event loop.
PIECE_KEYS = 256


def query_pieces(queries: Sequence[Query]) -> Iterator[tuple[Query, ...]]:
    """Group whole queries into pieces of about PIECE_KEYS keys."""
    piece: list[Query] = []
    keys = 0
    for query in queries:
        if piece and keys + len(query.keys) > PIECE_KEYS:
            yield tuple(piece)
            piece, keys = [], 0
        piece.append(query)
        keys += len(query.keys)
    if piece:
        yield tuple(piece)


def run_pieces(runs: Sequence[Run]) -> Iterator[tuple[Run, ...]]:
    """Cut runs into pieces of at most PIECE_KEYS keys, in order."""
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
            if room == 0:
                yield tuple(piece)
                piece, room = [], PIECE_KEYS
    if piece or not any(len(run.keys) for run in runs):
        yield tuple(piece)
