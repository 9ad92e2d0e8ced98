"""Real mover processes over GPU memory: what they say, what they refuse, and how they end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import packages_distributions
from importlib.util import find_spec

import numpy as np
import pytest

from kvd.core.errors import InvalidArgument
from kvd.core.events import JobKind, TransferOutcome
from kvd.core.keys import JobId, RowId, TransferId
from kvd.mover import registration_errors as errors
from kvd.mover.layout import CudaRegion, FragmentSpec, GpuConfig, GroupMap, LocatedPart, MoverConfig
from kvd.mover.process import MoverProcess
from kvd_proto.libcuda import libcuda
from tests.contract.test_copy_engine_contract import part
from tests.control.mover_rig import PATIENCE_S, HeardBySink, on_loop
from tests.gpu.cuda_bench import EXTENT_BYTES, EXTENTS, GUARD_BYTES, Workshop, workshop_of
from tests.gpu.driver import SHIM, Driver, Exporter

BLOCKS = 8
BLOCK_BYTES = 4096
OF_ITS_OWN_BYTES = (
    4 << 20
)  # a driver may put smaller allocations together, and keep what they lie in
DONE, FAILED = TransferOutcome.DONE, TransferOutcome.FAILED
OTHER_GPU = "GPU-00000000-0000-0000-0000-0000000000ff"
BROKEN = "exited with status 70"


@pytest.fixture
def workshop(driver: Driver, exporter: Exporter) -> Iterator[Workshop]:
    with workshop_of(driver, exporter) as shop:
        yield shop


@pytest.fixture
def fake(driver: Driver) -> Driver:
    if not driver.is_fake:
        pytest.skip("faults are the fake driver's")
    return driver


def config_of(workshop: Workshop) -> MoverConfig:
    group = GroupMap(BLOCKS, 1, BLOCK_BYTES, (FragmentSpec(0, 0, BLOCK_BYTES, BLOCK_BYTES),))
    return workshop.config([BLOCKS * BLOCK_BYTES], (group,))


@asynccontextmanager
async def started(
    config: MoverConfig, before_rows: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[MoverProcess, HeardBySink]]:
    """A mover with all extents mapped and warm; stopped afterwards, unless it is gone."""
    sink = HeardBySink()
    mover = await MoverProcess.start(config, sink)
    try:
        before_rows()
        for row in range(EXTENTS):
            mover.map_row(RowId(row), row)
        assert await mover.warm(PATIENCE_S)
        yield mover, sink
    finally:
        if not sink.gone:
            await mover.stop()


async def ended(
    mover: MoverProcess, sink: HeardBySink, number: int, kind: JobKind, moved: LocatedPart
) -> TransferOutcome:
    """Have it copied, with both halves there at once."""
    assert mover.start_transfer(TransferId(number), (JobId(number),), kind, (moved,))
    mover.mark_ready(JobId(number))
    return await sink.outcome(number)


# -- at work --------------------------------------------------------------------------------


@on_loop
async def test_a_mover_stores_and_loads_gpu_memory_and_says_how(workshop: Workshop) -> None:
    config = config_of(workshop)
    where = workshop.allocations[0].address + GUARD_BYTES
    content = np.random.default_rng(1).integers(0, 256, 2 * BLOCK_BYTES, dtype=np.uint8).tobytes()
    workshop.exporter.write(where + 2 * BLOCK_BYTES, content)
    stored = part(0, [(0, 0), (2, BLOCK_BYTES)], [[2], [3]])
    async with started(config) as (mover, sink):
        assert await ended(mover, sink, 1, JobKind.STORE, stored) is DONE
        loaded = part(0, [(0, 0), (2, BLOCK_BYTES)], [[7], [0]])
        assert await ended(mover, sink, 2, JobKind.LOAD, loaded) is DONE
        assert sink.bytes == {1: 2 * BLOCK_BYTES, 2: 2 * BLOCK_BYTES}
        facts = mover.facts
    assert workshop.extent(0)[:BLOCK_BYTES].tobytes() == content[:BLOCK_BYTES]
    assert workshop.exporter.read(where + 7 * BLOCK_BYTES, BLOCK_BYTES) == content[:BLOCK_BYTES]
    assert workshop.exporter.read(where, BLOCK_BYTES) == content[BLOCK_BYTES:]
    assert (facts.transport, facts.copier) == ("cuda-ipc", "batch")
    assert facts.gpu is not None
    assert facts.gpu.uuid == workshop.gpu.uuid
    assert facts.gpu.registered_bytes == EXTENTS * EXTENT_BYTES
    assert (facts.gpu.unregistered_extents, facts.gpu.staged_bytes) == (0, 0)


@on_loop
async def test_checksums_are_of_what_lies_in_the_slots(workshop: Workshop) -> None:
    config = replace(config_of(workshop), checksums=True)
    places = [(1, 0), (1, BLOCK_BYTES), (1, 3 * BLOCK_BYTES)]
    async with started(config) as (mover, sink):
        assert await ended(mover, sink, 1, JobKind.STORE, part(0, places, [[0], [5], [6]])) is DONE
        sums = sink.finished[1].checksums
        load = replace(part(0, places, [[1], [2], [3]]), checksums=sums)
        assert await ended(mover, sink, 2, JobKind.LOAD, load) is DONE
        workshop.extent(1)[BLOCK_BYTES + 5] ^= 1
        assert await ended(mover, sink, 3, JobKind.LOAD, load) is FAILED
        assert sink.finished[3].damaged.tolist() == [1]


@on_loop
async def test_what_goes_through_staging_is_told_after_the_transfer(
    workshop: Workshop, fake: Driver
) -> None:
    def pin_nothing() -> None:
        fake.inject("register_fails_after", bytes=0)

    async with started(config_of(workshop), pin_nothing) as (mover, sink):
        assert await ended(mover, sink, 1, JobKind.STORE, part(0, [(0, 0)], [[2]])) is DONE
        assert await ended(mover, sink, 2, JobKind.STORE, part(0, [(1, 0)], [[2]])) is DONE
        assert mover.facts.gpu is not None
        assert mover.facts.gpu.unregistered_extents == EXTENTS
        async with asyncio.timeout(PATIENCE_S):
            while mover.facts.gpu.staged_bytes < 2 * BLOCK_BYTES:  # noqa: ASYNC110 - untold
                await asyncio.sleep(0.01)


@on_loop
async def test_what_the_mover_takes_of_the_gpu_is_what_went_since_the_worker_looked(
    workshop: Workshop, driver: Driver
) -> None:
    config = config_of(workshop)
    assert config.gpu is not None
    before = workshop.exporter.free_bytes()
    told = replace(config, gpu=replace(config.gpu, free_bytes_before=before))
    async with started(told) as (mover, _):
        assert mover.facts.gpu is not None
        assert mover.facts.gpu.context_bytes > 0
        if driver.is_fake:  # nobody else takes memory there
            assert mover.facts.gpu.context_bytes == before - workshop.exporter.free_bytes()
    if driver.is_fake:  # elsewhere NVML may tell
        async with started(config) as (mover, _):
            assert mover.facts.gpu is not None
            assert mover.facts.gpu.context_bytes == 0  # nobody said what was free before


@pytest.mark.parametrize("domain", [0, 0xFFFF, 0x10000, 0xFEDCBA98])
def test_a_gpu_on_a_bus_of_any_domain_can_be_used(
    workshop: Workshop, fake: Driver, domain: int
) -> None:
    @on_loop
    async def check() -> None:
        fake.inject("pci", domain=domain)
        assert libcuda().pci_bus_id(0) == f"{domain:04X}:10:00.0"
        async with started(config_of(workshop)) as (mover, _):
            assert mover.facts.gpu is not None

    check()


# -- refusals -------------------------------------------------------------------------------


async def refusal_of(config: MoverConfig) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as refusal:
        await MoverProcess.start(config, HeardBySink())
    return refusal.value


@pytest.mark.parametrize(
    ("fault", "value", "told"),
    [
        (
            "compute_mode",
            {"mode": 3},
            (errors.GPU_MODE_UNSUPPORTED, "--compute-mode=DEFAULT"),
        ),
        ("mps", {"on": True}, (errors.GPU_MODE_UNSUPPORTED, "stop MPS")),
        (
            "context_fails",
            {"code": 2},
            (errors.GPU_MEMORY_SHORT, "gpu_memory_utilization"),
        ),
        (
            "context_fails",
            {"code": 46},
            (errors.TRANSPORT_UNSUPPORTED, "can't be made ready"),
        ),
        ("open_fails", {"code": 400}, (errors.GPU_HANDLE_REFUSED, "hostPID")),
    ],
)
def test_a_gpu_that_cant_be_used_is_refused_with_the_fix(
    workshop: Workshop, fake: Driver, fault: str, value: dict[str, int], told: tuple[str, str]
) -> None:
    reason, fix = told

    @on_loop
    async def check() -> None:
        config = config_of(workshop)
        fake.inject(fault, **value)
        refusal = await refusal_of(config)
        assert (refusal.reason, refusal.field) == (reason, "memories[0]")
        assert fix in str(refusal)

    check()


def beyond(config: MoverConfig) -> MoverConfig:
    region = config.regions[0]
    assert isinstance(region, CudaRegion)
    return replace(config, regions=(replace(region, bytes=region.bytes + (4 << 20)),))


def short_handle(config: MoverConfig) -> MoverConfig:
    region = config.regions[0]
    assert isinstance(region, CudaRegion)
    return replace(config, regions=(replace(region, handle=region.handle[:-1]),))


def on_gpu(uuid: str) -> Callable[[MoverConfig], MoverConfig]:
    return lambda config: replace(config, gpu=GpuConfig(uuid))


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        (beyond, "INVALID_ARGUMENT", "memories[0].bytes"),
        (short_handle, "INVALID_ARGUMENT", "memories[0].cuda_ipc.handle"),
        (on_gpu(OTHER_GPU), errors.GPU_UNKNOWN, "memories[0]"),
        (on_gpu("MIG-" + OTHER_GPU[4:]), errors.GPU_MODE_UNSUPPORTED, "memories[0]"),
    ],
)
def test_memory_that_cant_be_reached_is_refused_by_name(
    workshop: Workshop, change: Callable[[MoverConfig], MoverConfig], reason: str, field: str
) -> None:
    @on_loop
    async def check() -> None:
        refusal = await refusal_of(change(config_of(workshop)))
        assert (refusal.reason, refusal.field) == (reason, field)

    check()


@on_loop
async def test_memory_that_its_owner_has_freed_is_refused(workshop: Workshop) -> None:
    group = GroupMap(BLOCKS, 1, BLOCK_BYTES, (FragmentSpec(0, 0, BLOCK_BYTES, BLOCK_BYTES),))
    config = workshop.config([OF_ITS_OWN_BYTES], (group,))
    workshop.release()
    refusal = await refusal_of(config)
    assert (refusal.reason, refusal.field) == (
        errors.GPU_HANDLE_REFUSED,
        "memories[0]",
    )


@on_loop
async def test_a_descriptor_of_no_physical_allocation_is_refused(workshop: Workshop) -> None:
    config = config_of(workshop)
    fd = os.memfd_create("no allocation")
    os.truncate(fd, 2 << 20)
    region = CudaRegion(0, BLOCKS * BLOCK_BYTES, fd=fd, allocation_bytes=2 << 20)
    try:
        refusal = await refusal_of(replace(config, regions=(region,)))
    finally:
        os.close(fd)
    assert (refusal.reason, refusal.field) == (
        errors.GPU_HANDLE_REFUSED,
        "memories[0]",
    )


@on_loop
async def test_a_wrong_size_of_a_physical_allocation_is_refused(workshop: Workshop) -> None:
    group = GroupMap(1, 1, BLOCK_BYTES, (FragmentSpec(0, 0, BLOCK_BYTES, BLOCK_BYTES),))
    config = workshop.vmm_config([BLOCK_BYTES], (group,))
    region = config.regions[0]
    assert isinstance(region, CudaRegion)
    wrong = replace(region, allocation_bytes=2 * region.allocation_bytes)
    refusal = await refusal_of(replace(config, regions=(wrong,)))
    assert (refusal.reason, refusal.field) == (
        errors.GPU_HANDLE_REFUSED,
        "memories[0]",
    )


@on_loop
async def test_a_daemon_without_cupy_says_what_to_install(
    workshop: Workshop, fake: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(workshop)
    spec = find_spec("cupy")
    is_shim = spec is not None and str(spec.origin).startswith(str(SHIM))
    if not is_shim or "cupy" in packages_distributions():
        pytest.skip("CuPy is installed here")
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p != str(SHIM)))
    refusal = await refusal_of(config)
    assert refusal.reason == errors.TRANSPORT_UNSUPPORTED
    assert "extra cuda12 or cuda13" in str(refusal)


# -- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])
def test_a_mover_that_lost_its_gpu_ends_at_once(
    workshop: Workshop, fake: Driver, kind: JobKind
) -> None:
    @on_loop
    async def check() -> None:
        async with started(config_of(workshop)) as (mover, sink):
            free = fake.free_bytes()
            fake.inject("copy_error", code=700, after=0, pid=mover.pid)
            assert mover.start_transfer(
                TransferId(1), (JobId(1),), kind, (part(0, [(0, 0)], [[2]]),)
            )
            mover.mark_ready(JobId(1))
            await sink.until(lambda: sink.gone)
            assert sink.gone == [(1, BROKEN)]
            assert not sink.outcomes
            assert fake.free_bytes() > free

    check()


@on_loop
async def test_a_mover_ends_on_its_own_when_told_to_stop_while_a_copy_hangs(
    workshop: Workshop, fake: Driver
) -> None:
    async with started(config_of(workshop)) as (mover, sink):
        fake.inject("latency", microseconds=60_000_000)
        before = fake.counters()["copies_async"]
        assert mover.start_transfer(
            TransferId(1), (JobId(1),), JobKind.STORE, (part(0, [(0, 0)], [[2]]),)
        )
        mover.mark_ready(JobId(1))
        for _ in range(1000):
            if fake.counters()["copies_async"] > before:
                break
            await asyncio.sleep(0.01)
        await mover.stop()
        assert mover._child.returncode == 0  # not killed
        assert not sink.outcomes
