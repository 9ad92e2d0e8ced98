from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples.engine.config import TINY, Shard, layer_block_bytes
from examples.engine.kv_memory import KvMemory
from examples.engine.messages import Span
from examples.engine.model import Decoder
from examples.engine.pair_sum import alone
from examples.engine.weights import random_checkpoint

pytestmark = pytest.mark.engine
TOKENS = tuple((7 * n * n + 3) % 256 for n in range(40))
BLOCKS = (5, 2, 7)


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(random_checkpoint(TINY, 0), Shard.of(TINY, 0, 1), alone)


@pytest.fixture
def kv() -> Iterator[KvMemory]:
    memory = KvMemory(TINY, Shard.of(TINY, 0, 1), num_blocks=8, block_tokens=16)
    yield memory
    memory.close()


def test_pieces_of_a_prompt_give_the_same_scores_as_the_whole(
    decoder: Decoder, kv: KvMemory
) -> None:
    whole = decoder.logits(decoder.forward([Span(TOKENS, 0, BLOCKS)], kv.layers))
    decoder.forward([Span(TOKENS[:13], 0, BLOCKS)], kv.layers)
    decoder.forward([Span(TOKENS[13:39], 13, BLOCKS)], kv.layers)
    pieces = decoder.logits(decoder.forward([Span(TOKENS[39:], 39, BLOCKS)], kv.layers))
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-4)


def test_sequences_of_one_batch_do_not_see_each_other(decoder: Decoder, kv: KvMemory) -> None:
    alone_scores = decoder.forward([Span(TOKENS, 0, BLOCKS)], kv.layers)
    other = Span(TOKENS[::-1], 0, (0, 1, 3))
    together = decoder.forward([other, Span(TOKENS, 0, BLOCKS)], kv.layers)
    torch.testing.assert_close(together[1:], alone_scores, atol=1e-4, rtol=1e-4)


def test_scores_depend_on_the_cached_blocks(decoder: Decoder, kv: KvMemory) -> None:
    decoder.forward([Span(TOKENS[:32], 0, BLOCKS)], kv.layers)
    right = decoder.forward([Span(TOKENS[32:], 32, BLOCKS)], kv.layers)
    kv.layers[1][BLOCKS[0], 0, 3] += 1.0
    wrong = decoder.forward([Span(TOKENS[32:], 32, BLOCKS)], kv.layers)
    assert not torch.allclose(wrong, right, atol=1e-3)


def test_a_digest_follows_every_byte_of_its_block_and_no_other(kv: KvMemory) -> None:
    before = kv.digests(range(8))
    kv.layers[2].view(torch.uint8)[4, 2, 15, -1] += 1
    after = kv.digests(range(8))
    assert [n for n in range(8) if before[n] != after[n]] == [4]


def test_fragments_say_where_the_layers_lie(kv: KvMemory) -> None:
    base = kv.layers[0].data_ptr()
    for layer, fragment in zip(kv.layers, kv.fragments, strict=True):
        assert layer[3].data_ptr() - base == fragment.base + 3 * fragment.stride
        assert layer[3].numel() * 4 == fragment.bytes


def test_two_ranks_hold_every_head_and_column_once() -> None:
    first, second = Shard.of(TINY, 0, 2), Shard.of(TINY, 1, 2)
    assert first.kv_heads == (0, 2)
    assert second.kv_heads == (2, 3)
    assert first.feed_forward[1] == second.feed_forward[0]
    assert layer_block_bytes(TINY, first, 16) == 2 * layer_block_bytes(TINY, second, 16)
