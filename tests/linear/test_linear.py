"""What concurrent engines saw could have happened one after the other, or the checker says so."""

from __future__ import annotations

import math
import os
from collections import Counter

import pytest

from tests.faults.scene import MIB, Scene
from tests.linear.checker import Call, Kind, faults, possible
from tests.linear.clients import Client, History, Watcher, run_all
from tests.waiting import wait_until

ORDERS = int(os.environ.get("KVD_LINEAR_ORDERS", "120"))  # of each engine
BLOCK_BYTES = 64 << 10
STORED, MAYBE, FOUND = Kind.STORED, Kind.MAYBE_STORED, Kind.FOUND
MISSED, REMOVED, CLEARED = Kind.MISSED, Kind.REMOVED, Kind.CLEARED


def call(kind: Kind, begin: float, end: float) -> Call:
    return Call(kind, begin, end)


POSSIBLE = {
    "found after it was stored": [call(STORED, 1, 2), call(FOUND, 3, 4)],
    "found while it is stored": [call(STORED, 1, 9), call(FOUND, 3, 4)],
    "missed and found while it is stored": [
        call(STORED, 1, 9), call(MISSED, 2, 3), call(FOUND, 4, 5)
    ],
    "missed before": [call(MISSED, 0, 1), call(STORED, 2, 3)],
    "missed before a removal is heard of": [
        call(STORED, 1, 2), call(MISSED, 3, 4), call(REMOVED, 0, 9)
    ],
    "missed and not known to be stored": [call(MAYBE, 1, math.inf), call(MISSED, 3, 4)],
    "found of a store without an end": [call(MAYBE, 1, math.inf), call(FOUND, 3, 4)],
    "missed after a clear": [call(STORED, 1, 2), call(CLEARED, 3, 4), call(MISSED, 5, 6)],
    "found beside a clear": [call(STORED, 1, 2), call(CLEARED, 3, 9), call(FOUND, 5, 6)],
    "stored again": [
        call(STORED, 1, 2), call(REMOVED, 0, 4), call(MISSED, 3, 5), call(STORED, 6, 7),
        call(FOUND, 8, 9),
    ],
}  # fmt: skip
# Defects, as a history shows them.
IMPOSSIBLE = {
    "found before it was stored": [call(FOUND, 0, 1), call(STORED, 2, 3)],
    "found and never stored": [call(FOUND, 0, 1)],
    "lost": [call(STORED, 1, 2), call(MISSED, 3, 4)],
    "lost after it was found": [call(STORED, 1, 9), call(FOUND, 2, 3), call(MISSED, 4, 5)],
    "found after a clear": [call(STORED, 1, 2), call(CLEARED, 3, 4), call(FOUND, 5, 6)],
    "found after its removal was told": [
        call(STORED, 1, 2), call(REMOVED, 0, 4), call(FOUND, 5, 6)
    ],
    "removed twice": [call(STORED, 1, 2), call(REMOVED, 0, 4), call(REMOVED, 0, 5)],
    "removed and never stored": [call(REMOVED, 0, 4)],
    "missed twice for one removal": [
        call(STORED, 1, 2), call(REMOVED, 0, 9), call(MISSED, 3, 4), call(FOUND, 5, 6)
    ],
    "back after a clear": [
        call(MAYBE, 1, math.inf), call(CLEARED, 3, 4), call(MISSED, 5, 6), call(STORED, 7, 8),
        call(MISSED, 9, 10),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", POSSIBLE)
def test_history_that_could_have_been_is_possible(name: str) -> None:
    assert possible(POSSIBLE[name])


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_planted_defect_is_found(name: str) -> None:
    assert not possible(IMPOSSIBLE[name])


@pytest.fixture(scope="module")
def history() -> History:
    """Of four engines over a pool that is too small for them, with clears, and one with resets."""
    scene, said = Scene(), History()
    scene.daemon.pool_bytes, scene.daemon.extent_bytes = 4 * MIB, MIB
    try:
        scene.daemon.start()
        probes = scene.engines("one", "two", "three", "resetter", block_bytes=BLOCK_BYTES)
        watcher = Watcher(scene)
        watcher.start()
        clients = [
            Client(probe, said, ORDERS, resets=probe.engine_id == "resetter") for probe in probes
        ]
        clients[0].clear_by(scene)
        run_all(clients)
        due = scene.status().event_sequence
        wait_until(lambda: watcher.sequence >= due, "every event")
        watcher.close()
    finally:
        scene.close()
    for epoch, key, heard in watcher.removed:
        said.add(epoch, key, Call(REMOVED, 0.0, heard, "watcher"))
    return said


def test_what_engines_saw_at_once_could_have_been_one_after_the_other(history: History) -> None:
    assert not history.wrong
    kinds = Counter(call.kind for _, call in history.whole())
    assert all(kinds[kind] for kind in (STORED, FOUND, MISSED, REMOVED, CLEARED)), kinds
    assert faults(history.whole()) == []


def test_the_same_history_with_a_defect_could_not(history: History) -> None:
    without = [(block, each) for block, each in history.whole() if each.kind is not REMOVED]
    assert faults(without), "nothing was missed that had been removed"
    unstored = [
        (block, each) for block, each in history.whole() if each.kind not in (STORED, MAYBE)
    ]
    assert faults(unstored)
