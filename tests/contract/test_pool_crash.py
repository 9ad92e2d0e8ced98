"""An owner killed at any moment leaves only records that are wholly what it wrote."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.core.keys import U64, KeyBatch, Slots
from kvd.pool import Pool
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import EXTENTS, SLOTS_PER_EXTENT, opened

BATCH = 64
DEADLINE_S = 10.0
WRITER = f"""
import sys
from pathlib import Path
from {__name__} import write_for_ever
write_for_ever(Path(sys.argv[1]))
"""


def hash_of(slot: int, generation: int) -> bytes:
    """The key that the writer gives this slot in this generation."""
    return hashlib.blake2b(f"{slot}/{generation}".encode(), digest_size=32).digest()


def stamp_of(slot: int, generation: int) -> int:
    return slot << 32 | generation


def write_for_ever(directory: Path) -> None:
    """Write and free random slots of every row, each time with what `hash_of` says."""
    config = orders.config(directory)
    choice = random.Random(directory.name)
    with opened(config) as pool:
        orders.introduce(pool)
        for extent in range(EXTENTS):
            pool.grant_row(orders.row([extent]))
        slots = EXTENTS * SLOTS_PER_EXTENT
        generations = dict.fromkeys(range(slots), 0)
        full: set[int] = set()
        sys.stdout.write("writing\n")
        sys.stdout.flush()
        while True:
            chosen = choice.sample(range(slots), BATCH)
            pool.write_free(orders.free([s for s in chosen if s in full]))
            for slot in chosen:
                generations[slot] += 1
            raw = b"".join(hash_of(s, generations[s]) for s in chosen)
            stamps = np.array([stamp_of(s, generations[s]) for s in chosen], dtype=np.uint64)
            order = orders.ready(chosen, KeyBatch.from_bytes(raw, 32))
            pool.write_ready(dataclasses.replace(order, stamps=stamps))
            full.update(chosen)


@contextmanager
def writer_at_work(directory: Path) -> Iterator[None]:
    """A process that writes for ever, killed with -9 at the end."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        yield
    finally:
        writer.kill()
        writer.communicate()
    assert writer.returncode == -signal.SIGKILL, "the writer ended by itself"


@pytest.mark.parametrize("attempt", range(2))
def test_every_record_of_a_killed_writer_is_wholly_right(
    shared_directory: Path, attempt: int
) -> None:
    delay_s = random.SystemRandom().uniform(0.05, 0.5)
    with writer_at_work(shared_directory):
        time.sleep(delay_s)
    found = 0
    with opened(orders.config(shared_directory)) as pool:
        assert pool.cold_reason == ""
        rows = orders.rows_of(list(pool.recovered()))
        assert pool.dropped_records == 0, f"killed after {delay_s} s: torn records said READY"
    assert set(rows) == set(range(EXTENTS))
    for row, event in rows.items():
        blocks = orders.blocks_of(event)
        slots = [row * SLOTS_PER_EXTENT + ordinal for ordinal in blocks]
        generations = orders.generations_of(shared_directory, slots)
        for i, (slot, generation, key) in enumerate(
            zip(slots, generations, blocks.values(), strict=True)
        ):
            assert key == hash_of(slot, generation), f"slot {slot}, killed after {delay_s} s"
            assert int(event.stamps[i]) == stamp_of(slot, generation)
            found += 1
    # All but the batch in hand had been written when the writer died, unless it had just begun.
    assert found > BATCH


def test_whoever_sees_ready_sees_what_was_written_before_it(shared_directory: Path) -> None:
    """What a kill at that very moment would leave: looked at thousands of times, not twice."""
    looked, snapshots = 0, 0
    with writer_at_work(shared_directory):
        path = shared_directory / "pool" / "slots.table"
        table = np.memmap(path, dtype=np.uint64, mode="r").reshape(-1, 16)
        end = time.monotonic() + DEADLINE_S
        last = table[:, 0].copy()
        while snapshots < 100 and time.monotonic() < end:
            before = table[:, 0].copy()
            bodies = table.copy()
            after = table[:, 0].copy()
            snapshots += int((before != last).any())
            last = before
            for slot in np.flatnonzero((before == after) & (before & np.uint64(0xFF) == 1)):
                generation = int(before[slot]) >> 8
                key = bodies[slot, 8:12].tobytes()
                assert key == hash_of(int(slot), generation), f"slot {slot} was torn"
                assert int(bodies[slot, 2]) == stamp_of(int(slot), generation)
                looked += 1
        del table
    assert looked > 1000
    assert snapshots == 100, "the writer hardly got to write"


class WatchedWords:
    """The slot table's words, looked at after every single store, as a kill there would."""

    def __init__(self, words: U64, look: Callable[[], None]) -> None:
        self._words = words
        self._look = look
        self.stores = 0

    def __getitem__(self, where: Any) -> Any:
        return self._words[where]

    def __setitem__(self, where: Any, values: Any) -> None:
        self._words[where] = values
        self.stores += 1
        self._look()


def write_watched(pool: Pool, records: Slots) -> int:
    """Write and free these records three times, looking after each store; how many there were."""
    table = pool._slot_table
    words = table._words

    def look() -> None:
        table._words = words
        ready = records[table.ready(records)]
        assert table.whole(ready, 32).all()
        table._words = watched  # type: ignore[assignment]

    watched = WatchedWords(words, look)
    table._words = watched  # type: ignore[assignment]
    try:
        for seed in range(3):
            pool.write_ready(orders.ready(records.tolist(), orders.keys(len(records), seed)))
            pool.write_free(orders.free(records.tolist()))
    finally:
        table._words = words
    return watched.stores


def test_no_single_store_leaves_a_ready_record_that_is_not_whole(shared_directory: Path) -> None:
    with opened(orders.config(shared_directory)) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        stores = write_watched(pool, np.arange(SLOTS_PER_EXTENT))
        gc.collect()  # the watching closure refers to the mapping, and to itself
    assert stores >= 9
