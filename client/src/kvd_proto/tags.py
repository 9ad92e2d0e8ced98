"""The 64-bit tags under which block hashes stand in an index page.

A tag is a keyed mix of one block hash. Both sides compute it: the daemon's core to index its
slots, a client to probe the page. Tags are hints: two hashes may share one, so whoever needs
to be sure compares the whole hash. Pure numpy; whole batches only.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

# Odd constants of Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
# (OOPSLA 2014), as used for finalising in splitmix64.
# Arrays without an axis, and results written in place: a call of numpy on a few words takes half
# the time that it takes with numpy's scalars and fresh arrays.
_MULTIPLY_1 = np.array(0xBF58476D1CE4E5B9, dtype=np.uint64)
_MULTIPLY_2 = np.array(0x94D049BB133111EB, dtype=np.uint64)
_STEP = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_SHIFT_20 = np.array(20, dtype=np.uint64)
_SHIFT_27 = np.array(27, dtype=np.uint64)
_SHIFT_30 = np.array(30, dtype=np.uint64)
_SHIFT_31 = np.array(31, dtype=np.uint64)
_SHIFT_32 = np.array(32, dtype=np.uint64)
_ONE = np.array(1, dtype=np.uint64)
_ALL_BITS = (1 << 64) - 1
_WORD = struct.Struct("<Q")


def mix(words: U64) -> U64:
    """Splitmix64's finaliser over an array of any shape; a new array."""
    out = words.copy()
    mix_in_place(out, np.empty_like(out))
    return out


def mix_in_place(
    words: U64,
    spare: U64,
    # Looked up once: this runs for every word of every hash, mostly of a few hashes.
    shift: np.ufunc = np.right_shift,
    xor: np.ufunc = np.bitwise_xor,
    multiply: np.ufunc = np.multiply,
) -> None:
    """`mix`, of the words themselves; `spare` is written to."""
    shift(words, _SHIFT_30, spare)
    xor(words, spare, words)
    multiply(words, _MULTIPLY_1, words)
    shift(words, _SHIFT_27, spare)
    xor(words, spare, words)
    multiply(words, _MULTIPLY_2, words)
    shift(words, _SHIFT_31, spare)
    xor(words, spare, words)


def hash_words(hashes: bytes | memoryview, hash_bytes: int) -> U64:
    """View n hashes, one after the other, as words: shape [n, ceil(hash_bytes / 8)].

    A hash whose length is no multiple of 8 is padded with zero bytes.
    """
    width = -(-hash_bytes // 8)
    if hash_bytes % 8 == 0:
        return np.frombuffer(hashes, dtype=np.uint64).reshape(-1, width)
    raw = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, hash_bytes)
    padded = np.zeros((raw.shape[0], width * 8), dtype=np.uint8)
    padded[:, :hash_bytes] = raw
    return padded.view(np.uint64)


def tags_of(words: U64, seed: int | U64) -> U64:
    """Tags of n hashes, shape [n], for the scope whose 64-bit seed is given, or each for the
    scope of its own seed. Never 0.
    """
    tags = np.empty(words.shape[0], dtype=np.uint64)
    spare = np.empty_like(tags)
    if isinstance(seed, int):
        tags.fill(seed)
    else:
        np.copyto(tags, seed)
    for column in range(words.shape[1]):
        np.add(tags, _STEP, tags)
        np.bitwise_xor(tags, words[:, column], tags)
        mix_in_place(tags, spare)
    return np.maximum(tags, _ONE, out=tags)


def bucket_mask(buckets: int) -> U64:
    """What `bucket_pair` wants of a table: so many buckets, a power of two, less one."""
    return np.array(buckets - 1, dtype=np.uint64)


def bucket_pair(tags: U64, mask: U64) -> tuple[U64, U64]:
    """The two candidate buckets of each tag in the table of this `bucket_mask`."""
    second = tags >> _SHIFT_32
    np.multiply(second, _MULTIPLY_2, second)
    np.right_shift(second, _SHIFT_20, second)
    np.bitwise_and(second, mask, second)
    return tags & mask, second


def tag_of(block_hash: bytes, seed: int) -> int:
    """`tags_of` for one hash, without numpy's cost per call."""
    if len(block_hash) % 8:
        block_hash += bytes(-len(block_hash) % 8)
    tag = seed
    for (word,) in _WORD.iter_unpack(block_hash):
        tag = (tag + 0x9E3779B97F4A7C15 & _ALL_BITS) ^ word
        tag = (tag ^ tag >> 30) * 0xBF58476D1CE4E5B9 & _ALL_BITS
        tag = (tag ^ tag >> 27) * 0x94D049BB133111EB & _ALL_BITS
        tag ^= tag >> 31
    return tag or 1


def bucket_pair_of(tag: int, buckets: int) -> tuple[int, int]:
    """`bucket_pair` for one tag."""
    mask = buckets - 1
    return tag & mask, ((tag >> 32) * 0x94D049BB133111EB & _ALL_BITS) >> 20 & mask


def account_seed(group_seed: int, account: str) -> int:
    """Seed of a group's tags for one account (cache salt); the empty account has group_seed."""
    if not account:
        return group_seed
    key = group_seed.to_bytes(8, "little")
    digest = hashlib.blake2b(account.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
