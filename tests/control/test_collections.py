"""The collector doesn't hold the event loop over and over to look at all that is remembered."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvd.cli import serve


@pytest.fixture
def settled() -> Iterator[None]:
    before = gc.get_threshold()
    serve.settle_memory()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("settled")
def test_what_is_remembered_is_not_looked_at_whole_as_it_grows() -> None:
    before = [generation["collections"] for generation in gc.get_stats()]
    kept: list[list[int]] = [[] for _ in range(1_000_000)]
    young, _, whole = (
        generation["collections"] - count
        for generation, count in zip(gc.get_stats(), before, strict=True)
    )
    assert len(kept) == 1_000_000
    assert young > 100, "the young ones aren't collected"
    assert whole == 0


@pytest.mark.usefixtures("settled")
def test_what_came_since_the_last_collections_is_looked_at_in_small_lots() -> None:
    lots: list[int] = []

    def count(phase: str, facts: dict[str, int]) -> None:
        if phase == "start" and facts["generation"] == 1:
            lots.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))

    gc.callbacks.append(count)
    try:
        kept: list[list[int]] = [[] for _ in range(100_000)]
    finally:
        gc.callbacks.remove(count)
    assert len(kept) == 100_000
    assert lots
    assert max(lots) <= 5 * gc.get_threshold()[0]
