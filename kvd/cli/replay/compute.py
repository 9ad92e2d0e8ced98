"""What a hit saves: a block far back in a prompt costs more to compute than one at its beginning.

Everything in a model but attention costs the same for each token. Attention costs in proportion to
the tokens before it. So a token at position p costs 1 + p / E, where E is the position at which
attention costs as much as all else: parameters / (layers x width of the queries), times a small
factor. That is some 30,000 tokens for a model of 8 billion parameters. A block costs what a token
in its middle does, times its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cli.replay.trace import TraceRequest

EVEN_AT_TOKENS = 32768.0


def compute_ratio(requests: Sequence[TraceRequest], found: Sequence[int]) -> float:
    """Cost of the leading blocks found / cost of all that were offered."""
    blocks = sum(request.blocks.size for request in requests)
    tokens = sum(request.input_tokens for request in requests)
    block_tokens = tokens / blocks if blocks else 0.0  # the last block of a prompt is rarely whole
    saved = sum(_cost(leading, block_tokens) for leading in found)
    whole = sum(_cost(request.blocks.size, block_tokens) for request in requests)
    return saved / whole if whole else 0.0


def _cost(blocks: int, block_tokens: float) -> float:
    """Of a prompt's first blocks, in blocks at its beginning."""
    return blocks + blocks * blocks * block_tokens / (2 * EVEN_AT_TOKENS)
