"""Histories of concurrent engines whose daemon is killed (-9) within them.

Nothing is evicted here. So what was said to be stored is found ever after, until it is cleared.
"""

from __future__ import annotations

import math
import os
from collections import Counter

import pytest

from tests.faults.scene import MIB, Scene
from tests.linear.checker import Call, Kind, faults, possible
from tests.linear.clients import History, Killer, Survivor, run_all

ORDERS = int(os.environ.get("KVD_LINEAR_ORDERS", "60"))  # of each engine
DEATHS = max(4, ORDERS // 15)
BLOCK_BYTES = 64 << 10
STORED, FOUND, MISSED = Kind.STORED, Kind.FOUND, Kind.MISSED
CLEARED, MAYBE_CLEARED = Kind.CLEARED, Kind.MAYBE_CLEARED


@pytest.mark.parametrize(
    ("calls", "is_possible"),
    [
        ([Call(STORED, 1, 2), Call(MAYBE_CLEARED, 3, math.inf), Call(FOUND, 5, 6)], True),
        ([Call(STORED, 1, 2), Call(MAYBE_CLEARED, 3, math.inf), Call(MISSED, 5, 6)], True),
        ([Call(STORED, 1, 2), Call(MISSED, 3, 4), Call(MAYBE_CLEARED, 5, math.inf)], False),
        (
            [
                Call(STORED, 1, 2),
                Call(MAYBE_CLEARED, 3, math.inf),
                Call(MISSED, 5, 6),
                Call(FOUND, 7, 8),
            ],
            False,
        ),
    ],
    ids=["not done", "done", "lost before", "back after it was done"],
)
def test_a_clear_that_nobody_heard_the_end_of_is_done_or_not(
    calls: list[Call], is_possible: bool
) -> None:
    assert possible(calls) is is_possible


def test_what_was_said_to_be_stored_outlives_the_daemon() -> None:
    scene, said = Scene(), History()
    scene.daemon.pool_bytes, scene.daemon.extent_bytes = 32 * MIB, MIB
    try:
        scene.daemon.start()
        probes = scene.engines("one", "two", "three", "four", block_bytes=BLOCK_BYTES)
        clients = [Survivor(probe, said, ORDERS, resets=False) for probe in probes]
        clients[0].clear_by(scene)
        killer = Killer(scene, clients, DEATHS)
        run_all(clients, killer)
    finally:
        scene.close()
    assert not said.wrong
    kinds = Counter(call.kind for _, call in said.calls)
    assert all(kinds[kind] for kind in (STORED, FOUND, MISSED)), kinds
    assert any(clear.kind is CLEARED for clear in said.clears)
    found_later = [
        call for _, call in said.calls if call.kind is FOUND and call.begin > killer.died_at[0]
    ]
    assert found_later, "nothing was found after the first death"
    assert faults(said.whole()) == []
