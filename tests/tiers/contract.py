"""What every tier's store promises, as tests: a store's module makes a class of it.

`opened` opens the store anew, over what it kept; `small` opens one of room for ROOM_BLOCKS blocks.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvd.tiers.sealing import record_from
from kvd.tiers.store import (
    MAX_BLOCKS_PER_CALL,
    MAX_SCOPES_PER_CALL,
    NAMESPACE_BYTES,
    SCOPE_BYTES,
    NamesWhatLeaves,
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierReason,
    TierStore,
    TierTimeout,
)
from kvd.tiers.sums import is_damaged, sums_of

BLOCK_BYTES = 64 << 10
ROOM_BLOCKS = 32
ONE, OTHER = b"1" * 32, b"2" * 32
NAMED = (
    (b"a", b"1"),
    (b"a", b"2"),
    (b"b", b"1"),
)  # what scopes of two namespaces begin and end with
Opened = Callable[[], TierStore]


def soon() -> float:
    return time.monotonic() + 30


def late_enough() -> float:
    """For thousands of requests, each an answer of a server's, on a busy machine."""
    return time.monotonic() + 300


def key(number: int, scope: bytes = ONE) -> TierKey:
    return TierKey(scope, number.to_bytes(16, "big"))


def content(seed: object, size: int = BLOCK_BYTES) -> bytes:
    """Bytes that differ for every seed."""
    return np.random.default_rng(list(repr(seed).encode())).bytes(size)


def memory(content: bytes) -> memoryview:
    """Bytes that begin at a page, as blocks in the pool mostly do."""
    view = memoryview(mmap.mmap(-1, len(content)))
    view[:] = content
    return view


def source(name: TierKey, *parts: bytes) -> TierBlock:
    return TierBlock(name, tuple(map(memory, parts)))


def target(name: TierKey, *sizes: int) -> TierBlock:
    return TierBlock(name, tuple(memory(b"\xee" * size) for size in sizes))


def write(store: TierStore, *blocks: TierBlock) -> list[Outcome]:
    return store.write(blocks, soon())


def read(store: TierStore, name: TierKey, *sizes: int) -> tuple[Outcome, bytes]:
    block = target(name, *(sizes or (BLOCK_BYTES,)))
    (outcome,) = store.read([block], soon())
    return outcome, b"".join(bytes(part) for part in block.parts)


def keep(store: TierStore, numbers: Sequence[int], scope: bytes = ONE) -> None:
    blocks = [source(key(n, scope), content((n, scope))) for n in numbers]
    outcomes = Counter(store.write(blocks, soon()))
    assert outcomes == {Outcome.DONE: len(blocks)}, store.usage()


def has(store: TierStore, number: int, scope: bytes = ONE) -> bool:
    """Whether a block of `keep` is there, with its very bytes."""
    outcome, found = read(store, key(number, scope))
    assert outcome in (Outcome.DONE, Outcome.MISSING)
    assert outcome is Outcome.MISSING or found == content((number, scope))
    return outcome is Outcome.DONE


def record_of(block: TierBlock) -> bytes:
    """The sealed record of a block's bytes as they are now."""
    return record_from(block, sums_of(block.parts))


def summed(block: TierBlock) -> TierBlock:
    return block._replace(sums=sums_of(block.parts))


class TierStoreContract:
    """The promises of kvd/tiers/store.py."""

    counts_blocks = True  # False: only the engine behind the store knows how many there are

    def holds(self, store: TierStore, blocks: int) -> bool:
        return store.usage().blocks == (blocks if self.counts_blocks else 0)

    @pytest.fixture
    def store(self, opened: Opened) -> Iterator[TierStore]:
        store = opened()
        yield store
        store.close()

    @pytest.mark.parametrize(
        "sizes",
        [(8,), (4096,), (65536,), (4096, 8192), (8, 4104, 16), (65536,) * 5, (1 << 20, 1 << 20)],
        ids=str,
    )
    def test_what_was_written_is_read_back(self, store: TierStore, sizes: tuple[int, ...]) -> None:
        parts = [content((n, sizes), size) for n, size in enumerate(sizes)]
        assert write(store, source(key(1), *parts)) == [Outcome.DONE]
        assert read(store, key(1), *sizes) == (Outcome.DONE, b"".join(parts))

    def test_parts_may_begin_anywhere(self, store: TierStore) -> None:
        space = memoryview(bytearray(content("memory", 3 << 20)))
        for shift in (0, 1, 8, 512, 4095):
            part = space[shift : shift + (1 << 20)]
            assert write(store, TierBlock(key(shift), (part,))) == [Outcome.DONE]
            into = memoryview(bytearray(3 << 20))[shift * 2 + 1 :][: 1 << 20]
            assert store.read([TierBlock(key(shift), (into,))], soon()) == [Outcome.DONE]
            assert into == part

    def test_empty_calls_are_answered(self, store: TierStore) -> None:
        assert store.exists([], soon()) == []
        assert store.write([], soon()) == []
        assert store.read([], soon()) == []
        store.delete_scopes([], soon())

    def test_unknown_block_is_missing(self, store: TierStore) -> None:
        assert store.exists([key(1)], soon()) == [False]
        assert read(store, key(1))[0] is Outcome.MISSING

    def test_a_batch_is_answered_block_by_block_and_in_order(self, store: TierStore) -> None:
        keep(store, [1, 3, 5])
        blocks = [target(key(n), BLOCK_BYTES) for n in range(7)]
        expected = [Outcome.DONE if n in (1, 3, 5) else Outcome.MISSING for n in range(7)]
        assert store.read(blocks, soon()) == expected
        assert store.exists([key(n) for n in range(7)], soon()) == [
            n in (1, 3, 5) for n in range(7)
        ]
        assert all(bytes(blocks[n].parts[0]) == content((n, ONE)) for n in (1, 3, 5))

    def test_a_key_twice_in_a_batch_is_done_twice_and_kept_once(self, store: TierStore) -> None:
        first, second = content("first"), content("second")
        blocks = [source(key(1), first), source(key(2), second), source(key(1), second)]
        assert store.write(blocks, soon()) == [Outcome.DONE] * 3
        assert self.holds(store, 2)
        twice = [target(key(1), BLOCK_BYTES), target(key(1), BLOCK_BYTES)]
        assert store.read(twice, soon()) == [Outcome.DONE] * 2
        assert [bytes(block.parts[0]) for block in twice] == [first, first]

    def test_a_block_that_is_there_is_not_written_again(self, store: TierStore) -> None:
        keep(store, [1])
        assert write(store, source(key(1), content("another"))) == [Outcome.DONE]
        assert has(store, 1)

    def test_other_parts_are_missing_and_replace_when_written(self, store: TierStore) -> None:
        keep(store, [1])
        half = BLOCK_BYTES // 2
        for sizes in ((half, half), (half,), (BLOCK_BYTES, 8), (8, BLOCK_BYTES - 8)):
            assert read(store, key(1), *sizes)[0] is Outcome.MISSING
        for sizes in ((half, half), (8, BLOCK_BYTES - 8), (half,), (2 * BLOCK_BYTES,)):
            parts = [content((sizes, n), size) for n, size in enumerate(sizes)]
            assert write(store, source(key(1), *parts)) == [Outcome.DONE]
            assert read(store, key(1), *sizes) == (Outcome.DONE, b"".join(parts))
            assert read(store, key(1))[0] is Outcome.MISSING
            assert self.holds(store, 1)

    def test_scopes_share_no_block(self, store: TierStore) -> None:
        keep(store, [1, 2])
        keep(store, [2, 3], OTHER)
        assert [has(store, n) for n in (1, 2, 3)] == [True, True, False]
        assert [has(store, n, OTHER) for n in (1, 2, 3)] == [False, True, True]

    def test_keys_that_join_alike_are_apart(self, store: TierStore) -> None:
        short, long = TierKey(ONE, b"a"), TierKey(ONE, b"aa")
        padded = TierKey(ONE, b"a\0")
        assert write(store, source(short, content(1))) == [Outcome.DONE]
        assert store.exists([short, long, padded], soon()) == [True, False, False]

    def test_deleted_scope_is_gone_and_no_other(self, opened: Opened) -> None:
        store = opened()
        keep(store, range(8))
        keep(store, range(8), OTHER)
        store.delete_scopes([ONE, b"?" * 32], soon())
        assert not any(has(store, n) for n in range(8))
        keep(store, [5])
        store.close()
        store = opened()
        assert [n for n in range(8) if has(store, n)] == [5]
        assert all(has(store, n, OTHER) for n in range(8))
        keep(store, [3])
        assert [has(store, n) for n in (2, 3)] == [False, True]
        store.close()

    def test_scopes_that_begin_alike_are_deleted_together(self, opened: Opened) -> None:
        store = opened()
        first, second, other = (begin * NAMESPACE_BYTES + end * 16 for begin, end in NAMED)
        for scope in (first, second, other):
            keep(store, range(4), scope)
        store.delete_scopes([b"a" * NAMESPACE_BYTES], soon())
        assert not any(has(store, n, scope) for n in range(4) for scope in (first, second))
        assert all(has(store, n, other) for n in range(4))
        store.close()
        store = opened()
        assert not any(has(store, n, scope) for n in range(4) for scope in (first, second))
        keep(store, [1], second)
        assert has(store, 1, second)
        store.delete_scopes([b""], soon())
        assert not any(has(store, n, scope) for n in range(4) for scope in (second, other))
        store.close()

    def test_blocks_outlive_a_restart(self, opened: Opened) -> None:
        for round_ in range(3):
            store = opened()
            assert [has(store, n) for n in range(16)] == [n < 4 * round_ for n in range(16)]
            keep(store, range(4 * round_, 4 * round_ + 4))
            store.close()

    def test_a_full_store_makes_room_and_answers_what_it_can(self, small: Opened) -> None:
        store = small()
        for first in range(0, 4 * ROOM_BLOCKS, 8):
            keep(store, range(first, first + 8))
        usage = store.usage()
        assert usage.blocks <= ROOM_BLOCKS
        assert usage.bytes <= usage.capacity_bytes
        assert all(has(store, n) for n in range(4 * ROOM_BLOCKS - 8, 4 * ROOM_BLOCKS))
        assert not any(has(store, n) for n in range(8))
        store.close()

    def test_what_leaves_is_named_once_where_the_store_names_it(self, small: Opened) -> None:
        store = small()
        if not isinstance(store, NamesWhatLeaves):
            pytest.skip("it can't say")
        assert store.take_left() == []
        kept: set[int] = set()
        for first in range(0, 4 * ROOM_BLOCKS, 8):
            fresh = range(first, first + 8)
            keep(store, fresh)
            kept |= set(fresh)
            left = store.take_left()
            assert left is not None
            gone = {key(n) for n in kept if not store.exists([key(n)], soon())[0]}
            assert sorted(left) == sorted(gone)
            kept -= {n for n in kept if key(n) in gone}
        assert len(kept) <= ROOM_BLOCKS
        store.delete_scopes([ONE], soon())
        assert store.take_left() == [], "what was deleted is named"
        keep(store, range(4))
        half = BLOCK_BYTES // 2
        assert write(store, source(key(1), content(1, half), content(2, half))) == [Outcome.DONE]
        assert store.take_left() == [], "what was replaced is named"
        store.close()

    def test_more_than_fits_at_once_is_full_in_part(self, small: Opened) -> None:
        store = small()
        blocks = [source(key(n), content((n, ONE))) for n in range(2 * ROOM_BLOCKS)]
        outcomes = store.write(blocks, soon())
        assert set(outcomes) <= {Outcome.DONE, Outcome.FULL}
        assert Outcome.DONE in outcomes
        for number, outcome in enumerate(outcomes):
            assert outcome is Outcome.FULL or has(store, number)
        store.close()

    def test_a_late_call_begins_nothing(self, store: TierStore) -> None:
        keep(store, [1])
        late = time.monotonic() - 1
        for call in (
            lambda: store.exists([key(1)], late),
            lambda: store.write([source(key(2), content(2))], late),
            lambda: store.read([target(key(1), BLOCK_BYTES)], late),
            lambda: store.delete_scopes([ONE], late),
        ):
            with pytest.raises(TierTimeout):
                call()
        assert store.exists([key(1), key(2)], soon()) == [True, False]
        assert store.usage().errors[TierReason.TIMEOUT] == 4

    def test_the_largest_calls_are_answered(self, store: TierStore) -> None:
        keys = [key(n) for n in range(MAX_BLOCKS_PER_CALL)]
        scopes = [n.to_bytes(32, "big") for n in range(MAX_SCOPES_PER_CALL)]
        assert store.exists(keys, late_enough()) == [False] * len(keys)
        store.delete_scopes(scopes, late_enough())

    def test_a_closed_store_says_so(self, opened: Opened) -> None:
        store = opened()
        store.close()
        store.close()
        with pytest.raises(TierError) as raised:
            store.exists([key(1)], soon())
        assert raised.value.reason is TierReason.CLOSED

    def test_calls_at_once_give_no_wrong_byte(self, small: Opened) -> None:
        store = small()
        numbers, end = range(2 * ROOM_BLOCKS), time.monotonic() + 2
        wrong: list[int] = []

        def scope_of(number: int) -> bytes:
            return bytes([number % 16]) * SCOPE_BYTES

        def work(seed: int) -> int:
            draw = np.random.default_rng(seed)
            calls = 0
            while time.monotonic() < end:
                some = [int(n) for n in draw.choice(numbers, 6)]
                match int(draw.integers(8)):
                    case 0:
                        store.delete_scopes([scope_of(n) for n in some[:2]], soon())
                    case 1 | 2 | 3:
                        blocks = [source(key(n, scope_of(n)), content((n, ONE))) for n in some]
                        store.write(blocks, soon())
                    case _:
                        blocks = [target(key(n, scope_of(n)), BLOCK_BYTES) for n in some]
                        outcomes = store.read(blocks, soon())
                        for n, block, outcome in zip(some, blocks, outcomes, strict=True):
                            if outcome is Outcome.FAILED or (
                                outcome is Outcome.DONE
                                and bytes(block.parts[0]) != content((n, ONE))
                            ):
                                wrong.append(n)
                calls += 1
            return calls

        with ThreadPoolExecutor(store.concurrency) as pool:
            assert min(pool.map(work, range(store.concurrency))) > 3
        assert wrong == []
        store.delete_scopes(list(map(scope_of, numbers)), soon())
        assert self.holds(store, 0)
        keep(store, range(ROOM_BLOCKS))  # no place was lost
        store.close()

    def test_usage_is_told_while_calls_run(self, store: TierStore) -> None:
        ended = threading.Event()

        def ask() -> int:
            asked = 0
            while not ended.is_set():
                assert store.usage().blocks >= 0
                asked += 1
            return asked

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            keep(store, range(64))
            ended.set()
            assert asking.result() > 0
        assert self.holds(store, 64)

    # -- checksums of parts -----------------------------------------------------------------

    def test_a_store_that_compares_sums_keeps_no_block_that_has_changed(
        self, store: TierStore
    ) -> None:
        good, bad, other = (summed(source(key(n), content(n), content((n, 2)))) for n in range(3))
        bad.parts[1][-1] ^= 1
        assert is_damaged(bad)
        compares = bool(getattr(store, "compares_sums", False))
        expected = [Outcome.DONE, Outcome.DAMAGED if compares else Outcome.DONE, Outcome.DONE]
        assert write(store, good, bad, other) == expected
        assert store.exists([key(n) for n in range(3)], soon()) == [True, not compares, True]
        bad.parts[1][-1] ^= 1
        assert write(store, bad) == [Outcome.DONE]

    def test_the_sums_of_a_read_are_right_or_left_alone(self, store: TierStore) -> None:
        written = summed(source(key(1), content(1), content(2)))
        assert write(store, written) == [Outcome.DONE]
        none = np.zeros(2, dtype=np.uint64)
        block = target(key(1), BLOCK_BYTES, BLOCK_BYTES)._replace(sums=none.copy())
        absent = target(key(2), BLOCK_BYTES, BLOCK_BYTES)._replace(sums=none.copy())
        assert store.read([block, absent], soon()) == [Outcome.DONE, Outcome.MISSING]
        assert block.sums is not None
        assert written.sums is not None
        assert block.sums.tolist() in (none.tolist(), written.sums.tolist())
