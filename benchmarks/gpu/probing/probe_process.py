"""A process that does with CUDA what the probe tells it, a call a line: `-m …probe_process`.

The probe itself never opens a device: each role (engine, mover, observer) is one such process,
which can be killed, put into a PID namespace, or stripped of rights.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import cuda as binding
from benchmarks.gpu.cuda import Cuda, PhysicalMemory
from benchmarks.gpu.probing.copying import Copying
from benchmarks.gpu.probing.products import Products

MIB = 1 << 20
POPULATE_WRITE = 23  # madvise, linux/mman.h
SET_PDEATHSIG = 1  # prctl, linux/prctl.h

libc = ctypes.CDLL(None, use_errno=True)


class Hands:
    """Every public method is one order; arguments and answers are what JSON can say."""

    def __init__(self) -> None:
        self._cuda: Cuda | None = None
        self._mapped: dict[int, np.ndarray[Any, Any]] = {}
        self._copying: Copying | None = None
        self._products: Products | None = None
        self._physical: PhysicalMemory | None = None
        self._queue = 0

    @property
    def cuda(self) -> Cuda:
        assert self._cuda is not None, "start was not called"
        return self._cuda

    @property
    def copying(self) -> Copying:
        if self._copying is None:
            self._copying = Copying(self.cuda)
        return self._copying

    @property
    def physical(self) -> PhysicalMemory:
        if self._physical is None:
            self._physical = PhysicalMemory(self.cuda)
        return self._physical

    # -- the process --------------------------------------------------------------------------

    def limit_locked_memory(self, size: int, user: int) -> dict[str, int]:
        """Take the limit on locked memory down, and root's right to pass it."""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (size, size))
        if user and os.getuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        return {"limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], "uid": os.getuid()}

    def load_driver(self) -> float:
        """Seconds of loading and initialising the driver."""
        began = time.perf_counter()
        self._cuda = Cuda()
        return time.perf_counter() - began

    def start(self) -> dict[str, Any]:
        """Load the driver and make the primary context of the first device."""
        loading = self.load_driver() if self._cuda is None else 0.0
        began = time.perf_counter()
        self.cuda.open_device()
        opening = time.perf_counter() - began
        return {"pid": os.getpid(), "driver_seconds": loading, "context_seconds": opening}

    def device(self) -> dict[str, Any]:
        free, total = self.cuda.memory()
        found: dict[str, Any] = {"name": self.cuda.name(), "uuid": self.cuda.uuid()}
        found |= {"cuda": self.cuda.version(), "free_bytes": free, "total_bytes": total}
        for name, number in binding.DEVICE_ATTRIBUTES.items():
            try:
                found[name] = self.cuda.attribute(number)
            except binding.Failed as error:
                found[name] = str(error)
        return found

    def pid(self) -> int:
        return os.getpid()

    def memory(self) -> int:
        """Free bytes of the device."""
        return self.cuda.memory()[0]

    def make_streams(self, count: int) -> int:
        return len([self.cuda.stream() for _ in range(count)])

    def import_cupy(self) -> float:
        """Seconds of importing CuPy and of its first call that needs the context."""
        began = time.perf_counter()
        from cupy.cuda import runtime  # noqa: PLC0415 - what it costs is the question

        runtime.free(0)
        return time.perf_counter() - began

    def import_torch(self) -> float:
        began = time.perf_counter()
        import torch  # noqa: PLC0415 - what it costs is the question

        if not torch.cuda.is_available():
            raise binding.Failed(f"torch {torch.__version__} has no CUDA device")
        torch.zeros(1, device="cuda")
        return time.perf_counter() - began

    def make_kernel(self) -> bool:
        return self.copying.kernel() is not None

    # -- memory and handles ---------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        return self.cuda.allocate(size)

    def free(self, address: int) -> None:
        self.cuda.call("cuMemFree_v2", address)

    def fill(self, address: int, value: int, size: int) -> None:
        self.cuda.fill(address, value, size)

    def sample(self, address: int) -> str:
        """16 bytes there, as hexadecimal digits."""
        taken = ctypes.create_string_buffer(16)
        self.cuda.call("cuMemcpyDtoH_v2", taken, address, 16)
        return taken.raw.hex()

    def export(self, address: int) -> str:
        return self.cuda.export(address).hex()

    def open(self, handle: str) -> dict[str, Any]:
        began = time.perf_counter()
        address = self.cuda.open_handle(bytes.fromhex(handle))
        return {"address": address, "seconds": time.perf_counter() - began}

    def close(self, address: int) -> float:
        began = time.perf_counter()
        self.cuda.call("cuIpcCloseMemHandle", address)
        return time.perf_counter() - began

    def range_of(self, address: int) -> list[int]:
        return list(self.cuda.range_of(address))

    def pointer(self, address: int) -> dict[str, Any]:
        """Every attribute that the driver tells of a pointer, or why it doesn't."""
        found: dict[str, Any] = {}
        for name in binding.POINTER_ATTRIBUTES:
            try:
                found[name] = self.cuda.pointer_attribute(name, address)
            except binding.Failed as error:
                found[name] = str(error)
        return found

    def allocate_kind(self, kind: str, size: int) -> int:
        return self.physical.allocate(kind, size)

    def export_descriptor(self, address: int) -> int:
        return self.physical.export(address)

    def open_descriptor(self, pid: int, number: int, size: int) -> int:
        return self.physical.open(pid, number, size)

    def is_physical(self, address: int) -> bool:
        return self.physical.is_physical(address)

    # -- host memory ----------------------------------------------------------------------------

    def map_file(self, path: str) -> dict[str, Any]:
        """Map a file whole and touch its pages; its address, and seconds of touching."""
        with Path(path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = view.ctypes.data
        began = time.perf_counter()
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), POPULATE_WRITE):
            view[:: mmap.PAGESIZE] = 1
        self._mapped[address] = view
        return {"address": address, "seconds": time.perf_counter() - began}

    def register(self, address: int, size: int, piece: int) -> float:
        """Register in pieces of `piece` bytes; seconds."""
        began = time.perf_counter()
        for at in range(0, size, piece):
            length = min(piece, size - at)
            flags = binding.REGISTER_PORTABLE_MAPPED
            self.cuda.call("cuMemHostRegister_v2", address + at, length, flags)
        return time.perf_counter() - began

    def unregister(self, address: int, size: int, piece: int) -> float:
        began = time.perf_counter()
        for at in range(0, size, piece):
            self.cuda.call("cuMemHostUnregister", address + at)
        return time.perf_counter() - began

    def pin(self, size: int) -> int:
        """Address of pinned memory of this process's own."""
        return self.cuda.pinned(size)

    # -- copies ---------------------------------------------------------------------------------

    def queue(self, is_store: bool, places: list[int], times: int) -> None:
        """Queue copies of a piece again and again, and return while they run.

        places: host address, device address, bytes.
        """
        host, device, size = places
        self._queue = self._queue or self.cuda.stream()
        for _ in range(times):
            self.cuda.copy(is_store, host, device, size, self._queue)

    def wait(self) -> float:
        """Wait for what was queued; seconds."""
        began = time.perf_counter()
        self.cuda.call("cuStreamSynchronize", self._queue)
        return time.perf_counter() - began

    def time_copies(self, case: dict[str, Any]) -> dict[str, Any]:
        return self.copying.time(**case)

    def moves_right(self, case: dict[str, Any]) -> bool:
        return self.copying.moves_right(**case)

    def copy_for(self, cases: list[dict[str, Any]], seconds: float) -> list[float]:
        """Copy all cases at once for that long; each one's bytes a second."""
        return self.copying.run_for(cases, seconds)

    def answer_wakes(self, case: dict[str, Any], fds: list[int]) -> list[float]:
        """Copy whenever told by an eventfd, and tell by another; each copy's own µs."""
        return self.copying.answer_wakes(case, fds)

    # -- an engine's work -----------------------------------------------------------------------

    def begin_products(self, width: int, with_torch: bool) -> str:
        """Multiply matrices of that width without end; with what library."""
        self._products = Products(self.cuda, width, with_torch)
        return self._products.library

    def end_products(self) -> list[list[float]]:
        """Each timed batch as (moment by the system's monotonic clock, milliseconds)."""
        assert self._products is not None, "there are no products"
        samples, self._products = self._products.end(), None
        return samples


def serve(hands: object) -> None:
    """Obey orders, a method and its arguments a line, until the input ends."""
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL)  # whoever gave the orders may be killed
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        order = json.loads(line)
        try:
            told = {"answer": getattr(hands, order["order"])(**order["arguments"])}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            told = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(Hands())
