"""The disk tier's store: keys spread over the disks, each of which moves its part at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kvd.core.keys import U64
from kvd.tiers.disk import index_file
from kvd.tiers.disk.disk import Batch, Disk, UnderWay
from kvd.tiers.disk.files import DiskFiles, SystemFiles
from kvd.tiers.disk.identity import home_of
from kvd.tiers.disk.options import DiskOptions
from kvd.tiers.sealing import digests_of
from kvd.tiers.store import (
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierOptions,
    TierReason,
    TierUnusable,
    TierUsage,
    firsts_of,
    require_blocks,
    require_call,
    require_keys,
    require_scopes,
)

CALLS_AT_ONCE = 5


class DiskStore:
    """A `TierStore` in slab files. Opening it may raise TierUnusable."""

    compares_sums = True  # its seals are made of the same

    def __init__(self, options: TierOptions, files: DiskFiles | None = None) -> None:
        self._options = DiskOptions.of(options)
        self._errors: Counter[TierReason] = Counter()
        self._is_closed = False
        self._closing = threading.Lock()
        self._disks: list[Disk] = []
        try:
            for directory in self._options.directories:
                self._require_another(directory)
                taken = [disk.slab.identity for disk in self._disks]
                self._disks.append(Disk(directory, self._options, files or SystemFiles(), taken))
            self._seeds = [disk.seed for disk in self._disks]
            until = time.monotonic() + index_file.REFUSED_S  # of all disks: a start has its time
            for number, disk in enumerate(self._disks):
                disk.begin(self._seeds, number, until)
        except BaseException:
            self.close()
            raise

    def _require_another(self, directory: Path) -> None:
        """TierUnusable where it is one of the others, by another path."""
        for disk in self._disks:
            with contextlib.suppress(OSError):  # there is none yet, or its opening says more
                if directory.samefile(disk.directory):
                    raise TierUnusable(
                        f"directories: {directory} and {disk.directory} are one directory:"
                        " name it once"
                    )

    @property
    def concurrency(self) -> int:
        return CALLS_AT_ONCE

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        require_keys(keys)
        self._begin_call(deadline)
        digests, homes = self._homes(keys)
        there = np.zeros(len(keys), dtype=np.bool_)
        for number, disk in enumerate(self._disks):
            rows = np.flatnonzero(homes == number)
            if rows.size:
                there[rows] = disk.exists([keys[row] for row in rows.tolist()], digests[rows])
        answers: list[bool] = there.tolist()
        return answers

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=False)
        self._begin_call(deadline)
        firsts = firsts_of(blocks)
        outcomes = [Outcome.FULL] * len(blocks)
        batches = self._batches(blocks, sorted(set(firsts)), deadline)
        self._run(batches, outcomes, Disk.begin_write, Disk.end_write)
        return [outcomes[number] for number in firsts]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        require_blocks(blocks, to_fill=True)
        self._begin_call(deadline)
        outcomes = [Outcome.MISSING] * len(blocks)
        batches = self._batches(blocks, range(len(blocks)), deadline)
        self._run(batches, outcomes, Disk.begin_read, Disk.end_read)
        return outcomes

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        require_scopes(scopes)
        self._begin_call(deadline)
        for disk in self._disks if scopes else ():
            self._told(partial(disk.delete_scopes, scopes, deadline))

    def usage(self) -> TierUsage:
        errors = self._errors.copy()
        blocks = held = evicted = 0
        notes: list[str] = []
        for disk in self._disks if not self._is_closed else ():
            used = disk.usage()
            blocks, held, evicted = blocks + used[0], held + used[1], evicted + used[2]
            errors.update(disk.failures.counts.copy())
            notes += disk.notes
        capacity = sum(disk.slab.regions for disk in self._disks) * self._options.region_bytes
        return TierUsage(blocks, held, capacity, evicted, dict(errors), tuple(notes))

    def take_left(self) -> list[TierKey] | None:
        """Blocks that have left since the last call (`NamesWhatLeaves`)."""
        left = [disk.take_left() for disk in self._disks]
        if any(each is None for each in left):
            return None
        return [key for each in left for key in each or ()]

    def taken_away(self) -> str:
        """A disk's directory or file that was removed or replaced (`HasAPlace`)."""
        return next(filter(None, (disk.taken_away() for disk in self._disks)), "")

    def mount_points(self) -> Sequence[str]:
        """Those of its disks (`LiesBelowMounts`)."""
        points = (disk.mount_point for disk in self._disks)
        return tuple(dict.fromkeys(point for point in points if point))

    def close(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                for disk in self._disks:
                    disk.close()

    def _begin_call(self, deadline: float) -> None:
        require_call(deadline, self._errors, is_closed=self._is_closed)

    def _told(self, call: Callable[[], None]) -> None:
        try:
            call()
        except TierError as error:
            self._errors[error.reason] += 1
            raise

    def _homes(self, keys: Sequence[TierKey]) -> tuple[U64, np.ndarray]:
        digests = digests_of(keys)
        return digests, home_of(digests, self._seeds)

    def _batches(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], deadline: float
    ) -> list[tuple[Disk, Batch]]:
        digests, homes = self._homes([blocks[number].key for number in numbers])
        batches: list[tuple[Disk, Batch]] = []
        for home, disk in enumerate(self._disks):
            rows = np.flatnonzero(homes == home)
            if rows.size:
                mine = [numbers[row] for row in rows.tolist()]
                batch = Batch(mine, [blocks[number] for number in mine], digests[rows], deadline)
                batches.append((disk, batch))
        return batches

    def _run(
        self,
        batches: list[tuple[Disk, Batch]],
        outcomes: list[Outcome],
        begin: Callable[[Disk, Batch, list[Outcome]], UnderWay],
        end: Callable[[Disk, UnderWay, list[Outcome]], None],
    ) -> None:
        """Have every disk move its part at once. None of the parts is touched when it returns."""
        begun: list[tuple[Disk, UnderWay]] = []
        try:
            for disk, batch in batches:
                begun.append((disk, begin(disk, batch, outcomes)))
        finally:
            for disk, under_way in begun:
                end(disk, under_way, outcomes)
