from __future__ import annotations

import pytest

from examples.engine.blocks import BlockPool, HashChain


def chain_of(tokens: list[int], model: str = "model") -> list[bytes]:
    hashes: list[bytes] = []
    HashChain(model, "weights", block_tokens=4).extend(hashes, tokens)
    return hashes


def test_only_full_blocks_have_a_hash() -> None:
    assert len(chain_of(list(range(11)))) == 2


def test_a_hash_names_all_tokens_before_it() -> None:
    first = chain_of([1, 2, 3, 4, 5, 6, 7, 8])
    other_head = chain_of([9, 2, 3, 4, 5, 6, 7, 8])
    same_head = chain_of([1, 2, 3, 4, 5, 6, 7, 9])
    assert first[1] != other_head[1]
    assert (first[0], first[1] == same_head[1]) == (same_head[0], False)


def test_models_never_share_a_hash() -> None:
    assert chain_of([1, 2, 3, 4], "one") != chain_of([1, 2, 3, 4], "two")


def test_growing_tokens_extend_the_chain_as_if_hashed_at_once() -> None:
    chain = HashChain("model", "weights", block_tokens=4)
    hashes: list[bytes] = []
    for length in range(14):
        chain.extend(hashes, list(range(length)))
    assert hashes == chain_of(list(range(13)))


def test_a_released_block_is_matched_until_it_is_taken_again() -> None:
    pool = BlockPool(2)
    blocks = pool.acquire((), 2)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.release(blocks)
    assert pool.match([b"a", b"b"]) == blocks
    pool.acquire((), 1)
    # Tails go first, so the prefix is what remains.
    assert pool.match([b"a", b"b"]) == blocks[:1]


def test_a_shared_block_is_free_only_after_its_last_user() -> None:
    pool = BlockPool(1)
    blocks = pool.acquire((), 1)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    assert pool.acquire(pool.match([b"a"]), 0) == blocks
    pool.release(blocks)
    assert pool.free_blocks == 0
    pool.release(blocks)
    assert pool.free_blocks == 1


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(3)
    blocks = pool.acquire((), 1)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    # The matched block is itself one of the free ones.
    assert pool.acquire(blocks, 3) is None
    assert pool.free_blocks == 3
    assert pool.match([b"a"]) == blocks


def test_reset_forgets_contents_but_not_references() -> None:
    pool = BlockPool(2)
    blocks = pool.acquire((), 1)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.reset()
    assert pool.match([b"a"]) == []
    assert pool.free_blocks == 1


def test_releasing_twice_is_noticed() -> None:
    pool = BlockPool(1)
    blocks = pool.acquire((), 1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)
