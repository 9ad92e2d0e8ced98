"""The engine's own blocks: who uses them, and what prefix they still hold."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class HashChain:
    """Names every full block of a sequence by all tokens up to its end.

    The seed separates models and block sizes, so that equal tokens of different models never
    share a name.
    """

    def __init__(self, model_digest: str, weights_id: str, block_tokens: int) -> None:
        text = f"{model_digest}/{weights_id}/{block_tokens}"
        self.seed = hashlib.sha256(text.encode()).digest()
        self.block_tokens = block_tokens

    def extend(self, hashes: list[bytes], tokens: Sequence[int]) -> None:
        """Append the hashes of the full blocks of `tokens` that `hashes` does not have yet."""
        for start in range(
            len(hashes) * self.block_tokens,
            len(tokens) - self.block_tokens + 1,
            self.block_tokens,
        ):
            parent = hashes[-1] if hashes else self.seed
            span = np.array(tokens[start : start + self.block_tokens], dtype="<u4")
            hashes.append(hashlib.sha256(parent + span.tobytes()).digest())


class BlockPool:
    """Reference-counted blocks; a free one keeps its contents until it is taken again.

    Free blocks are taken least recently used first. A sequence gives its blocks back tail
    first, so that a prefix outlives what follows it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest prefix of `hashes`; takes no reference."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, matched: Sequence[int], fresh: int) -> list[int] | None:
        """References to `matched` blocks and `fresh` new ones; None changes nothing."""
        revived = sum(1 for block in matched if self._references[block] == 0)
        if revived + fresh > len(self._free):
            return None
        for block in matched:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return [*matched, *(self._take_fresh() for _ in range(fresh))]

    def _take_fresh(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        block_hash, self._hash_of[block] = self._hash_of[block], None
        if block_hash is not None and self._by_hash.get(block_hash) == block:
            del self._by_hash[block_hash]

    def publish(self, block: int, block_hash: bytes) -> None:
        """Say that `block` now wholly holds `block_hash`; the first holder stays the match."""
        self._hash_of[block] = block_hash
        self._by_hash.setdefault(block_hash, block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference of each back."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            assert count >= 0, f"block {block} was released more often than taken"
            self._references[block] = count
            if count == 0:
                self._free[block] = None

    def reset(self) -> None:
        """Forget what every block holds, as a cache reset does; references stay."""
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks
