"""What SGLang's threads store through kvd they get back, from this engine and any other."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvd_client.integrations.sglang.namespace import key_of, keys_of
from tests.sglang.conftest import StartRank
from tests.sglang.rig import PAGE_TOKENS, mha_device_pool, mla_device_pool

PAGES = 140  # more than SGLang moves in one call
TOKENS = list(range(1000, 1000 + PAGE_TOKENS * 20))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "page_head"])
def test_pages_of_each_layout_come_back_as_they_were_stored(
    start_rank: StartRank, layout: str
) -> None:
    rank = start_rank(layout=layout)
    stored = rank.fill(TOKENS, seed=1)
    assert rank.backup(TOKENS, stored) == len(TOKENS)
    done, found = rank.prefetch(TOKENS)
    assert done == len(TOKENS)
    assert not rank.wrong_pages(found, done, seed=1)


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
def test_one_copy_of_mla_pages_serves_every_rank(start_rank: StartRank, layout: str) -> None:
    first = start_rank(device_pool=mla_device_pool(), layout=layout, place=(0, 2))
    second = start_rank(device_pool=mla_device_pool(), layout=layout, place=(1, 2))
    tokens = TOKENS[: PAGE_TOKENS * 8]
    assert first.backup(tokens, first.fill(tokens, seed=2)) == len(tokens)
    assert second.backup(tokens, second.fill(tokens, seed=3)) == 0  # SGLang lets one rank write
    done, found = second.prefetch(tokens)
    assert done == len(tokens)
    assert not second.wrong_pages(found, done, seed=2)


def test_a_second_engine_loads_what_the_first_stored(start_rank: StartRank) -> None:
    first, second = start_rank(), start_rank()
    tokens = list(range(10_000, 10_000 + PAGE_TOKENS * PAGES))
    assert first.backup(tokens, first.fill(tokens, seed=4)) == len(tokens)
    done, found = second.prefetch([*tokens, *range(PAGE_TOKENS)])
    assert done == len(tokens)
    assert not second.wrong_pages(found, done, seed=4)


def test_ranks_of_mha_and_other_models_share_nothing(start_rank: StartRank) -> None:
    tokens = [7] * PAGE_TOKENS * 4
    one = start_rank(place=(0, 2))
    assert one.backup(tokens, one.fill(tokens, seed=5)) == len(tokens)
    others = [
        start_rank(place=(1, 2)),
        start_rank(place=(0, 1)),
        start_rank(place=(0, 2), model="another-model"),
        start_rank(place=(0, 2), layout="layer_first"),
        start_rank(place=(0, 2), device_pool=mha_device_pool(layers=2)),
        start_rank(place=(0, 2), options={"weights_id": "other weights"}),
    ]
    assert [other.prefetch(tokens)[0] for other in others] == [0] * len(others)
    assert one.prefetch(tokens)[0] == len(tokens)


def test_keys_are_sglangs_own_digests(start_rank: StartRank) -> None:
    tokens = TOKENS[: 3 * PAGE_TOKENS]
    expected, last = [], b""
    for first in range(0, len(tokens), PAGE_TOKENS):
        page = np.asarray(tokens[first : first + PAGE_TOKENS], dtype="<u4").tobytes()
        last = hashlib.sha256(last + page).digest()
        expected.append(last)
    theirs = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    assert [key_of(each) for each in theirs] == keys_of(theirs) == expected
    odd = [*theirs, "no digest", theirs[0][:-2] + "gg", theirs[0][:-2] + "  ", "", "\ud800"]
    odd += [theirs[0].upper(), theirs[0] + "0", theirs[0] * 2]
    assert keys_of(odd) == [key_of(each) for each in odd]
    assert len(set(keys_of(odd))) == len(odd)
    assert len(key_of("no digest")) == len(expected[0])
    assert key_of("no digest") != key_of("no digest ")


def test_a_prefix_that_ends_in_the_middle_is_found_to_its_end(start_rank: StartRank) -> None:
    rank = start_rank()
    tokens = list(range(50_000, 50_000 + 10 * PAGE_TOKENS))
    head = tokens[: 6 * PAGE_TOKENS]
    assert rank.backup(head, rank.fill(head, seed=6)) == len(head)
    done, found = rank.prefetch(tokens)
    assert done == len(head)
    assert not rank.wrong_pages(found, done, seed=6)


def test_what_has_gone_between_exists_and_get_is_a_miss(start_rank: StartRank) -> None:
    rank = start_rank()
    tokens = list(range(70_000, 70_000 + 4 * PAGE_TOKENS))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    head = tokens[: 2 * PAGE_TOKENS]
    assert rank.backup(head, rank.fill(head, seed=7)) == len(head)
    room = rank.pool.alloc(len(tokens))
    before = rank.pool.get_data_page(int(room[2 * PAGE_TOKENS])).clone()
    assert rank.backend.batch_get_v1(hashes, room) == [True, True, False, False]
    assert not rank.wrong_pages(room, len(head), seed=7)
    assert torch.equal(rank.pool.get_data_page(int(room[2 * PAGE_TOKENS])), before)


def test_indices_that_are_no_pages_move_nothing(start_rank: StartRank) -> None:
    rank = start_rank()
    keys = get_storage_hash_str(TOKENS[: 2 * PAGE_TOKENS], None, page_size=PAGE_TOKENS)
    indices = torch.arange(2 * PAGE_TOKENS)
    for wrong in (indices[:-1], indices + 1, indices - 2 * PAGE_TOKENS, indices + rank.pool.size):
        assert rank.backend.batch_set_v1(keys, wrong) == [False, False]
    assert rank.backend.batch_set_v1([], indices[:0]) == []
    assert rank.backend.batch_exists([]) == 0


def test_nothing_is_found_after_a_clear_and_others_keep_theirs(start_rank: StartRank) -> None:
    rank, other = start_rank(), start_rank()
    tokens = list(range(90_000, 90_000 + 4 * PAGE_TOKENS))
    stored = rank.fill(tokens, seed=8)
    assert rank.backup(tokens, stored) == len(tokens)
    assert rank.backend.clear()
    rank.wait_usable()
    assert rank.prefetch(tokens)[0] == 0
    assert other.prefetch(tokens)[0] == len(tokens)
    assert rank.backup(tokens, stored) == len(tokens)
    assert rank.prefetch(tokens)[0] == len(tokens)


@pytest.mark.parametrize("call", ["batch_set_v1", "batch_get_v1"])
def test_a_backend_that_is_closed_in_the_midst_of_a_call_moves_nothing(
    start_rank: StartRank, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rank = start_rank()
    tokens = list(range(110_000, 110_000 + 2 * PAGE_TOKENS))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    stored = rank.fill(tokens, seed=9)
    pool = rank.backend._places["kv"].pool
    pages = pool.pages(stored, len(hashes))

    def pages_after_a_close(*_: object) -> object:
        rank.backend.close()
        return pages

    monkeypatch.setattr(pool, "pages", pages_after_a_close)
    assert getattr(rank.backend, call)(hashes, stored) == [False, False]
