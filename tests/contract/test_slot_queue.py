"""The queue that every policy is built from: its order, its memory, and the work of one call."""

from __future__ import annotations

import random
import tracemalloc
from functools import partial

import numpy as np
import pytest

from kvd.core.policy import slot_queue
from kvd.core.policy.slot_queue import PIECE, Places, SlotQueue

STEP = 1024  # slots of one call
PIECE_BYTES = 8 * 8 * PIECE  # what a call may hold meanwhile: a few arrays by position


def as_array(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def order_of(queue: SlotQueue) -> list[int]:
    return [int(slot) for slot in queue.first(len(queue))]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("goes_round", [False, True])
def test_order_is_that_of_the_last_mention(
    seed: int, goes_round: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if goes_round:  # the positions do, several times
        monkeypatch.setattr(slot_queue, "POSITION_MASK", (1 << 12) - 1)
    monkeypatch.setattr(slot_queue, "PIECE", 64)  # so that a queue has many stretches
    monkeypatch.setattr(slot_queue, "STRETCH", 16)
    monkeypatch.setattr(slot_queue, "SLACK", 8)
    chance = random.Random(seed)
    queue = SlotQueue(Places(1000))
    known: list[int] = []
    for _ in range(600):
        absent = sorted(set(range(1000)) - set(known))
        some = chance.sample(known, min(len(known), chance.randrange(40)))
        match chance.randrange(5):
            case 0:
                fresh = chance.sample(absent, min(len(absent), chance.randrange(60)))
                queue.append(as_array(fresh))
                known += fresh
            case 1:
                queue.renew(as_array(some))
                known = [slot for slot in known if slot not in some] + some
            case 2:
                queue.drop(as_array(some))
                known = [slot for slot in known if slot not in some]
            case 3:
                count = chance.randrange(40)
                queue.drop_oldest(count)
                known = known[count:]
            case _:
                may_go = partial(np.isin, test_elements=as_array(known[::2]))
                scan = queue.scan(chance.randrange(1, 30), may_go)
                gone, passed = scan.victims.tolist(), scan.passed.tolist()
                assert queue.commit(scan).tolist() == gone
                known = [slot for slot in known if slot not in (*gone, *passed)] + passed
        assert order_of(queue) == known
        assert len(queue) == len(known)


def grown(slots: int) -> SlotQueue:
    queue = SlotQueue(Places(slots))
    for first in range(0, slots, STEP):
        queue.append(np.arange(first, first + STEP))
    return queue


def most_bytes_of_a_call(queue: SlotQueue, slots: int) -> int:
    """Drop all in steps, half of them renewed before; what one call held most."""
    tracemalloc.start()
    most = 0
    for first in range(0, slots, STEP):
        batch = np.arange(first, first + STEP)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        queue.renew(batch[::2])
        queue.drop(batch)
        most = max(most, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return most


def test_no_call_moves_more_than_a_piece_however_long_the_queue() -> None:
    slots = 1 << 21
    assert most_bytes_of_a_call(grown(slots), slots) <= PIECE_BYTES


def test_memory_follows_what_is_in_use() -> None:
    slots = 1 << 18
    queue = grown(slots)
    assert 4 * slots <= queue.bytes_used <= 4 * (slots + 2 * PIECE)
    for first in range(0, slots - STEP, STEP):
        queue.drop(np.arange(first, first + STEP))
    for _ in range(2 * PIECE // STEP):
        queue.renew(np.arange(slots - STEP, slots))
    assert queue.bytes_used <= 8 * 4 * STEP
    queue.drop(np.arange(slots - STEP, slots))
    assert queue.bytes_used == 0
