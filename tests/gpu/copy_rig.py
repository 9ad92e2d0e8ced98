"""Memory on both sides for copies made in the test's own process, filled with noise."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from kvd.core.events import JobKind
from kvd.mover.cuda.runs import Runs

if TYPE_CHECKING:
    from kvd.mover.cuda.copiers import Copier

Bytes = npt.NDArray[np.uint8]

WAYS = ("as it is", "plain", "batch", "strided")


@contextmanager
def copying(way: str, kind: JobKind) -> Iterator[Copier]:
    """A copier that takes that way wherever it can, whatever is faster: "plain" has no batches,
    "strided" has strided copies for all that is evenly spaced, "batch" has none."""
    from kvd.mover.cuda import copiers

    with pytest.MonkeyPatch.context() as patch:
        if way == "strided":
            patch.setattr(copiers, "LEAST_STEPS", 2)
            patch.setattr(copiers, "NARROW_BYTES", 1 << 40)
        if way == "batch":
            patch.setattr(copiers, "LEAST_STEPS", 1 << 40)
        yield copiers.Copier(kind, None if way == "plain" else copiers.batch_call(), None)


class Rig:
    """A buffer on the device, a registered one in host memory, and a stream.

    Every byte of both is noise, so that a byte out of place shows anywhere.
    """

    def __init__(self, device_bytes: int, host_bytes: int) -> None:
        from cupy.cuda import runtime

        self.runtime = runtime
        runtime.setDevice(0)
        self.stream = int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))
        self.device = int(runtime.malloc(device_bytes))
        self.device_bytes = device_bytes
        self._mapped = mmap.mmap(-1, -(-host_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.host: Bytes = np.frombuffer(self._mapped, dtype=np.uint8)[:host_bytes]
        self.host_address = int(self.host.ctypes.data)
        runtime.hostRegister(self.host_address, len(self._mapped), 0)
        noise = np.random.default_rng(11)
        self.host[:] = noise.integers(0, 256, host_bytes, dtype=np.uint8)
        self.write_device(noise.integers(0, 256, device_bytes, dtype=np.uint8))

    def write_device(self, content: Bytes, at: int = 0) -> None:
        self._move(self.device + at, content, self.runtime.memcpyHostToDevice)

    def read_device(self, at: int = 0, nbytes: int | None = None) -> Bytes:
        found = np.empty(self.device_bytes if nbytes is None else nbytes, dtype=np.uint8)
        self._move(self.device + at, found, self.runtime.memcpyDeviceToHost)
        return found

    def sync(self) -> None:
        """Return once all that is queued has run."""
        self.runtime.streamSynchronize(self.stream)

    def copy(self, way: str, kind: JobKind, runs: Runs) -> None:
        """Copy with a fresh copier, and wait for the bytes."""
        with copying(way, kind) as copier:
            copier.submit(runs, self.stream)
        self.sync()

    def check(self, way: str, kind: JobKind, runs: Runs) -> None:
        """Copy, and compare every byte on both sides with copies made in host memory."""
        host, device = self.host.copy(), self.read_device()
        for host_at, device_at, width in self._stretches(runs):
            if kind is JobKind.STORE:
                host[host_at : host_at + width] = device[device_at : device_at + width]
            else:
                device[device_at : device_at + width] = host[host_at : host_at + width]
        self.copy(way, kind, runs)
        assert np.array_equal(self.host, host)
        assert np.array_equal(self.read_device(), device)

    def _stretches(self, runs: Runs) -> Iterator[tuple[int, int, int]]:
        columns = (runs.host, runs.device, runs.host_pitch, runs.device_pitch)
        shapes = (runs.width, runs.height)
        rows = zip(*(column.tolist() for column in (*columns, *shapes)), strict=True)
        for host, device, host_pitch, device_pitch, width, height in rows:
            for row in range(height):
                host_at = host + row * host_pitch - self.host_address
                yield host_at, device + row * device_pitch - self.device, width

    def _move(self, device: int, host: Bytes, memory_kind: int) -> None:
        to, source = device, int(host.ctypes.data)
        if memory_kind == self.runtime.memcpyDeviceToHost:
            to, source = source, to
        self.runtime.memcpyAsync(to, source, len(host), memory_kind, self.stream)
        self.sync()

    def close(self) -> None:
        self.sync()
        self.runtime.hostUnregister(self.host_address)
        self.runtime.free(self.device)
        self.runtime.streamDestroy(self.stream)
        del self.host
        self._mapped.close()


@contextmanager
def open_rig(device_bytes: int, host_bytes: int) -> Iterator[Rig]:
    """A rig; nothing may be under way at the end."""
    rig = Rig(device_bytes, host_bytes)
    try:
        yield rig
    finally:
        rig.close()
