"""Lists of copies made and submitted by the native library, in two calls.

`kvd/mover/cuda/runs.py` says what the runs are, and makes the same ones with numpy. Here that takes
microseconds, also where a mover has slept and no cache is warm: then numpy takes half a
millisecond for one block, ten times what the copy takes.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.core.keys import U64
from kvd.mover.cuda.batch import BatchCall
from kvd.mover.cuda.runs import ROW_FIELDS, tables_of
from kvd.mover.layout import GroupMap, LocatedPart
from kvd.native import Library, address_of, start_of
from kvd_proto.libcuda import Libcuda

RUN_FIELDS = ("host", "device", "host_pitch", "device_pitch", "width", "height")
MOST_BATCH = 512  # as in copies.c
_FEWEST_RUNS = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run goes as a strided copy, and how many copies a batch has; see copiers.py."""

    batch_copies: int
    narrow_bytes: int
    least_steps: int
    most_pitch: int


class _Plan(ctypes.Structure):
    _fields_ = (
        ("together", c_void_p),
        ("alone", c_void_p),
        ("together_count", c_uint64),
        ("alone_count", c_uint64),
        ("regions", c_void_p),
        ("mappings", c_void_p),
        ("block_bytes", c_uint64),
        ("blocks_per_slot", c_uint64),
        ("extents", c_void_p),
        ("offsets", c_void_p),
        ("engine", c_void_p),
        ("slots", c_uint64),
        ("runs", c_void_p),
    )


class _Submission(ctypes.Structure):
    _fields_ = (
        ("runs", c_void_p),
        ("count", c_uint64),
        ("run", c_uint64),
        ("row", c_uint64),
        ("byte", c_uint64),
        ("is_store", c_uint64),
        ("stream", c_void_p),
        ("batch", c_void_p),
        ("tells", c_uint64),
        ("strided", c_void_p),
        ("to_device", c_void_p),
        ("to_host", c_void_p),
        ("batch_copies", c_uint64),
        ("narrow_bytes", c_uint64),
        ("least_steps", c_uint64),
        ("most_pitch", c_uint64),
        ("copied", c_uint64),
        ("failed", c_char_p),
        ("filled", c_uint64),
        ("arrays", c_uint64 * (3 * MOST_BATCH)),
    )


class NativeLists:
    """Makes lists of one direction, one after the other: it is the `CopyList` of the last."""

    def __init__(
        self,
        library: Library,
        driver: Libcuda,
        batch: BatchCall | None,
        limits: Limits,
        *,
        is_store: bool,
    ) -> None:
        assert 0 < limits.batch_copies <= MOST_BATCH
        self._driver = driver
        self._plan_runs, self._submit_runs = library.plan_copies, library.submit_copies
        self._plan = _Plan()
        self._plan_at = ctypes.addressof(self._plan)
        self._work = _Submission(
            is_store=is_store,
            batch=0 if batch is None else batch.address,
            tells=batch is not None and batch.tells_index,
            strided=driver.address("cuMemcpy2DAsync_v2"),
            to_device=driver.address("cuMemcpyHtoDAsync_v2"),
            to_host=driver.address("cuMemcpyDtoHAsync_v2"),
            batch_copies=limits.batch_copies,
            narrow_bytes=limits.narrow_bytes,
            least_steps=limits.least_steps,
            most_pitch=limits.most_pitch,
        )
        self._work_at = ctypes.addressof(self._work)
        self._room = 0
        self._make_room(_FEWEST_RUNS)
        self._kept: tuple[Any, ...] = ()  # what the plan points to

    def make(self, slots: LocatedPart, group: GroupMap, regions: U64, mappings: U64) -> NativeLists:
        """The slots' copies; the list made before ends. `mappings`: an address for each extent."""
        plan, work = self._plan, self._work
        together, alone = tables_of(group)
        extents, offsets = _whole(slots.extents, np.uint32), _whole(slots.offsets, np.uint64)
        engine = _whole(slots.engine_blocks, np.uint32)
        self._make_room(engine.size * (len(together) + len(alone)))
        self._kept = (together, alone, regions, mappings, extents, offsets, engine)
        starts = [start_of(array) for array in self._kept]
        plan.together, plan.alone, plan.regions, plan.mappings = starts[:4]
        plan.extents, plan.offsets, plan.engine = starts[4:]
        plan.together_count, plan.alone_count = len(together), len(alone)
        plan.block_bytes, plan.blocks_per_slot = group.engine_block_bytes, group.blocks_per_block
        plan.slots = len(extents)
        work.count = self._plan_runs(self._plan_at)
        work.run = work.row = work.byte = work.copied = work.filled = 0
        return self

    @property
    def runs(self) -> U64:
        """The runs of the present list, a copy; shape [n, 6], see RUN_FIELDS."""
        return self._runs[: self._work.count].copy()

    @property
    def has_more(self) -> bool:
        return bool(self._work.run < self._work.count)

    def submit(self, most_bytes: int, stream: int) -> int:
        """See `CopyList.submit`."""
        work = self._work
        before, work.stream = work.copied, stream
        code = self._submit_runs(self._work_at, most_bytes)
        if code:
            raise self._driver.error(work.failed.decode(), code)
        return int(work.copied - before)

    def _make_room(self, runs: int) -> None:
        if runs > self._room:
            self._room = 1 << (runs - 1).bit_length()
            self._runs: U64 = np.empty((self._room, len(RUN_FIELDS)), dtype=np.uint64)
            self._plan.runs = self._work.runs = address_of(self._runs)


def _whole(array: Any, dtype: Any) -> Any:
    return np.ascontiguousarray(array, dtype=dtype)


assert len(ROW_FIELDS) == 9, "struct gpu_row of copies.c has so many"
