"""A sealed record proves the very bytes, parts and key that it was made of, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.tiers.sealing import (
    has_lengths_of,
    prove_all,
    proves,
    record_bytes,
    record_in,
    sound_records_of,
    wipe,
)
from kvd.tiers.store import TierBlock, TierKey
from kvd.tiers.sums import sums_of
from kvd_proto.limits import MAX_RANKS
from tests.tiers.contract import ONE, OTHER, content, key, record_of, source

PARTS = (content("a", 4096), content("b", 8), content("c", 65536))


def test_a_record_proves_the_bytes_that_it_was_made_of() -> None:
    block = source(key(1), *PARTS)
    assert proves(record_of(block), source(key(1), *PARTS))


@pytest.mark.parametrize("at", [0, 4095, 4096, 4103, 4104, 4104 + 65535])
def test_one_other_byte_anywhere_is_seen(at: int) -> None:
    record = record_of(source(key(1), *PARTS))
    changed = bytearray(b"".join(PARTS))
    changed[at] ^= 1
    parts = bytes(changed[:4096]), bytes(changed[4096:4104]), bytes(changed[4104:])
    assert not proves(record, source(key(1), *parts))


@pytest.mark.parametrize(
    "other",
    [
        source(key(2), *PARTS),
        source(key(1, OTHER), *PARTS),
        source(TierKey(ONE, key(1).block + b"\0"), *PARTS),
        source(key(1), *reversed(PARTS)),
        source(key(1), b"".join(PARTS)),
        source(key(1), *PARTS[:2]),
        source(key(1), *PARTS, bytes(8)),
    ],
    ids=["key", "scope", "longer key", "order", "joined", "fewer", "more"],
)
def test_another_key_or_other_parts_are_not_proven(other: TierBlock) -> None:
    assert not proves(record_of(source(key(1), *PARTS)), other)


def test_a_record_that_is_none_proves_nothing() -> None:
    block = source(key(1), *PARTS)
    record = record_of(block)
    for wrong in (b"", record[:-1], record + b"\0", record[:15], b"x" + record[1:], bytes(64)):
        assert not has_lengths_of(wrong, block)
        assert not proves(wrong, block)


def test_a_record_is_as_long_as_is_said() -> None:
    block = source(key(1), *[bytes(8)] * MAX_RANKS)
    assert len(record_of(block)) == record_bytes(MAX_RANKS)
    assert proves(record_of(block), block)


@pytest.mark.parametrize("lengths", [(4096,), (8, 4096, 8), (65536, 65536)])
def test_many_at_once_are_told_as_one_by_one(lengths: tuple[int, ...]) -> None:
    """Blocks of several shapes: every third one is another than its record, or than its sums."""
    shapes = [lengths, (4096,), lengths[::-1], (4104,)]
    blocks = [
        source(key(n), *[content((n, at), size) for at, size in enumerate(shapes[n % 4])])
        for n in range(12)
    ]
    records = [record_of(block) for block in blocks]
    wanted = [block._replace(sums=np.zeros(len(block.parts), np.uint64)) for block in blocks]
    records[::3] = [record_of(block) for block in blocks[1:] + blocks[:1]][::3]
    proven = prove_all(records, wanted)
    assert proven == [n % 3 != 0 for n in range(12)]
    for block, is_proven in zip(wanted, proven, strict=True):
        assert block.sums is not None
        assert (block.sums == (sums_of(block.parts) if is_proven else 0)).all()
    for n in range(0, 12, 3):
        wanted[n] = blocks[n]._replace(sums=sums_of(blocks[n].parts) + np.uint64(1))
    right = [None if n % 3 == 0 else record_of(block) for n, block in enumerate(blocks)]
    assert sound_records_of(wanted) == right
    assert sound_records_of([]) == []
    assert prove_all([], []) == []


def test_a_value_tells_the_record_that_it_begins_with_and_nothing_else() -> None:
    for parts in (PARTS, (bytes(8),) * MAX_RANKS):
        record = record_of(source(key(1), *parts))
        for more in (b"", b"x", b"".join(parts)):
            assert record_in(record + more) == record
        for size in (0, 1, 15, 16, len(record) - 1):
            assert record_in(record[:size]) == b""
        assert record_in(b"?" + record) == b""
        assert record_in(record[:4] + b"\xff" * 4 + record[8:]) == b""


def test_a_wiped_block_holds_zeros() -> None:
    block = source(key(1), *PARTS)
    wipe(block)
    assert [bytes(part) for part in block.parts] == [bytes(len(part)) for part in PARTS]
