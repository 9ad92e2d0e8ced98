"""Tables of tags by the native library, beside a plain list of what stands in them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import native
from kvd.core.keys import U64
from kvd.pool.tag_table import NOWHERE, WORDS, TagTable
from kvd_proto.tags import bucket_mask, bucket_pair, mix

pytestmark = pytest.mark.skipif(
    native.library() is None, reason=f"no native library: {native.why_not()}"
)
CANARY = np.uint64(0xC0FFEE)
TAGS = st.lists(st.integers(1, 40), max_size=60)


def tags_of(numbers: list[int]) -> U64:
    return mix(np.array(numbers, dtype=np.uint64))


def candidates(tag: int, buckets: int) -> set[int]:
    pair = bucket_pair(np.array([tag], dtype=np.uint64), bucket_mask(buckets))
    return {int(each[0]) for each in pair}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 4), st.lists(st.tuples(st.booleans(), TAGS), max_size=12))
def test_what_stands_is_what_was_inserted_and_not_removed(
    size: int, steps: list[tuple[bool, list[int]]]
) -> None:
    buckets = 1 << size
    memory = np.full((buckets + 2) * WORDS, CANARY)
    words = memory[WORDS:-WORDS]
    words[:] = 0
    table, standing = TagTable(words), Counter[int]()
    for inserts, numbers in steps:
        tags = tags_of(numbers)
        where = table.insert(tags) if inserts else table.remove(tags)
        for tag, bucket in zip(tags.tolist(), where.tolist(), strict=True):
            if bucket != NOWHERE:
                assert bucket in candidates(tag, buckets)
                standing[tag] += 1 if inserts else -1
            elif inserts:  # both its buckets are full now
                full = words.reshape(-1, WORDS)[list(candidates(tag, buckets))]
                assert full.all(), "a tag was spilled though there was room"
            else:
                assert not standing[tag], "a tag that stands was not found"
        assert +standing == Counter(words[words != 0].tolist())
    assert (memory[:WORDS] == CANARY).all()
    assert (memory[-WORDS:] == CANARY).all()


def test_read_only_and_strided_tags_are_taken_and_impossible_tables_are_not() -> None:
    words = np.zeros(64 * WORDS, dtype=np.uint64)
    tags = tags_of(list(range(1, 41)))
    tags.flags.writeable = False
    table = TagTable(words)
    assert (table.insert(tags[::2]) != NOWHERE).all()
    assert table.has(tags).tolist() == [True, False] * 20
    assert (table.remove(tags) != NOWHERE).tolist() == [True, False] * 20
    library = native.library()
    assert library is not None
    for wrong in (words[: 3 * WORDS], words[: WORDS + 1], words[:0], words[::2]):
        with pytest.raises(AssertionError):
            library.insert_tags(wrong, tags)
    with pytest.raises(AssertionError):
        library.remove_tags(words, tags.view(np.int64))
    assert not words.any()
