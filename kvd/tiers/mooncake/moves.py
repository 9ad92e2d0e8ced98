"""Blocks on their way to or from Mooncake, and how many of them go in one call of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.tiers.sealing import record_bytes
from kvd.tiers.store import TierBlock, TierKey

NAME_VERSION = "kvd1-"  # other bytes in a value come with another
MAX_PIECE_BYTES = 16 << 20  # in one call of Mooncake's: what the lease of a read must outlast
MAX_PIECE_TRANSFERS = 4096  # in one, each of which Mooncake moves by itself
# Of a call's own memory that the network knows; enough for the record of any block.
MAX_STAGED_BYTES = 8 << 20


@dataclass(slots=True)
class MooncakeMove:
    """One block on its way.

    Its value is a sealed record, and then its parts. A staged one's lies in one piece in the
    call's own memory, and is one transfer of the network's. Of another the record alone lies
    there: that is a transfer, and each part another.
    """

    number: int  # in the caller's batch
    name: str
    block: TierBlock
    sizes: tuple[int, ...]  # of the parts
    record_bytes: int
    nbytes: int  # of the value
    is_staged: bool
    at: int = 0  # in the call's memory

    @property
    def laid_bytes(self) -> int:
        """Of what lies in the call's memory."""
        return self.nbytes if self.is_staged else self.record_bytes

    @property
    def transfers(self) -> int:
        return 1 if self.is_staged else 1 + len(self.sizes)


def name_of(key: TierKey) -> str:
    """What Mooncake knows a block by."""
    return f"{NAME_VERSION}{key.scope.hex()}-{key.block.hex()}"


def moves_of(
    blocks: Sequence[TierBlock], numbers: Sequence[int], staged_part_bytes: int
) -> list[MooncakeMove]:
    """Of these blocks of a batch. Staged are those whose parts are so long at most, on average."""
    moves: list[MooncakeMove] = []
    for number in numbers:
        block = blocks[number]
        sizes = tuple([part.nbytes for part in block.parts])
        parts, size = len(sizes), sum(sizes)
        record = record_bytes(parts)
        nbytes = record + size
        is_staged = size <= parts * staged_part_bytes and nbytes <= MAX_STAGED_BYTES
        moves.append(
            MooncakeMove(number, name_of(block.key), block, sizes, record, nbytes, is_staged)
        )
    return moves


def pieces_of(moves: Sequence[MooncakeMove]) -> Iterator[list[MooncakeMove]]:
    """Blocks that go in one call: bounded, and no name twice."""
    piece: list[MooncakeMove] = []
    names: set[str] = set()
    size = laid = transfers = 0
    for move in moves:
        size, laid = size + move.nbytes, laid + move.laid_bytes
        transfers += move.transfers
        is_full = (
            size > MAX_PIECE_BYTES or laid > MAX_STAGED_BYTES or transfers > MAX_PIECE_TRANSFERS
        )
        if piece and (is_full or move.name in names):
            yield piece
            piece, names = [], set()
            size, laid, transfers = move.nbytes, move.laid_bytes, move.transfers
        piece.append(move)
        names.add(move.name)
    if piece:
        yield piece
