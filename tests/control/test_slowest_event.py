"""The benchmark of the slowest event drives every kind of event that there is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import get_args

import pytest

from benchmarks import slowest_event
from benchmarks.slowest_event_rig import Scale, Shape
from kvd.core import events

FEW = Scale(
    blocks=32_768,
    accounts=64,
    namespaces=8,
    live=2,
    known_of_groups=2,
    groups=4,
    leases=1024,
    jobs=32,
)


@pytest.fixture(autouse=True)
def _collections() -> Iterator[None]:
    """The benchmark sets them as a daemon does."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()


@pytest.mark.parametrize(
    ("shape", "policy"), [("small", "lru"), ("large", "arc"), ("small", "s3fifo")]
)
def test_every_kind_of_event_is_driven(shape: str, policy: str) -> None:
    with slowest_event.without_extents():
        found = asyncio.run(slowest_event.measure(Shape(shape, FEW), policy, 1))
    driven = {kind.split(",")[0] for kind in found}
    assert {kind.__name__ for kind in get_args(events.Event)} - driven == set()
