"""The ways to copy that are compared: each moves the same fragments, in one process.

The layout is an engine's: blocks of 2 MiB, each of as many fragments as fit, with the fragments
of one kind side by side on the device (as the layers of a KV cache lie) and a block's fragments
side by side on the host. Blocks are shuffled, so nothing can be merged.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.cuda import EVENT_BLOCKING, NOT_READY, Cuda, Failed, rows_of

U64 = npt.NDArray[np.uint64]

BLOCK_BYTES = 2 << 20
WAYS = ("large", "plain", "batch", "strided", "kernel")
THREADS = 512
MOST_CHECKED = 4 * BLOCK_BYTES
SOURCE = """
extern "C" __global__ void move(const unsigned long long* from, const unsigned long long* to,
                                long long fragments, int words) {
  for (long long f = blockIdx.x; f < fragments; f += gridDim.x) {
    const uint4* source = (const uint4*)from[f];
    uint4* target = (uint4*)to[f];
    for (int w = threadIdx.x; w < words; w += blockDim.x) target[w] = source[w];
  }
}
"""


class Fragments:
    """Where `total` bytes in fragments lie on both sides."""

    def __init__(self, host: int, device: int, fragment: int, total: int) -> None:
        self.fragment, self.total = fragment, total
        self.block = max(fragment, min(BLOCK_BYTES, total))
        self.blocks, self.height = total // self.block, self.block // fragment
        order = np.random.default_rng(1).permutation(self.blocks).astype(np.uint64)
        kinds = np.arange(self.height, dtype=np.uint64)
        self.host_blocks = (host + np.arange(self.blocks, dtype=np.uint64) * self.block).tolist()
        self.device_blocks = (device + order * fragment).tolist()
        self.device_pitch = self.blocks * fragment
        places = device + order[:, None] * fragment + kinds[None, :] * self.device_pitch
        self.device: U64 = np.ascontiguousarray(places.reshape(-1), dtype=np.uint64)
        self.host: U64 = host + np.arange(len(self.device), dtype=np.uint64) * fragment
        self.sizes: U64 = np.full(len(self.device), fragment, dtype=np.uint64)


class Copying:
    """Copies in this process, whose device is open."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._compiled: Any = None
        self._streams: list[int] = []

    def stream(self, number: int = 0) -> int:
        """One of this object's streams; those of different numbers run side by side."""
        while len(self._streams) <= number:
            self._streams.append(self._cuda.stream())
        return self._streams[number]

    def kernel(self) -> Any:
        """The kernel that moves fragments, compiled by CuPy at the first call."""
        if self._compiled is None:
            try:
                import cupy  # noqa: PLC0415 - only this way needs it
            except ImportError as error:
                raise Failed(f"no CuPy to compile a kernel with: {error}") from error
            self._compiled = cupy.RawKernel(SOURCE, "move")
            self._compiled.compile()
        return self._compiled

    def submitter(self, case: dict[str, Any], stream: int) -> Callable[[], None]:
        """What queues all copies of a case on a stream, and returns while they run.

        case: way, is_store, host, device (addresses), fragment, total (bytes), and by way: most
        (copies in one call of batch), blocks (of the kernel).
        """
        told = (case["host"], case["device"], case["fragment"], case["total"])
        fragments, is_store = Fragments(*told), case["is_store"]
        way = case["way"]
        if way == "large":
            host, device, total = case["host"], case["device"], case["total"]
            return lambda: self._cuda.copy(is_store, host, device, total, stream)
        if way == "plain":
            return self._plain(fragments, is_store, stream)
        if way == "batch":
            return self._batch(fragments, is_store, stream, case.get("most", 4096))
        if way == "strided":
            return self._strided(fragments, is_store, stream)
        assert way == "kernel", way
        return self._kernel(fragments, is_store, stream, case.get("blocks", 8))

    def _plain(self, at: Fragments, is_store: bool, stream: int) -> Callable[[], None]:
        store = self._cuda.function("cuMemcpyDtoHAsync_v2")
        load = self._cuda.function("cuMemcpyHtoDAsync_v2")
        copy, target, source = (
            (store, at.host, at.device) if is_store else (load, at.device, at.host)
        )
        pairs = list(zip(target.tolist(), source.tolist(), strict=True))

        def submit() -> None:
            # The bare call: Python's share of a copy's cost is kept as small as it can be.
            if any(copy(to, come_from, at.fragment, stream) for to, come_from in pairs):
                raise Failed("one of the single copies failed")

        return submit

    def _batch(self, at: Fragments, is_store: bool, stream: int, most: int) -> Callable[[], None]:
        def submit() -> None:
            for first in range(0, len(at.sizes), most):
                cut = slice(first, first + most)
                arrays = (at.host[cut], at.device[cut], at.sizes[cut])
                self._cuda.copy_batch(is_store, *arrays, stream)

        return submit

    def _strided(self, at: Fragments, is_store: bool, stream: int) -> Callable[[], None]:
        rows = [
            rows_of(
                is_store,
                (host, at.fragment),
                (device, max(at.fragment, at.device_pitch)),
                (at.fragment, at.height),
            )
            for host, device in zip(at.host_blocks, at.device_blocks, strict=True)
        ]

        def submit() -> None:
            for row in rows:
                self._cuda.copy_strided(is_store, row, stream)

        return submit

    def _kernel(
        self, at: Fragments, is_store: bool, stream: int, blocks: int
    ) -> Callable[[], None]:
        import cupy  # noqa: PLC0415 - only this way needs it

        kernel, size = self.kernel(), at.sizes.nbytes
        table, staged = self._cuda.allocate(2 * size), self._cuda.pinned(2 * size)
        source, target = (at.device, at.host) if is_store else (at.host, at.device)
        told = np.concatenate([source, target])
        threads = min(THREADS, max(32, at.fragment // 16))
        on = cupy.cuda.ExternalStream(stream)

        def submit() -> None:
            # The table of addresses is part of the cost: the mover has to send it too.
            np.copyto(_view(staged, len(told)), told)
            self._cuda.copy(False, staged, table, 2 * size, stream)
            with on:
                words = np.int32(at.fragment // 16)
                count = np.int64(len(at.sizes))
                addresses = (np.uint64(table), np.uint64(table + size))
                kernel((blocks,), (threads,), (*addresses, count, words))

        return submit

    def moves_right(self, **case: Any) -> bool:
        """Whether that way moves every byte to its place, tried on a few blocks."""
        case = case | {"total": min(case["total"], MOST_CHECKED)}
        at = Fragments(case["host"], case["device"], case["fragment"], case["total"])
        words = case["total"] // 8
        told = np.random.default_rng(2).integers(0, 1 << 63, words, dtype=np.uint64)
        host, size = _view(case["host"], words), case["total"]
        places = (at.device - np.uint64(case["device"])) // np.uint64(8)
        source = places[:, None] + np.arange(case["fragment"] // 8, dtype=np.uint64)
        order = source.reshape(-1) if case["way"] != "large" else np.arange(words, dtype=np.uint64)
        stream = self.stream()
        if case["is_store"]:
            host[:] = 0
            self._cuda.write(case["device"], told.ctypes.data, size)
            expected, found = told[order], host
        else:
            host[:] = told[order]
            self._cuda.fill(case["device"], 0, size)
            expected, found = told, np.empty_like(told)
        self.submitter(case, stream)()
        self._cuda.call("cuStreamSynchronize", stream)
        if not case["is_store"]:
            self._cuda.call("cuMemcpyDtoH_v2", found.ctypes.data, case["device"], size)
        return bool(np.array_equal(expected, found))

    # -- measuring ----------------------------------------------------------------------------

    def time(self, repeats: int, **case: Any) -> dict[str, list[float]]:
        """Copy `repeats` times after one to warm up: seconds from submit to the end, those of the
        submitting alone, and what the device's own clock says of the copies."""
        stream = self.stream()
        submit = self.submitter(case, stream)
        first, last = self._cuda.event(), self._cuda.event()
        wall, submitting, copying = [], [], []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            self._cuda.call("cuEventRecord", first, stream)
            submit()
            self._cuda.call("cuEventRecord", last, stream)
            submitting.append(time.perf_counter() - began)
            self._cuda.call("cuEventSynchronize", last)
            wall.append(time.perf_counter() - began)
            copying.append(self._cuda.milliseconds(first, last) / 1e3)
        return {"wall_s": wall[1:], "submit_s": submitting[1:], "copy_s": copying[1:]}

    def run_for(self, cases: list[dict[str, Any]], seconds: float) -> list[float]:
        """Copy every case over and over for that long, all at once, each on a stream and thread
        of its own; each one's bytes a second."""
        speeds = [0.0] * len(cases)
        failures: list[Exception] = []
        start = threading.Barrier(len(cases))
        streams = [self.stream(number) for number in range(len(cases))]

        def run(number: int, case: dict[str, Any]) -> None:
            try:
                self._cuda.use_in_this_thread()
                stream = streams[number]
                submit = self.submitter(case, stream)
                start.wait(10)
                began, passes = time.perf_counter(), 0
                while time.perf_counter() - began < seconds:
                    submit()
                    self._cuda.call("cuStreamSynchronize", stream)
                    passes += 1
                speeds[number] = passes * case["total"] / (time.perf_counter() - began)
            except (Failed, threading.BrokenBarrierError) as error:
                start.abort()
                failures.append(error)

        threads = [threading.Thread(target=run, args=told) for told in enumerate(cases)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return speeds

    def answer_wakes(self, case: dict[str, Any], fds: list[int]) -> list[float]:
        """`count` times: wait for the first eventfd, copy `bytes` by one call, wait for the copy
        as `waiting` says (spin, blocking, poll), add to the second. Each copy's own µs."""
        go, done = fds
        stream = self.stream()
        first = self._cuda.event()
        last = self._cuda.event(EVENT_BLOCKING if case["waiting"] == "blocking" else 0)
        micros = []
        for _ in range(case["count"]):
            os.eventfd_read(go)
            self._cuda.call("cuEventRecord", first, stream)
            if case["bytes"]:
                places = (case["host"], case["device"], case["bytes"])
                self._cuda.copy(case["is_store"], *places, stream)
            self._cuda.call("cuEventRecord", last, stream)
            if case["waiting"] == "poll":
                while self._cuda.code("cuEventQuery", last) == NOT_READY:
                    time.sleep(20e-6)
            else:
                self._cuda.call("cuEventSynchronize", last)
            os.eventfd_write(done, 1)
            micros.append(self._cuda.milliseconds(first, last) * 1e3)
        return micros


def _view(address: int, words: int) -> U64:
    return np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(address))
