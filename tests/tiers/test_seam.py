"""The rules of the seam that its callers keep, and stores assert."""

from __future__ import annotations

import pytest

from kvd.tiers.store import (
    MAX_BLOCKS_PER_CALL,
    MAX_SCOPES_PER_CALL,
    SCOPE_BYTES,
    TierBlock,
    TierKey,
    require_blocks,
    require_keys,
    require_scopes,
)
from kvd_proto.limits import MAX_HASH_BYTES, MAX_RANKS

SCOPE = bytes(SCOPE_BYTES)
KEY = TierKey(SCOPE, b"a block hash")


def test_a_call_of_as_many_blocks_as_may_be_is_taken_and_with_one_more_refused() -> None:
    require_keys([KEY] * MAX_BLOCKS_PER_CALL)
    require_scopes([SCOPE] * MAX_SCOPES_PER_CALL)
    with pytest.raises(AssertionError, match="8193 keys"):
        require_keys([KEY] * (MAX_BLOCKS_PER_CALL + 1))
    with pytest.raises(AssertionError, match="1025 scopes"):
        require_scopes([SCOPE] * (MAX_SCOPES_PER_CALL + 1))


@pytest.mark.parametrize(
    "key",
    [
        TierKey(SCOPE[1:], b"hash"),
        TierKey(SCOPE + b"x", b"hash"),
        TierKey(SCOPE, b""),
        TierKey(SCOPE, bytes(MAX_HASH_BYTES + 1)),
    ],
)
def test_a_key_of_other_lengths_is_refused(key: TierKey) -> None:
    with pytest.raises(AssertionError):
        require_keys([key])


def test_a_key_of_the_greatest_length_is_taken() -> None:
    require_keys([TierKey(SCOPE, bytes(MAX_HASH_BYTES))])


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (memoryview(bytearray(8)),) * (MAX_RANKS + 1),
        (memoryview(bytearray(12)),),
        (memoryview(bytearray(0)),),
        (memoryview(bytearray(64))[::2],),
        (memoryview(bytearray(64)).cast("Q"),),
        (memoryview(bytearray(64)).cast("B", (8, 8)),),
    ],
    ids=["none", "too many", "not words", "empty", "strided", "of words", "of two dimensions"],
)
def test_parts_that_are_no_plain_bytes_are_refused(parts: tuple[memoryview, ...]) -> None:
    with pytest.raises(AssertionError):
        require_blocks([TierBlock(KEY, parts)], to_fill=False)


def test_only_a_read_needs_parts_that_can_be_written_to() -> None:
    block = TierBlock(KEY, (memoryview(bytes(64)), memoryview(bytes(8))))
    assert block.nbytes == 72
    require_blocks([block], to_fill=False)
    with pytest.raises(AssertionError, match="can't be filled"):
        require_blocks([block], to_fill=True)
