"""What proves a block's bytes, wherever a store keeps them.

A *seal* of 64 bits is taken of the whole key, the parts' lengths and every part's checksum. Bytes
of another block, of another write, torn or cut off have a seal that does not fit. So a medium is
never believed, and nothing has to reach it in any order. It is no proof against somebody who may
write to the medium and wants to deceive.

A store whose medium keeps values by name keeps a *sealed record* beside the parts: lengths and
seal in a few bytes. A read is DONE only where the record's lengths are the block's and, when the
parts have come, their seal is the record's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from kvd.core.keys import U64
from kvd.tiers.store import TierBlock, TierKey
from kvd.tiers.sums import contradict, sums_of_each

_SEAL_BYTES = 8
_DIGEST_BYTES = 16
_RECORD = struct.Struct("<4sIQ")  # what it is, bytes of lengths, seal; then the lengths
_RECORD_BEGIN = struct.Struct("<4sI")
_RECORD_NAME = b"kvS1"


def digests_of(keys: Sequence[TierKey]) -> U64:
    """128 bits that stand for each whole key, shape [n, 2]."""
    blake2b, size = hashlib.blake2b, _DIGEST_BYTES
    # A scope has one length, so that no two keys come to the same bytes.
    joined = b"".join([blake2b(k.scope + k.block, digest_size=size).digest() for k in keys])
    return np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)


def lengths_of(block: TierBlock) -> bytes:
    """The lengths of a block's parts, eight bytes each."""
    return b"".join([part.nbytes.to_bytes(8, "little") for part in block.parts])


def seal_from(block: TierBlock, lengths: bytes, sums: U64) -> int:
    """Of a block whose parts have these lengths and checksums."""
    taken = hashlib.blake2b(block.key.scope, digest_size=_SEAL_BYTES)
    taken.update(len(block.key.block).to_bytes(8, "little") + block.key.block + lengths)
    taken.update(sums.tobytes())
    return int.from_bytes(taken.digest(), "little")


def sound_record_of(block: TierBlock) -> bytes | None:
    """The sealed record of a block's bytes as they are now; reads all of them.

    None: the block has `sums`, and its bytes are others.
    """
    return sound_records_of([block])[0]


def sound_records_of(
    blocks: Sequence[TierBlock], found: Sequence[U64] | None = None
) -> list[bytes | None]:
    """The same of each. `found`: the parts' checksums, where they are known."""
    return [
        None if contradict(block, sums) else record_from(block, sums)
        for block, sums in zip(blocks, found or sums_of_each(blocks), strict=True)
    ]


def record_from(block: TierBlock, sums: U64) -> bytes:
    """The same, where the checksums of the parts are known."""
    lengths = lengths_of(block)
    return _RECORD.pack(_RECORD_NAME, len(lengths), seal_from(block, lengths, sums)) + lengths


def record_bytes(parts: int) -> int:
    """How long the record of a block of so many parts is."""
    return _RECORD.size + 8 * parts


def lengths_in(record: bytes) -> tuple[int, ...] | None:
    """The lengths of the parts that a record is of. None: it is no record."""
    if len(record) < _RECORD.size:
        return None
    name, size, _ = _RECORD.unpack_from(record)
    lengths = record[_RECORD.size :]
    if name != _RECORD_NAME or size != len(lengths) or size % 8:
        return None
    return tuple(np.frombuffer(lengths, dtype="<u8").tolist())


def record_in(head: bytes) -> bytes:
    """The sealed record that a value begins with; nothing where it begins with none."""
    if len(head) < _RECORD.size:
        return b""
    name, size = _RECORD_BEGIN.unpack_from(head)
    whole = _RECORD.size + size
    return head[:whole] if name == _RECORD_NAME and len(head) >= whole else b""


def has_lengths_of(record: bytes, block: TierBlock) -> bool:
    """Whether a record is of a block with these parts' lengths. False also where it is none."""
    lengths = lengths_of(block)
    begin = _RECORD_BEGIN.pack(_RECORD_NAME, len(lengths))
    return record.startswith(begin) and record[_RECORD.size :] == lengths


def proves(record: bytes, block: TierBlock) -> bool:
    """Whether the block's parts hold the very bytes that the record was made of; reads them all.

    Then the block's `sums` are theirs, if they are wanted.
    """
    return has_lengths_of(record, block) and prove_all([record], [block])[0]


def prove_all(
    records: Sequence[bytes], blocks: Sequence[TierBlock], found: Sequence[U64] | None = None
) -> list[bool]:
    """The same of each. `found`: the parts' checksums, where they are known."""
    found = found or sums_of_each(blocks)
    proven = [
        record_from(block, sums) == record
        for record, block, sums in zip(records, blocks, found, strict=True)
    ]
    for block, sums, is_proven in zip(blocks, found, proven, strict=True):
        if is_proven and block.sums is not None:
            block.sums[:] = sums
    return proven


def wipe(block: TierBlock) -> None:
    """Zero the parts of a read that failed: what came may be another's."""
    for part in block.parts:
        np.frombuffer(part, dtype=np.uint8)[:] = 0
