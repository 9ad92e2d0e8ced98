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
