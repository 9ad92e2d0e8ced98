"""What self-describing KV events say of a block is kept as long as they may speak of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey, make_offload_key

from kvd_client.integrations.vllm.event_payloads import EventPayloads

TOKENS = 16
HASHES = [bytes([number]) * 32 for number in range(3)]
KEYS = [make_offload_key(block_hash, 0) for block_hash in HASHES]
REQUEST = SimpleNamespace(
    block_hashes=HASHES, all_token_ids=list(range(3 * TOKENS)), lora_request=None
)
GROUP = SimpleNamespace(
    group_idx=0,
    hashes_per_chunk=1,
    tokens_per_chunk=TOKENS,
    tokens_per_block=TOKENS,
    sliding_window_size_in_chunks=None,
    kv_event_group_spec=SimpleNamespace(kv_cache_spec_kind=None, kv_cache_spec_sliding_window=None),
)


class Books:
    """The record, and which blocks are on their way."""

    def __init__(self) -> None:
        self.on_the_way: set[OffloadKey] = set()
        config = SimpleNamespace(enable_kv_cache_events=True, self_describing_kv_events=True)
        theirs = OffloadingEventsTracker(config)
        self.payloads = EventPayloads(theirs, self.on_the_way.__contains__)

    def begin(self, block: int) -> None:
        self.on_the_way.add(KEYS[block])
        self.payloads.record_store(REQUEST, GROUP, block, KEYS[block])

    def end(self, block: int, *, follows: bool = True) -> OffloadingEvent:
        """The store has ended; what is announced of it."""
        self.on_the_way.discard(KEYS[block])
        return OffloadingEvent([KEYS[block]], Medium.CPU, removed=False, removal_expected=follows)

    def say(self, *events: OffloadingEvent) -> list[Any]:
        return list(self.payloads.take_events(events))

    @property
    def kept(self) -> int:
        return len(self.payloads._pending_event_metadata)


def gone(block: int) -> OffloadingEvent:
    return OffloadingEvent([KEYS[block]], Medium.CPU, removed=True)


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_removal_amid_the_next_store_takes_nothing_from_it(books: Books) -> None:
    books.begin(1)
    books.say(books.end(1))
    books.begin(1)
    (removed,) = books.say(gone(1))
    assert isinstance(removed, BlockRemoved)
    (stored,) = books.say(books.end(1))
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == REQUEST.all_token_ids[TOKENS : 2 * TOKENS]
    books.say(gone(1))
    assert not books.kept


def test_a_removal_told_with_the_next_copy_leaves_that_one_known(books: Books) -> None:
    books.begin(1)
    books.say(books.end(1))
    books.begin(1)
    _, stored = books.say(gone(1), books.end(1))
    assert len(stored.token_ids) == TOKENS
    assert books.kept == 1
    books.say(gone(1))
    assert not books.kept


def test_a_tier_keeps_what_host_memory_has_lost(books: Books) -> None:
    books.begin(0)
    in_tier = OffloadingEvent([KEYS[0]], Medium.STORAGE, removed=False, removal_expected=True)
    books.say(books.end(0), in_tier)
    books.say(gone(0))
    (stored,) = books.say(books.end(0))
    assert len(stored.token_ids) == TOKENS


def test_nothing_is_kept_of_a_store_that_failed(books: Books) -> None:
    books.begin(0)
    books.end(0)
    books.payloads.drop_unused(KEYS)
    assert not books.kept


def test_a_store_that_fails_leaves_an_announced_copy_and_one_on_its_way_known(
    books: Books,
) -> None:
    books.begin(0)
    books.say(books.end(0))
    books.begin(0)
    books.end(0)
    books.begin(1)
    books.payloads.drop_unused(KEYS)
    assert books.kept == 2


def test_nothing_is_kept_of_what_others_stored(books: Books) -> None:
    books.payloads.record_lookup(REQUEST, GROUP, 2, KEYS[2])
    assert not books.kept


def test_nothing_is_kept_of_what_was_told_where_no_removal_follows(books: Books) -> None:
    books.begin(0)
    (stored,) = books.say(books.end(0, follows=False))
    assert len(stored.token_ids) == TOKENS
    assert not books.kept


def test_a_removed_block_that_another_engine_stores_is_told_with_its_tokens(books: Books) -> None:
    books.begin(1)
    books.say(books.end(1))
    books.say(gone(1))
    for _ in range(2):  # each time that another engine stores it
        (stored,) = books.say(books.end(1))
        assert stored.token_ids == REQUEST.all_token_ids[TOKENS : 2 * TOKENS]
        assert stored.block_size == TOKENS
        (removed,) = books.say(gone(1))
        assert removed.block_hashes == stored.block_hashes


def test_of_removed_blocks_the_last_ones_are_kept_and_none_after_a_reset(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd_client.integrations.vllm.event_payloads.MAX_GONE", 2)
    for block in range(3):
        books.begin(block)
        books.say(books.end(block))
        books.say(gone(block))
    assert list(books.payloads._gone) == KEYS[1:]
    books.payloads.reset()
    assert not books.payloads._gone
