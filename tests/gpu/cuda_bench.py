"""A CudaCopyEngine in the test's process, over memory that an exporter owns.

Every byte that a copy must not touch is a canary: around the regions in their allocations, between
the blocks, and in the pool's extents.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.core.events import JobKind
from kvd.core.keys import MoverId
from kvd.mover.copy_engine import CopyEngine, KeepGoing
from kvd.mover.layout import (
    CudaRegion,
    GpuConfig,
    GroupMap,
    LocatedPart,
    MoverConfig,
)
from kvd.processes.mappings import ExtentFiles
from tests.contract.test_copy_engine_contract import expected
from tests.gpu.driver import Driver, Exporter

Bytes = npt.NDArray[np.uint8]

EXTENT_BYTES = 64 << 10
EXTENTS = 3
GUARD_BYTES = 512  # around each region, in its allocation
PHYSICAL_BYTES = 2 << 20  # granularity of allocations by cuMemCreate


@dataclass
class Allocation:
    """One allocation of the exporter's, with the region in its middle."""

    address: int
    bytes: int
    region: CudaRegion

    @property
    def inside(self) -> slice:
        return slice(GUARD_BYTES, GUARD_BYTES + self.region.bytes)


@dataclass
class Workshop:
    """Builds configurations over an exporter's memory and a pool's files."""

    directory: Path
    driver: Driver
    exporter: Exporter
    gpu: GpuConfig
    allocations: list[Allocation] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    @property
    def extents(self) -> ExtentFiles:
        return ExtentFiles(self.directory / "extents", 0, EXTENT_BYTES)

    def config(self, region_bytes: Sequence[int], groups: tuple[GroupMap, ...]) -> MoverConfig:
        """A region in an allocation of its own for each size, by legacy handles."""
        return self._config(region_bytes, groups, self._malloc)

    def vmm_config(self, region_bytes: Sequence[int], groups: tuple[GroupMap, ...]) -> MoverConfig:
        """The same over exported physical allocations."""
        return self._config(region_bytes, groups, self._physical)

    def release(self) -> None:
        """Free what the exporter allocated; nobody has it open."""
        while self.allocations:
            self.exporter.free(self.allocations.pop().address)
        while self.fds:
            os.close(self.fds.pop())

    def extent(self, number: int) -> Bytes:
        """An extent's bytes, past the engine."""
        return np.memmap(self.extents.path(number), dtype=np.uint8, mode="r+")

    def read(self, allocation: Allocation) -> Bytes:
        """A whole allocation's bytes, as its owner sees them."""
        return np.frombuffer(
            bytearray(self.exporter.read(allocation.address, allocation.bytes)), dtype=np.uint8
        )

    def _config(
        self,
        region_bytes: Sequence[int],
        groups: tuple[GroupMap, ...],
        allocate: Callable[[int], Allocation],
    ) -> MoverConfig:
        self.allocations = [allocate(size) for size in region_bytes]
        regions = tuple(allocation.region for allocation in self.allocations)
        return MoverConfig(MoverId(1), regions, groups, self.extents, gpu=self.gpu)

    def _malloc(self, size: int) -> Allocation:
        whole = size + 2 * GUARD_BYTES
        address = self.exporter.allocate(whole)
        handle, offset, _ = self.exporter.ipc_handle(address)
        return Allocation(address, whole, CudaRegion(offset + GUARD_BYTES, size, handle))

    def _physical(self, size: int) -> Allocation:
        whole = -(-(size + 2 * GUARD_BYTES) // PHYSICAL_BYTES) * PHYSICAL_BYTES
        address = self.exporter.allocate(whole, "vmm_exportable")
        self.fds.append(self.exporter.export_fd(address))
        region = CudaRegion(GUARD_BYTES, size, fd=self.fds[-1], allocation_bytes=whole)
        return Allocation(address, whole, region)


@contextmanager
def workshop_of(driver: Driver, exporter: Exporter) -> Iterator[Workshop]:
    """A workshop whose files and allocations are gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm"))
    (directory / "extents").mkdir()
    gpu = GpuConfig(exporter.uuid, staging_bytes=1 << 20)
    shop = Workshop(directory, driver, exporter, gpu)
    for number in range(EXTENTS):
        with shop.extents.path(number).open("wb") as file:
            file.truncate(EXTENT_BYTES)
    try:
        yield shop
        shop.release()
    finally:
        shutil.rmtree(directory)


@dataclass
class Bench:
    """An engine at work, and models of all memory as it must look."""

    shop: Workshop
    config: MoverConfig
    engine: CopyEngine
    device: list[Bytes]  # whole allocations
    pool: list[Bytes]

    def copy(self, kind: JobKind, moved: LocatedPart, keep_going: KeepGoing = lambda: True) -> None:
        """Copy, and have the models copied alike; the bytes moved are compared."""
        assert self.engine.copy(kind, moved, keep_going) == self.expect(kind, moved)

    def expect(self, kind: JobKind, moved: LocatedPart) -> int:
        """Apply a copy to the models only; bytes moved."""
        inside = [
            view[allocation.inside]
            for view, allocation in zip(self.device, self.shop.allocations, strict=True)
        ]
        return expected(kind, self.config, moved, (inside, self.pool))

    def check(self) -> None:
        """Compare every byte on both sides."""
        for number, allocation in enumerate(self.shop.allocations):
            seen = self.shop.read(allocation)
            wrong = np.flatnonzero(seen != self.device[number])
            assert not wrong.size, f"memory {number} differs at {wrong[:8].tolist()}"
        for number, model in enumerate(self.pool):
            wrong = np.flatnonzero(self.shop.extent(number) != model)
            assert not wrong.size, f"extent {number} differs at {wrong[:8].tolist()}"

    def warm(self) -> None:
        for extent in range(EXTENTS):
            self.engine.warm_extent(extent, lambda: True)


@contextmanager
def bench_of(shop: Workshop, config: MoverConfig) -> Iterator[Bench]:
    """An engine with all extents open and not warm yet, all memory filled with noise."""
    from kvd.mover.cuda.engine import CudaCopyEngine

    noise = np.random.default_rng(7)
    device = []
    for allocation in shop.allocations:
        device.append(noise.integers(1, 256, allocation.bytes, dtype=np.uint8))
        shop.exporter.write(allocation.address, device[-1].tobytes())
    pool = []
    for number in range(EXTENTS):
        pool.append(noise.integers(1, 256, EXTENT_BYTES, dtype=np.uint8))
        shop.extent(number)[:] = pool[-1]
    bench = Bench(shop, config, CudaCopyEngine(config), device, pool)
    for extent in range(EXTENTS):
        bench.engine.open_extent(extent)
    try:
        yield bench
    finally:
        bench.engine.close()
