"""What the values of a block are called, and which of a cluster's slots they are in.

    PREFIX:SCOPE{BLOCK}            its sealed record, and then its parts
    PREFIX:SCOPE{BLOCK}KIND.NUMBER its pieces, over all parts, where they are too long for one value

Scope and block in letters and digits, so that a pattern finds all of a scope. The braces make
Valkey keep all of a block's values in one slot, on one server. KIND stands for the parts' lengths:
blocks of one key and other lengths have no value in common but the record.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass

from kvd.tiers.sealing import lengths_in, record_bytes
from kvd.tiers.store import TierBlock, TierKey

SLOTS = 16384
MAX_PIECES_TOLD = 16384  # of one block, as a record that is found tells of


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """Where one piece lies: in which part, from where to where."""

    part: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Blocks with parts of the same lengths."""

    suffixes: tuple[bytes, ...]  # of the pieces' names; none where its parts go with its record
    spans: tuple[PieceSpan, ...]


class NameBook:
    """Names of one tier. Any thread may call."""

    def __init__(self, prefix: str, value_bytes: int) -> None:
        self._prefix = prefix.encode() + b":"
        self._value_bytes = value_bytes
        self._shapes: dict[tuple[int, ...], BlockShape] = {}
        self._begins: dict[bytes, bytes] = {}

    def record_name(self, key: TierKey) -> bytes:
        """What a block's record is called, and what all its names begin with."""
        return self.place_of(key)[0]

    def place_of(self, key: TierKey) -> tuple[bytes, int]:
        """The same, and the cluster's slot of all its names."""
        tag = base64.urlsafe_b64encode(key.block).rstrip(b"=")
        begin = self._begins.get(key.scope)
        if begin is None:
            if len(self._begins) >= 1024:  # those in use are known again at once
                self._begins.clear()
            begin = self._begins[key.scope] = self.begin_of_scope(key.scope) + b"{"
        return b"%b%b}" % (begin, tag), binascii.crc_hqx(tag, 0) % SLOTS

    def shape_of(self, block: TierBlock) -> BlockShape:
        return self.shape(tuple([part.nbytes for part in block.parts]))

    def shape(self, lengths: tuple[int, ...]) -> BlockShape:
        """How blocks of these parts are cut into pieces."""
        known = self._shapes.get(lengths)
        if known is not None:
            return known
        step = self._value_bytes
        is_one = record_bytes(len(lengths)) + sum(lengths) <= step
        spans = tuple(
            PieceSpan(part, begin, min(begin + step, length))
            for part, length in enumerate(() if is_one else lengths)
            for begin in range(0, length, step)
        )
        suffixes = self._suffixes(lengths, len(spans))
        if len(self._shapes) >= 1024:  # as many as kinds of blocks; more are of no honest daemon
            self._shapes.clear()
        self._shapes[lengths] = shape = BlockShape(suffixes, spans)
        return shape

    def suffixes_told(self, record: bytes) -> tuple[bytes, ...]:
        """Of the names of the pieces that a record tells of. Anybody may have written it: none
        where it is no record, or tells of more than can be."""
        lengths = lengths_in(record)
        if lengths is None or record_bytes(len(lengths)) + sum(lengths) <= self._value_bytes:
            return ()
        count = sum([-(-length // self._value_bytes) for length in lengths])
        return self._suffixes(lengths, count) if count <= MAX_PIECES_TOLD else ()

    def _suffixes(self, lengths: tuple[int, ...], count: int) -> tuple[bytes, ...]:
        taken = repr((lengths, self._value_bytes)).encode()
        kind = hashlib.blake2b(taken, digest_size=6).hexdigest()
        return tuple(f"{kind}.{number}".encode() for number in range(count))

    def begin_of_scope(self, scope: bytes) -> bytes:
        """What all names of scopes that begin with these bytes begin with."""
        return self._prefix + scope.hex().encode()


def slot_of(name: bytes) -> int:
    """The cluster's slot of a name of ours: of what stands in braces."""
    tag = name[name.index(b"{") + 1 : name.index(b"}")]
    return binascii.crc_hqx(tag, 0) % SLOTS
