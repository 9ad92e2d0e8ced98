"""The whole in a few worlds; `make sim` lives many more, and longer."""

from __future__ import annotations

import pytest

from tests.simulation.whole.__main__ import told
from tests.simulation.whole.shrink import failure_of, shrunk
from tests.simulation.whole.world import SimFailure, World

SEEDS = range(8)
STEPS = 1200


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_world_keeps_every_promise_and_serves_everybody_once_faults_stop(seed: int) -> None:
    try:
        world = World(seed, STEPS).run()
    except SimFailure as failure:
        pytest.fail(told(failure), pytrace=False)
    assert sum(engine.loads_done for engine in world.engines) > 0, "nothing was loaded"


def test_seed_says_all_that_happens() -> None:
    first, second = World(3, 300).run(), World(3, 300).run()
    assert first.journal.lines == second.journal.lines
    assert first.journal.digest == second.journal.digest


def test_failing_journal_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(world: World) -> None:
        assert world.restarts > 9, "mischief that nothing stands"

    monkeypatch.setattr(World, "_mischief", fails)
    first = failure_of(5, 200)
    assert first is not None, "200 steps without mischief"
    small = shrunk(5, 200, first, tries=25)
    assert small.kind == first.kind
    assert len(small.journal) <= len(first.journal) // 4
