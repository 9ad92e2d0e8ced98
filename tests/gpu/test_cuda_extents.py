"""Extents that are pinned late, or never, and what errors of the driver do to copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvd.core.errors import InvalidArgument
from kvd.core.events import JobKind
from kvd.mover.copy_engine import DeviceLost
from kvd.mover.facts import GpuFacts
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart
from kvd.mover.registration_errors import GPU_HANDLE_REFUSED
from kvd_proto.libcuda import CudaError, Libcuda
from tests.contract.test_copy_engine_contract import part
from tests.gpu.cuda_bench import EXTENT_BYTES, EXTENTS, Bench, Workshop, bench_of, workshop_of
from tests.gpu.driver import Driver, Exporter

BLOCKS = 16
BLOCK_BYTES = 4096
ILLEGAL_ADDRESS = 700  # stays for good
INVALID_VALUE = 1  # ends with the call
NOT_FOUND = 500


@pytest.fixture
def workshop(driver: Driver, exporter: Exporter) -> Iterator[Workshop]:
    with workshop_of(driver, exporter) as shop:
        yield shop


@pytest.fixture
def bench(workshop: Workshop) -> Iterator[Bench]:
    """An engine over one memory of two layers, all extents open and none pinned."""
    with bench_of(workshop, workshop.config([BLOCKS * BLOCK_BYTES], (layers(),))) as made:
        yield made


@pytest.fixture
def fake(driver: Driver) -> Driver:
    if not driver.is_fake:
        pytest.skip("faults are the fake driver's")
    return driver


def layers() -> GroupMap:
    half = BLOCK_BYTES // 2
    fragments = (FragmentSpec(0, 0, half, half), FragmentSpec(0, BLOCKS * half, half, half))
    return GroupMap(BLOCKS, 1, BLOCK_BYTES, fragments)


def blocks(ids: list[int], slot: int = 0) -> LocatedPart:
    """These engine blocks, each in another extent than the one before."""
    places = [(n % EXTENTS, (slot + n) * BLOCK_BYTES) for n in range(len(ids))]
    return part(0, places, [[number] for number in ids])


def gpu_facts(bench: Bench) -> GpuFacts:
    facts = bench.engine.facts.gpu
    assert facts is not None
    return facts


# -- pinning --------------------------------------------------------------------------------


def test_an_extent_is_pinned_while_it_is_open_and_no_longer(bench: Bench, fake: Driver) -> None:
    before = fake.counters()
    bench.warm()
    assert gpu_facts(bench).registered_bytes == EXTENTS * EXTENT_BYTES
    bench.engine.close_extent(1)
    after = fake.counters()
    assert after["registrations"] - before["registrations"] == EXTENTS
    assert after["unregistrations"] - before["unregistrations"] == 1
    assert after["registered_bytes"] - before["registered_bytes"] == (EXTENTS - 1) * EXTENT_BYTES
    assert gpu_facts(bench).registered_bytes == (EXTENTS - 1) * EXTENT_BYTES
    bench.engine.open_extent(1)
    assert fake.counters()["violations"] == 0


def pageable_copies_of(bench: Bench, driver: Driver) -> int:
    """Copies a few blocks each way; the bytes were right."""
    before = driver.counters()["pageable_copies"]
    bench.copy(JobKind.STORE, blocks([1, 2, 3, 9]))
    bench.copy(JobKind.LOAD, blocks([4, 5, 6, 7]))
    after = driver.counters()["pageable_copies"]
    bench.check()
    return after - before


def test_copies_on_pinned_extents_never_touch_pageable_memory(bench: Bench, fake: Driver) -> None:
    bench.warm()
    assert pageable_copies_of(bench, fake) == 0
    assert fake.counters()["violations"] == 0
    assert gpu_facts(bench).staged_bytes == 0


def test_copies_by_staging_touch_none_either_and_are_counted(bench: Bench, fake: Driver) -> None:
    assert pageable_copies_of(bench, fake) == 0
    assert gpu_facts(bench).staged_bytes == 8 * BLOCK_BYTES
    assert gpu_facts(bench).unregistered_extents == 0  # they are still to come


def test_warming_stops_when_told_to_and_pins_nothing_then(bench: Bench) -> None:
    bench.engine.warm_extent(0, lambda: False)
    asked = iter([True, False])
    bench.engine.warm_extent(0, lambda: next(asked))
    assert gpu_facts(bench).registered_bytes == 0
    bench.check()


def test_an_extent_that_cant_be_pinned_is_copied_to_by_staging_and_counted(
    bench: Bench, fake: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    pinned = fake.counters()["registered_bytes"]
    fake.inject("register_fails_after", bytes=pinned + EXTENT_BYTES)
    bench.warm()
    facts = gpu_facts(bench)
    assert (facts.unregistered_extents, facts.registered_bytes) == (2, EXTENT_BYTES)
    bench.copy(JobKind.STORE, blocks([1, 2, 3, 9]))
    bench.copy(JobKind.LOAD, blocks([4, 5, 6, 7]))
    bench.check()
    assert gpu_facts(bench).staged_bytes == 8 * BLOCK_BYTES
    said = capfd.readouterr().err
    assert said.count("can't be pinned") == 1
    assert "LimitMEMLOCK" in said
    bench.engine.close_extent(1)
    assert gpu_facts(bench).unregistered_extents == 1
    bench.engine.open_extent(1)


def test_what_could_not_be_pinned_is_pinned_by_a_later_copy_once_there_is_room(
    bench: Bench, fake: Driver
) -> None:
    fake.inject("register_fails_after", bytes=0)
    bench.warm()
    assert gpu_facts(bench).unregistered_extents == EXTENTS
    fake.inject("register_fails_after", bytes=1 << 40)
    bench.copy(JobKind.STORE, blocks([1, 2, 3]))
    facts = gpu_facts(bench)
    assert (facts.unregistered_extents, facts.staged_bytes) == (0, 0)
    assert facts.registered_bytes == EXTENTS * EXTENT_BYTES
    bench.check()


def test_pinning_is_given_up_after_a_few_attempts(bench: Bench, fake: Driver) -> None:
    from kvd.mover.cuda.pinned import MAX_ATTEMPTS

    fake.inject("register_fails_after", bytes=0)
    bench.warm()
    for _ in range(MAX_ATTEMPTS):
        bench.copy(JobKind.STORE, blocks([1, 2, 3]))
    fake.inject("register_fails_after", bytes=1 << 40)
    bench.copy(JobKind.STORE, blocks([4, 5, 6]))
    assert gpu_facts(bench).registered_bytes == 0
    assert gpu_facts(bench).unregistered_extents == EXTENTS
    bench.check()


def test_extents_that_are_pinned_during_copies_hold_the_right_bytes(
    bench: Bench, driver: Driver
) -> None:
    if driver.is_fake:
        driver.inject("latency", microseconds=2000)
    warming = threading.Thread(target=bench.warm)
    generator = np.random.default_rng(3)
    for number in range(12):
        if number == 2:
            warming.start()
        stored, loaded = generator.permutation(BLOCKS)[:6].tolist(), [0, 15, 3, 8, 4, 11]
        bench.copy(JobKind.STORE, blocks(stored, slot=number % 4))
        bench.copy(JobKind.LOAD, blocks(loaded, slot=number % 3))
        bench.check()
    warming.join()
    assert gpu_facts(bench).registered_bytes == EXTENTS * EXTENT_BYTES
    assert gpu_facts(bench).staged_bytes > 0


def test_loads_and_stores_go_on_at_once_and_both_are_right(bench: Bench, driver: Driver) -> None:
    if driver.is_fake:
        driver.inject("latency", microseconds=3000)
    bench.warm()
    stored, loaded = blocks([1, 2, 3, 4]), blocks([8, 9, 10, 11], slot=8)
    storing = threading.Thread(target=bench.engine.copy, args=(JobKind.STORE, stored, lambda: True))
    storing.start()
    bench.copy(JobKind.LOAD, loaded)
    storing.join()
    bench.expect(JobKind.STORE, stored)
    bench.check()


# -- errors ---------------------------------------------------------------------------------


@pytest.fixture
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls for a few blocks."""
    from kvd.mover.cuda import copiers

    monkeypatch.setattr(copiers, "BATCH_COPIES", 2)


@pytest.mark.usefixtures("short_batches")
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("warm", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])
def test_an_error_that_leaves_copies_in_doubt_loses_the_device(
    workshop: Workshop, fake: Driver, kind: JobKind, warm: bool, after: int
) -> None:
    with bench_of(workshop, workshop.config([BLOCKS * BLOCK_BYTES], (layers(),))) as bench:
        if warm:
            bench.warm()
        fake.inject("copy_error", code=ILLEGAL_ADDRESS, after=after)
        with pytest.raises(DeviceLost):
            bench.engine.copy(kind, blocks([1, 5, 3, 7, 9]), lambda: True)
        with pytest.raises(DeviceLost):
            bench.engine.copy(kind, blocks([2]), lambda: True)
        if not warm:
            with pytest.raises(DeviceLost, match="nor anything"):
                bench.engine.warm_extent(0, lambda: True)
        fake.reset()  # so that the bench can be taken apart


@pytest.mark.usefixtures("short_batches")
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("warm", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])
def test_an_error_of_one_call_fails_its_transfer_only(
    bench: Bench, fake: Driver, kind: JobKind, warm: bool, after: int
) -> None:
    if warm:
        bench.warm()
    moved = blocks([1, 5, 3, 7, 9])
    fake.inject("copy_error", code=INVALID_VALUE, after=after)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        bench.engine.copy(kind, moved, lambda: True)
    fake.reset()
    bench.copy(kind, moved)
    bench.check()


def test_whatever_stops_a_copy_nothing_is_under_way_afterwards(
    bench: Bench, fake: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.mover.cuda import engine

    monkeypatch.setattr(engine, "MAX_PIECE_BYTES", BLOCK_BYTES)
    fake.inject("latency", microseconds=20_000)
    bench.warm()
    asked = iter([True, True])
    moved = blocks([1, 5, 3])
    with pytest.raises(StopIteration):
        bench.engine.copy(JobKind.STORE, moved, lambda: next(asked))
    seen = [bench.shop.extent(number).copy() for number in range(EXTENTS)]
    for number, extent in enumerate(seen):
        bench.engine.close_extent(number)  # the fake would say so, were a copy still queued
        assert np.array_equal(bench.shop.extent(number), extent)
        bench.engine.open_extent(number)
    assert fake.counters()["violations"] == 0


# -- the engine's memory --------------------------------------------------------------------


def test_memory_whose_size_the_driver_does_not_tell_is_refused_and_not_kept_open(
    workshop: Workshop, fake: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.mover.cuda.engine import CudaCopyEngine

    def unknown(driver: Libcuda, address: int) -> tuple[int, int]:
        raise CudaError("cuMemGetAddressRange_v2", NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "")

    config = workshop.config([BLOCKS * BLOCK_BYTES], (layers(),))
    before = fake.counters()["ipc_open"]
    monkeypatch.setattr(Libcuda, "address_range", unknown)
    with pytest.raises(InvalidArgument, match="does not tell the size") as refused:
        CudaCopyEngine(config)
    assert (refused.value.reason, refused.value.field) == (GPU_HANDLE_REFUSED, "memories[0]")
    assert fake.counters()["ipc_open"] == before


def test_regions_of_one_allocation_are_one_open_handle(workshop: Workshop, fake: Driver) -> None:
    config = workshop.config([BLOCKS * BLOCK_BYTES], (layers(),))
    assert config.gpu is not None
    whole = workshop.allocations[0].region
    from dataclasses import replace

    from kvd.mover.cuda.engine import CudaCopyEngine

    regions = tuple(replace(whole, offset=whole.offset + 8 * n, bytes=256) for n in range(5))
    fragment = FragmentSpec(4, 0, 32, 16)
    group = GroupMap(8, 1, 16, (fragment,))
    before = fake.counters()
    engine = CudaCopyEngine(replace(config, regions=regions, groups=(group,)))
    assert fake.counters()["ipc_opens"] - before["ipc_opens"] == 1
    engine.close()
    after = fake.counters()
    assert after["ipc_closes"] - before["ipc_closes"] == 1
    assert after["ipc_open"] == before["ipc_open"]
    assert after["violations"] == 0
