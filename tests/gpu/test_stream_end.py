"""Waiting on one thread for what another one launched on a stream."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import pytest

from kvd_client.worker.cuda_stream import stream_end
from kvd_proto.libcuda import CudaError, libcuda
from tests.gpu.device_memory import DeviceMemory
from tests.gpu.driver import Driver
from tests.waiting import wait_until

NBYTES = 64 << 10
SLOW_BYTES_PER_SECOND = NBYTES  # a second for each copy
ILLEGAL_ADDRESS = 700


class Stream:
    """A stream, with pinned memory to copy from and device memory to copy to."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        stream, pinned = ctypes.c_void_p(), ctypes.c_void_p()
        memory.call("cuStreamCreate", ctypes.byref(stream), 1)
        memory.call("cuMemAllocHost_v2", ctypes.byref(pinned), ctypes.c_size_t(NBYTES))
        self._pinned = pinned
        self.cuda_stream = stream.value or 0  # as torch names it
        self._address = memory.allocate(NBYTES)

    def launch(self, content: bytes) -> None:
        """Copy to the device, some time."""
        ctypes.memmove(self._pinned, content, NBYTES)
        to, size = ctypes.c_ulonglong(self._address), ctypes.c_size_t(NBYTES)
        stream = ctypes.c_void_p(self.cuda_stream)
        self._memory.call("cuMemcpyHtoDAsync_v2", to, self._pinned, size, stream)

    def content(self) -> bytes:
        return self._memory.read(self._address, NBYTES)

    def close(self) -> None:
        self._memory.call("cuStreamDestroy_v2", ctypes.c_void_p(self.cuda_stream))
        self._memory.call("cuMemFreeHost", self._pinned)


@pytest.fixture
def stream(driver: Driver) -> Iterator[Stream]:
    memory = DeviceMemory()
    made = Stream(memory)
    yield made
    driver.reset()  # what a test injected would hold the end up
    made.close()
    memory.close()
    libcuda().call("cuCtxSetCurrent", None)


def test_a_call_returns_once_what_was_launched_before_it_has_run(stream: Stream) -> None:
    stream.launch(b"a" * NBYTES)
    stream_end(stream)()
    assert stream.content() == b"a" * NBYTES
    stream.launch(b"b" * NBYTES)
    stream_end(stream.cuda_stream)()
    assert stream.content() == b"b" * NBYTES


def test_another_thread_without_a_context_waits_and_the_engines_thread_runs_on(
    stream: Stream, driver: Driver
) -> None:
    if driver.is_fake:
        driver.inject("bandwidth", bytes_per_second=SLOW_BYTES_PER_SECOND)
    stream.launch(b"c" * NBYTES)
    wait, waited, contexts = stream_end(stream), threading.Event(), []

    def aside() -> None:
        wait()
        contexts.append(libcuda().current_context())
        waited.set()

    thread = threading.Thread(target=aside)
    thread.start()
    turns = 0  # next to none where the wait holds the interpreter's lock
    while not waited.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10 or not driver.is_fake
    assert stream.content() == b"c" * NBYTES
    assert contexts == [0]


def test_it_may_be_called_again(stream: Stream) -> None:
    stream.launch(b"d" * NBYTES)
    wait = stream_end(stream)
    wait()
    stream.launch(b"e" * NBYTES)
    wait()  # for nothing new
    stream_end(stream)()
    assert stream.content() == b"e" * NBYTES


def test_compute_that_failed_fails_every_wait_for_it(stream: Stream, driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("a GPU does not fail when it is told to")
    driver.inject("copy_error", code=ILLEGAL_ADDRESS, after=0)
    driver.inject("latency", microseconds=1_000_000)  # it has not failed when the wait is made
    stream.launch(b"f" * NBYTES)
    wait = stream_end(stream)
    for _ in range(2):
        with pytest.raises(CudaError) as failed:
            wait()
        assert failed.value.code == ILLEGAL_ADDRESS


def test_one_that_nobody_called_goes_quietly(stream: Stream) -> None:
    stream.launch(b"g" * NBYTES)
    del_only = stream_end(stream)
    del del_only
    stream_end(stream)()
    assert stream.content() == b"g" * NBYTES


def test_a_thread_without_a_context_can_not_make_one(stream: Stream) -> None:
    with pytest.raises(CudaError), libcuda().bound(0):
        stream_end(stream)


def test_many_waits_at_once_each_end(stream: Stream) -> None:
    waits = []
    for number in range(8):
        stream.launch(bytes([number]) * NBYTES)
        waits.append(stream_end(stream))
    threads = [threading.Thread(target=wait) for wait in waits]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "every wait's end")
    assert stream.content() == bytes([7]) * NBYTES


def test_a_wait_ends_while_the_engine_captures_a_graph(stream: Stream, driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("captures are the fake driver's here")
    stream.launch(b"h" * NBYTES)
    wait = stream_end(stream)
    driver.inject("capture", pid=os.getpid())
    wait()
    driver.inject("capture", pid=0)
    assert stream.content() == b"h" * NBYTES
