"""Extents on real huge pages, pinned and copied to and from: on a fake driver, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvd.core.events import JobKind
from kvd.mover.layout import FragmentSpec, GroupMap, MoverConfig
from kvd.processes.mappings import ExtentFiles
from tests.contract.test_copy_engine_contract import part
from tests.gpu.cuda_bench import Workshop, workshop_of
from tests.gpu.driver import Driver, Exporter
from tests.huge_pages import PAGE_BYTES, huge_pages

BLOCKS = 32
BLOCK_BYTES = 65536
EXTENTS = 2
GROUP = GroupMap(BLOCKS, 1, BLOCK_BYTES, (FragmentSpec(0, 0, BLOCK_BYTES, BLOCK_BYTES),))


@pytest.fixture
def workshop(driver: Driver, exporter: Exporter) -> Iterator[Workshop]:
    with workshop_of(driver, exporter) as shop:
        yield shop


@pytest.fixture
def config(workshop: Workshop, tmp_path: Path) -> Iterator[MoverConfig]:
    """A rank's one memory, and a pool of two extents of a huge page each."""
    made = workshop.config([BLOCKS * BLOCK_BYTES], (GROUP,))
    with huge_pages(tmp_path / "huge", EXTENTS + 1) as mount:
        made = replace(made, extents=ExtentFiles(mount, 0, PAGE_BYTES))
        for extent in range(EXTENTS):
            with made.extents.path(extent).open("wb") as file:
                file.truncate(PAGE_BYTES)
        yield made
        for extent in range(EXTENTS):
            made.extents.path(extent).unlink()


def test_blocks_go_to_pinned_huge_pages_and_back(workshop: Workshop, config: MoverConfig) -> None:
    from kvd.mover.cuda.engine import CudaCopyEngine

    (allocation,) = workshop.allocations
    written = np.random.default_rng(3).integers(1, 256, allocation.bytes, dtype=np.uint8)
    workshop.exporter.write(allocation.address, written.tobytes())
    engine = CudaCopyEngine(config)
    views = [engine.open_extent(extent) for extent in range(EXTENTS)]
    for extent in range(EXTENTS):
        engine.warm_extent(extent, lambda: True)
    places = [(n % EXTENTS, (n // EXTENTS) * BLOCK_BYTES) for n in range(BLOCKS)]
    stored = part(0, places, [[n] for n in range(BLOCKS)])
    assert engine.copy(JobKind.STORE, stored, lambda: True) == BLOCKS * BLOCK_BYTES
    blocks = written[allocation.inside].reshape(BLOCKS, BLOCK_BYTES)
    for number, (extent, offset) in enumerate(places):
        assert np.array_equal(views[extent][offset : offset + BLOCK_BYTES], blocks[number])
    swapped = part(0, places, [[BLOCKS - 1 - n] for n in range(BLOCKS)])
    assert engine.copy(JobKind.LOAD, swapped, lambda: True) == BLOCKS * BLOCK_BYTES
    seen = workshop.read(allocation)
    assert np.array_equal(seen[allocation.inside].reshape(BLOCKS, BLOCK_BYTES), blocks[::-1])
    facts = engine.facts.gpu
    assert facts is not None
    assert facts.registered_bytes == EXTENTS * PAGE_BYTES
    assert (facts.unregistered_extents, facts.staged_bytes) == (0, 0)
    del views
    engine.close()
    if workshop.driver.is_fake:
        assert workshop.driver.counters()["violations"] == 0
