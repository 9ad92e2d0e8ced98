"""Copies between a GPU's memory and the pool: asynchronous, in pieces, a stream per direction."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from kvd import native
from kvd.core.events import JobKind
from kvd.mover.copy_engine import CopyStopped, KeepGoing
from kvd.mover.cuda.copiers import Copier, Memories, batch_call
from kvd.mover.cuda.device import Device
from kvd.mover.cuda.imports import Imports
from kvd.mover.cuda.lane import Flight, Lane
from kvd.mover.cuda.pinned import PinnedExtents, Staging
from kvd.mover.cuda.process_memory import ProcessMemory
from kvd.mover.cuda.runs import null_ranges
from kvd.mover.facts import GpuFacts, MoverFacts
from kvd.mover.layout import (
    CudaRegion,
    GpuConfig,
    GroupMap,
    LocatedPart,
    MoverConfig,
    check_config,
)
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.libcuda import CudaError

Bytes = npt.NDArray[np.uint8]

# Between two looks at keep_going: below a millisecond at 50 GB/s, and two may be in flight.
MAX_PIECE_BYTES = 32 << 20
# Planned at once, and straight or through staging as a whole.
_MAX_SLAB_BYTES = 128 << 20
_FIRST_SLAB_BYTES = 8 << 20  # so that the first bytes leave soon; each slab is 4 times the last
# Also planned at once: by hand, eight million tiny fragments took 3 s and a gigabyte.
MAX_SLAB_STRETCHES = 256 << 10


class CudaCopyEngine:
    """The `CopyEngine` for memory on a GPU.

    Refuses, with field and reason, what `check_config`, `Device` and `Imports` refuse.
    """

    copies_at_once = 2  # the second is submitted while the first one's last pieces are copied

    def __init__(self, config: MoverConfig) -> None:
        check_config(config)
        assert config.gpu is not None, "host memory is not for this engine"
        self._config = config
        self._device = Device(config.gpu)
        regions = [region for region in config.regions if isinstance(region, CudaRegion)]
        assert len(regions) == len(config.regions), "host memory is not for this engine"
        self._own_memory = ProcessMemory(config.gpu.uuid)
        self._imports = Imports(self._device, regions)
        self._regions = np.array(self._imports.addresses, dtype=np.uint64)
        self._extents = PinnedExtents(config)
        self._staged_bytes = 0
        self._staged_lock = threading.Lock()
        try:
            self._lanes = self._open_lanes(config.gpu)
        except BaseException:
            self._imports.close()
            raise
        self._counted_bytes = self._own_memory.used_bytes()
        self._taken_at_start = self._device.bytes_taken()

    @property
    def facts(self) -> MoverFacts:
        device = self._device
        gpu = GpuFacts(
            device.uuid,
            device.name,
            device.driver_version,
            self._context_bytes(),
            self._extents.registered_bytes,
            self._extents.unregistered_count,
            self._staged_bytes,
            device.numa_node,
        )
        return MoverFacts(self._imports.transport, self._lanes[JobKind.STORE].copier.name, gpu)

    def _context_bytes(self) -> int:
        """What this process takes of the GPU: counted, else estimated by how free memory fell."""
        if self._counted_bytes is not None:
            return self._counted_bytes
        return self._taken_at_start

    # -- extents ----------------------------------------------------------------------------

    def open_extent(self, extent: int) -> Bytes:
        return self._extents.open(extent)

    def close_extent(self, extent: int) -> None:
        self._device.bind()
        self._extents.close(extent)

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        self._device.bind()
        self._extents.register(extent, keep_going)
        self._counted_bytes = self._own_memory.used_bytes()

    def warm_memory(self, keep_going: KeepGoing) -> None:
        """Nothing is cold: a GPU's memory is all there."""

    # -- copies -----------------------------------------------------------------------------

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        lane = self._lanes[kind]
        flight = Flight(lane)
        copied = 0
        self._device.bind()
        with lane.turn:
            _look(keep_going)  # before anything is touched: it may have been revoked meanwhile
            with flight:  # what fails is settled before the next one has the turn
                for slab in _slabs(part, self._config.groups[part.group]):
                    if all(self._extents.ready(extent) for extent in set(slab.extents.tolist())):
                        copied += self._copy_straight(kind, slab, flight, keep_going)
                    else:
                        copied += self._copy_staged(kind, slab, flight, keep_going)
        with flight:
            flight.wait()
        return copied

    def _copy_straight(
        self, kind: JobKind, slab: LocatedPart, flight: Flight, keep_going: KeepGoing
    ) -> int:
        """Submit the slab's copies between the GPU and its extents; the last may be in flight."""
        group = self._config.groups[slab.group]
        copied = 0
        if kind is JobKind.STORE and _has_nulls(slab):
            for extent, offset, size in null_ranges(slab, group):
                _look(keep_going)
                self._extents.view(extent)[offset : offset + size] = 0
        memories = Memories(self._regions, self._extents.addresses)
        copies = self._lanes[kind].copier.list(slab, group, memories)
        while copies.has_more:
            _look(keep_going)
            copied += flight.submit(copies, MAX_PIECE_BYTES)
        return copied

    def _copy_staged(
        self, kind: JobKind, slab: LocatedPart, flight: Flight, keep_going: KeepGoing
    ) -> int:
        """Copy the slab by way of the lane's staging buffer, as many slots at a time as it holds.

        An extent that is registered meanwhile makes no difference: only this thread touches it.
        """
        lane, group = self._lanes[kind], self._config.groups[slab.group]
        staging = lane.staging
        memories = Memories(self._regions, np.array([staging.address], dtype=np.uint64))
        copied = 0
        for _, slots in slab.pieces(len(staging.view) // group.part_bytes):
            _look(keep_going)
            size = len(slots.extents) * group.part_bytes
            staged = _laid_out(slots, group)
            if kind is JobKind.LOAD:
                self._exchange(kind, slots, staging, group.part_bytes)
            copies = lane.copier.list(staged, group, memories)
            while copies.has_more:
                copied += flight.submit(copies, MAX_PIECE_BYTES)
            flight.wait()  # then the buffer is the next one's
            if kind is JobKind.STORE:
                for _, offset, zeros in null_ranges(staged, group):
                    staging.view[offset : offset + zeros] = 0
                self._exchange(kind, slots, staging, group.part_bytes)
            with self._staged_lock:
                self._staged_bytes += size
        return copied

    def _exchange(
        self, kind: JobKind, slots: LocatedPart, staging: Staging, part_bytes: int
    ) -> None:
        """Copy whole slots between their extents and where `_laid_out` has them in staging."""
        places = zip(slots.extents.tolist(), slots.offsets.tolist(), strict=True)
        for number, (extent, offset) in enumerate(places):
            slot = self._extents.view(extent)[offset : offset + part_bytes]
            start = number * part_bytes
            if kind is JobKind.STORE:
                slot[:] = staging.view[start : start + part_bytes]
            else:
                staging.view[start : start + part_bytes] = slot

    # -- life -------------------------------------------------------------------------------

    def _open_lanes(self, gpu: GpuConfig) -> dict[JobKind, Lane]:
        staging_bytes = max(gpu.staging_bytes, *(g.part_bytes for g in self._config.groups))
        try:
            batch, library = batch_call(), native.library()
            return {
                kind: Lane(Copier(kind, batch, library), Staging(staging_bytes)) for kind in JobKind
            }
        except (CudaError, runtime.CUDARuntimeError) as error:
            raise self._device.refusal(error) from error

    def close(self) -> None:
        self._device.bind()
        for lane in self._lanes.values():
            lane.settle()
        self._extents.close_all()
        self._imports.close()
        for lane in self._lanes.values():
            lane.close()


def _look(keep_going: KeepGoing) -> None:
    if not keep_going():
        raise CopyStopped


def _has_nulls(part: LocatedPart) -> bool:
    """Whether it is worth looking for them: few parts have any, and the search costs."""
    return bool((part.engine_blocks == NULL_ENGINE_BLOCK).any())


def _slabs(part: LocatedPart, group: GroupMap) -> Iterator[LocatedPart]:
    """The part in stretches of slots that are planned at once."""
    stretches = len(group.fragments) * group.blocks_per_block
    most = max(1, min(_MAX_SLAB_BYTES // group.part_bytes, MAX_SLAB_STRETCHES // stretches))
    start, slots = 0, min(most, max(1, _FIRST_SLAB_BYTES // group.part_bytes))
    if len(part.extents) <= slots:
        yield part
        return
    while start < len(part.extents):
        yield part.rows(slice(start, start + slots))
        start, slots = start + slots, min(most, 4 * slots)


def _laid_out(slots: LocatedPart, group: GroupMap) -> LocatedPart:
    """The same slots, as if they lay one after the other in a single extent."""
    count = len(slots.extents)
    return LocatedPart(
        slots.group,
        np.zeros(count, dtype=np.uint32),
        np.arange(count, dtype=np.uint64) * np.uint64(group.part_bytes),
        slots.engine_blocks,
    )
