"""What kvd relies on of a CUDA driver. The fake and a real one pass the same tests; what NVIDIA's
documentation leaves undefined is asked of the fake alone, in test_fake_driver.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from typing import Self

import pytest

from tests.gpu.device_memory import DeviceMemory, DriverError
from tests.gpu.driver import Driver, Exporter, ExporterError

MIB = 1 << 20
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
INVALID_VALUE, INVALID_CONTEXT, NOT_READY = 1, 201, 600


@pytest.fixture
def memory(driver: Driver) -> Iterator[DeviceMemory]:
    """Device memory of the test's own process, which is nobody's exporter."""
    made = DeviceMemory()
    yield made
    made.close()


@pytest.fixture
def exporter(driver: Driver) -> Iterator[Exporter]:
    """An engine's worker of the test's own, on a real GPU too: some tests kill it."""
    made = Exporter(driver)
    yield made
    made.close()


def pattern(nbytes: int, seed: int = 1) -> bytes:
    block = bytes((seed + 7 * at + at // 251) % 256 for at in range(1009))
    return (block * (nbytes // 1009 + 1))[:nbytes]


def new_stream(memory: DeviceMemory) -> c_void_p:
    stream = c_void_p()
    memory.call("cuStreamCreate", byref(stream), 1)
    return stream


@pytest.fixture
def stream(memory: DeviceMemory) -> Iterator[c_void_p]:
    made = new_stream(memory)
    yield made
    memory.call("cuStreamSynchronize", made)
    memory.call("cuStreamDestroy_v2", made)


class Pinned:
    """Host memory of its own pages, registered while in a `with`."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory = memory
        self.mapping = mmap.mmap(-1, nbytes)
        held = ctypes.c_char.from_buffer(self.mapping)
        self.address = ctypes.addressof(held)
        del held

    def __enter__(self) -> Self:
        size = c_size_t(len(self.mapping))
        self._memory.call("cuMemHostRegister_v2", c_void_p(self.address), size, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.call("cuMemHostUnregister", c_void_p(self.address))
        self.mapping.close()


def copy(memory: DeviceMemory, to: int, source: int, nbytes: int, stream: c_void_p) -> None:
    memory.call("cuMemcpyAsync", c_ulonglong(to), c_ulonglong(source), c_size_t(nbytes), stream)


# -- memory handles ---------------------------------------------------------------------------


def test_a_handle_names_the_whole_allocation_and_opens_at_its_base(
    exporter: Exporter, memory: DeviceMemory
) -> None:
    base = exporter.allocate(4 * MIB)
    exporter.write(base + MIB, b"inside")
    handle, offset, size = exporter.ipc_handle(base + MIB)
    assert (offset, size) == (MIB, 4 * MIB)
    assert handle == exporter.ipc_handle(base)[0]
    opened = memory.open_handle(handle)
    try:
        assert memory.read(opened + offset, 6) == b"inside"
    finally:
        memory.close_handle(opened)


def test_both_processes_see_what_the_other_writes(exporter: Exporter, memory: DeviceMemory) -> None:
    base = exporter.allocate(2 * MIB)
    opened = memory.open_handle(exporter.ipc_handle(base)[0])
    try:
        exporter.write(base, pattern(5000))
        assert memory.read(opened, 5000) == pattern(5000)
        memory.write(opened + 100_000, pattern(3000, seed=9))
        assert exporter.read(base + 100_000, 3000) == pattern(3000, seed=9)
    finally:
        memory.close_handle(opened)


def test_opening_a_handle_again_gives_the_same_address_and_needs_a_close_for_each(
    exporter: Exporter, memory: DeviceMemory
) -> None:
    base = exporter.allocate(2 * MIB)
    exporter.write(base, b"twice")
    handle = exporter.ipc_handle(base)[0]
    first, second = memory.open_handle(handle), memory.open_handle(handle)
    assert first == second
    memory.close_handle(first)
    assert memory.read(second, 5) == b"twice"
    memory.close_handle(second)


def test_a_handle_cannot_be_opened_by_who_exported_it(exporter: Exporter) -> None:
    handle = exporter.ipc_handle(exporter.allocate(2 * MIB))[0]
    with pytest.raises(ExporterError) as refused:
        exporter.open_handle(handle)
    assert refused.value.code == INVALID_CONTEXT


def test_an_opened_allocation_tells_its_bounds(
    exporter: Exporter, memory: DeviceMemory, driver: Driver
) -> None:
    handle = exporter.ipc_handle(exporter.allocate(4 * MIB))[0]
    opened = memory.open_handle(handle)
    try:
        try:
            found = memory.address_range(opened + 4096)
        except DriverError:
            if driver.is_fake:
                raise
            pytest.skip("this driver does not know the bounds of what it opened")
        assert found == (opened, 4 * MIB)
    finally:
        memory.close_handle(opened)


def test_a_made_up_handle_is_refused(memory: DeviceMemory) -> None:
    with pytest.raises(DriverError):
        memory.open_handle(os.urandom(64))


def test_memory_of_a_dead_exporter_lives_until_its_importer_closes(
    driver: Driver, exporter: Exporter, memory: DeviceMemory
) -> None:
    base = exporter.allocate(64 * MIB)
    exporter.write(base, b"still here")
    opened = memory.open_handle(exporter.ipc_handle(base)[0])
    exporter.kill()
    assert memory.read(opened, 10) == b"still here"
    held = driver.free_bytes()
    memory.close_handle(opened)
    assert driver.free_bytes() >= held + 64 * MIB


def test_all_memory_of_a_killed_process_comes_back(driver: Driver, memory: DeviceMemory) -> None:
    before = driver.free_bytes()
    killed = Exporter(driver)
    for _ in range(3):
        killed.allocate(32 * MIB)
    assert driver.free_bytes() <= before - 96 * MIB
    killed.kill()
    killed.close()
    assert driver.free_bytes() >= before - driver.kept_bytes


@pytest.mark.parametrize("kind", ["vmm", "vmm_exportable", "managed", "pool"])
def test_memory_not_of_cuda_malloc_has_no_handle(exporter: Exporter, kind: str) -> None:
    address = exporter.allocate(2 * MIB, kind)
    with pytest.raises(ExporterError) as refused:
        exporter.ipc_handle(address)
    assert refused.value.code == INVALID_VALUE


# -- virtual memory management ----------------------------------------------------------------


def test_exportable_physical_memory_is_shared_by_a_descriptor(
    driver: Driver, exporter: Exporter, memory: DeviceMemory
) -> None:
    base = exporter.allocate(4 * MIB, "vmm_exportable")
    exporter.write(base, pattern(1000))
    fd = exporter.export_fd(base)
    address, handle = memory.import_fd(fd, 4 * MIB)
    os.close(fd)  # an import does not need it any longer
    assert memory.read(address, 1000) == pattern(1000)
    memory.write(address + MIB, b"back")
    assert exporter.read(base + MIB, 4) == b"back"
    exporter.kill()
    assert memory.read(address, 1000) == pattern(1000)
    held = driver.free_bytes()
    memory.unmap(address, 4 * MIB, handle)
    assert driver.free_bytes() >= held + 4 * MIB


def test_physical_memory_that_was_not_made_for_it_is_not_exported(exporter: Exporter) -> None:
    with pytest.raises(ExporterError) as refused:
        exporter.export_fd(exporter.allocate(2 * MIB, "vmm"))
    assert refused.value.code != 0


# -- host memory ------------------------------------------------------------------------------


def test_registering_twice_and_unregistering_twice_are_refused(memory: DeviceMemory) -> None:
    with Pinned(memory, MIB) as host:
        with pytest.raises(DriverError) as again:
            memory.call("cuMemHostRegister_v2", c_void_p(host.address), c_size_t(MIB), 0)
        assert again.value.code == ALREADY_REGISTERED
        memory.call("cuMemHostUnregister", c_void_p(host.address))
        with pytest.raises(DriverError) as unknown:
            memory.call("cuMemHostUnregister", c_void_p(host.address))
        assert unknown.value.code == NOT_REGISTERED
        memory.call("cuMemHostRegister_v2", c_void_p(host.address), c_size_t(MIB), 0)


def test_a_shared_file_can_be_registered_and_copied(
    memory: DeviceMemory, stream: c_void_p, tmp_path: object
) -> None:
    fd = os.memfd_create("kvd-contract")
    os.truncate(fd, MIB)
    shared = mmap.mmap(fd, MIB)
    os.close(fd)
    held = ctypes.c_char.from_buffer(shared)
    address = ctypes.addressof(held)
    del held
    memory.call("cuMemHostRegister_v2", c_void_p(address), c_size_t(MIB), 0)
    device = memory.allocate(2 * MIB)
    memory.write(device, pattern(MIB))
    copy(memory, address, device, MIB, stream)
    memory.call("cuStreamSynchronize", stream)
    assert shared[:] == pattern(MIB)
    memory.call("cuMemHostUnregister", c_void_p(address))
    shared.close()
    memory.free(device)


# -- streams, events and copies ---------------------------------------------------------------


def test_copies_of_a_stream_happen_in_order(memory: DeviceMemory, stream: c_void_p) -> None:
    device = memory.allocate(2 * MIB)
    with Pinned(memory, 3 * MIB) as host:
        host.mapping[: 2 * MIB] = pattern(MIB, 1) + pattern(MIB, 2)
        copy(memory, device, host.address, MIB, stream)
        copy(memory, device + MIB, device, MIB, stream)
        copy(memory, device, host.address + MIB, MIB, stream)
        copy(memory, host.address + 2 * MIB, device + MIB, MIB, stream)
        memory.call("cuStreamSynchronize", stream)
        assert host.mapping[2 * MIB :] == pattern(MIB, 1)
        assert memory.read(device, MIB) == pattern(MIB, 2)
    memory.free(device)


def test_an_event_has_happened_when_all_before_it_has(
    memory: DeviceMemory, stream: c_void_p
) -> None:
    device = memory.allocate(2 * MIB)
    event = c_void_p()
    memory.call("cuEventCreate", byref(event), 1 | 2)
    with Pinned(memory, MIB) as host:
        memory.write(device, pattern(MIB))
        copy(memory, host.address, device, MIB, stream)
        memory.call("cuEventRecord", event, stream)
        memory.call("cuEventSynchronize", event)
        assert host.mapping[:] == pattern(MIB)
        memory.call("cuEventQuery", event)
        memory.call("cuEventDestroy_v2", event)
    memory.free(device)


def test_a_stream_waits_for_anothers_event(memory: DeviceMemory, stream: c_void_p) -> None:
    device, other, event = memory.allocate(2 * MIB), new_stream(memory), c_void_p()
    memory.call("cuEventCreate", byref(event), 2)
    with Pinned(memory, 2 * MIB) as host:
        host.mapping[:MIB] = pattern(MIB)
        copy(memory, device, host.address, MIB, stream)
        memory.call("cuEventRecord", event, stream)
        memory.call("cuStreamWaitEvent", other, event, 0)
        copy(memory, host.address + MIB, device, MIB, other)
        memory.call("cuStreamSynchronize", other)
        assert host.mapping[MIB:] == pattern(MIB)
    memory.call("cuEventDestroy_v2", event)
    memory.call("cuStreamDestroy_v2", other)
    memory.free(device)


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes with no hints."""

    _fields_ = (("order", c_int), ("hints", c_int * 4), ("flags", ctypes.c_uint))


def batch(
    memory: DeviceMemory, copies: list[tuple[int, int, int]], stream: c_void_p | None
) -> None:
    """Copy a batch of (to, from, bytes), by the signature that this driver has."""
    version = c_int()
    memory.call("cuDriverGetVersion", byref(version))
    if version.value < 12080:
        pytest.skip("this driver has no batch copies")
    wanted = 13000 if version.value >= 13000 else 12080
    address, found = c_void_p(), c_int()
    memory.call(
        "cuGetProcAddress_v2",
        *(b"cuMemcpyBatchAsync", byref(address), wanted, c_ulonglong(0), byref(found)),
    )
    assert address.value is not None
    number = len(copies)
    columns = [(c_ulonglong * number)(*column) for column in zip(*copies, strict=True)]
    attributes, first, failed = Attributes(order=1, flags=1), c_size_t(0), c_size_t()
    arguments = [*columns, c_size_t(number), byref(attributes), byref(first), c_size_t(1)]
    if wanted == 12080:
        arguments.append(byref(failed))
    code = ctypes.CFUNCTYPE(c_int)(address.value)
    result = code(*arguments, stream)
    if result != 0:
        raise DriverError("cuMemcpyBatchAsync", result)


def test_a_batch_copies_each_of_its_stretches(memory: DeviceMemory, stream: c_void_p) -> None:
    device = memory.allocate(2 * MIB)
    with Pinned(memory, MIB) as host:
        host.mapping[:] = pattern(MIB)
        memory.write(device, bytes(MIB))
        rows = [(device + 1000 * i, host.address + 3000 * (99 - i), 500 + i) for i in range(100)]
        batch(memory, rows, stream)
        memory.call("cuStreamSynchronize", stream)
        expected = bytearray(MIB)
        for i in range(100):
            start = 3000 * (99 - i)
            expected[1000 * i : 1000 * i + 500 + i] = host.mapping[start : start + 500 + i]
        assert memory.read(device, MIB) == bytes(expected)
    memory.free(device)


def test_a_batch_on_the_null_stream_is_refused(memory: DeviceMemory) -> None:
    device = memory.allocate(2 * MIB)
    with pytest.raises(DriverError) as refused:
        batch(memory, [(device, device + MIB, 100)], None)
    assert refused.value.code == INVALID_VALUE
    memory.free(device)


# -- devices ----------------------------------------------------------------------------------


def test_a_process_sees_the_device_of_the_uuid_that_it_was_given(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = driver.uuids[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    chosen = Exporter(driver)
    assert chosen.uuid == uuid
    chosen.close()


def test_a_process_that_was_given_an_unknown_uuid_has_no_device(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")
    with pytest.raises(ExporterError, match="CUresult 100"):
        Exporter(driver)
