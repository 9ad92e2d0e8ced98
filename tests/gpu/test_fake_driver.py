"""What the fake driver makes of mistakes, and of injected faults. On a real GPU these mistakes are
undefined, or would break the process that makes them: only the fake is asked.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from pathlib import Path

import pytest

from tests.gpu import fake_library
from tests.gpu.device_memory import DeviceMemory, DriverError
from tests.gpu.driver import ROOT, Driver, Exporter, ExporterError
from tests.gpu.test_driver_contract import MIB, Pinned, batch, copy, new_stream, pattern

ILLEGAL_ADDRESS = 700
NOT_READY = 600
CUDA_HEADERS = [path.parent for path in sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))]


@pytest.fixture(autouse=True)
def _fake_only(driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("asks the fake driver alone")


@pytest.fixture
def memory(driver: Driver) -> Iterator[DeviceMemory]:
    made = DeviceMemory()
    yield made
    driver.reset()  # a sticky error would keep it from closing
    made.close()


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with `memory` in it."""
    head = """
        import ctypes, mmap, os, sys
        from ctypes import byref, c_ulonglong, c_size_t, c_void_p
        from tests.gpu.device_memory import DeviceMemory, DriverError
        memory = DeviceMemory()
    """
    program = textwrap.dedent(head) + textwrap.dedent(source)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )


# -- mistakes ---------------------------------------------------------------------------------


def test_a_program_that_follows_a_device_pointer_dies() -> None:
    ended = run_python("ctypes.string_at(memory.allocate(4096), 1)")
    assert ended.returncode == -signal.SIGSEGV


def test_the_use_of_freed_memory_is_an_error_that_stays(driver: Driver) -> None:
    ended = run_python("""
        kept, freed = memory.allocate(4096), memory.allocate(4096)
        memory.free(freed)
        for use in (lambda: memory.read(freed, 1), lambda: memory.read(kept, 1),
                    lambda: memory.allocate(4096), memory.free_bytes):
            try:
                use()
                print("worked")
            except DriverError as error:
                print(error.code)
    """)
    assert ended.stdout.split() == ["700"] * 4
    assert driver.counters()["use_after_free"] == 1


def test_the_use_of_closed_memory_is_an_error_that_stays(
    driver: Driver, exporter: Exporter, memory: DeviceMemory
) -> None:
    opened = memory.open_handle(exporter.ipc_handle(exporter.allocate(MIB))[0])
    memory.close_handle(opened)
    for _ in range(2):
        with pytest.raises(DriverError) as lost:
            memory.read(opened, 1)
        assert lost.value.code == ILLEGAL_ADDRESS
    assert driver.counters()["violations"] == 1


def test_a_copy_past_an_allocations_end_is_refused_before_it_begins(
    driver: Driver, memory: DeviceMemory
) -> None:
    address = memory.allocate(4096)
    with pytest.raises(DriverError) as refused:
        memory.read(address + 4000, 97)
    assert refused.value.code == 1
    assert driver.counters()["out_of_bounds"] == 1
    assert memory.read(address + 4000, 96) == bytes(96)
    memory.free(address)


def test_host_memory_unmapped_under_a_queued_copy_is_an_error_and_no_crash(driver: Driver) -> None:
    driver.inject("latency", microseconds=200_000)
    ended = run_python("""
        from tests.gpu.test_driver_contract import Pinned, copy, new_stream
        device, stream = memory.allocate(1 << 20), new_stream(memory)
        host = Pinned(memory, 1 << 20)
        host.__enter__()
        copy(memory, host.address, device, 1 << 20, stream)
        host.mapping.close()
        try:
            memory.call("cuStreamSynchronize", stream)
        except DriverError as error:
            print(error.code)
    """)
    assert (ended.returncode, ended.stdout.split()) == (0, ["700"]), ended.stderr
    assert driver.counters()["host_memory_gone"] == 1


def test_memory_unregistered_under_a_queued_copy_is_an_error(
    driver: Driver, memory: DeviceMemory
) -> None:
    driver.inject("latency", microseconds=100_000)
    device, stream = memory.allocate(MIB), new_stream(memory)
    host = Pinned(memory, MIB)
    host.__enter__()
    copy(memory, host.address, device, MIB, stream)
    memory.call("cuMemHostUnregister", c_void_p(host.address))
    with pytest.raises(DriverError) as lost:
        memory.call("cuStreamSynchronize", stream)
    host.mapping.close()
    assert lost.value.code == ILLEGAL_ADDRESS
    assert driver.counters()["unregistered_while_queued"] == 1


def test_a_copy_over_two_registrations_is_refused(driver: Driver, memory: DeviceMemory) -> None:
    device, stream, host = memory.allocate(MIB), new_stream(memory), Pinned(memory, MIB)
    half = MIB // 2
    for part in (host.address, host.address + half):
        memory.call("cuMemHostRegister_v2", c_void_p(part), c_size_t(half), 0)
    with pytest.raises(DriverError) as refused:
        copy(memory, device, host.address + half - 8, 16, stream)
    assert refused.value.code == 1
    assert driver.counters()["across_registrations"] == 1
    for part in (host.address, host.address + half):
        memory.call("cuMemHostUnregister", c_void_p(part))
    host.mapping.close()
    memory.call("cuStreamDestroy_v2", stream)
    memory.free(device)


def test_memory_unmapped_before_it_is_unregistered_is_counted(
    driver: Driver, memory: DeviceMemory
) -> None:
    before = driver.counters()["registered_bytes"]
    with Pinned(memory, MIB) as host:
        host.mapping.close()
    assert driver.counters()["unmapped_while_registered"] == 1
    assert driver.counters()["registered_bytes"] == before


def test_memory_freed_while_another_process_has_it_open_is_counted(
    driver: Driver, exporter: Exporter, memory: DeviceMemory
) -> None:
    base = exporter.allocate(MIB)
    opened = memory.open_handle(exporter.ipc_handle(base)[0])
    exporter.free(base)
    memory.close_handle(opened)
    assert driver.counters()["freed_while_open"] == 1


@pytest.mark.parametrize("how", ["freed", "dead"])
def test_a_handle_of_memory_that_is_gone_is_not_opened(
    exporter: Exporter, memory: DeviceMemory, how: str
) -> None:
    base = exporter.allocate(MIB)
    handle = exporter.ipc_handle(base)[0]
    if how == "freed":
        exporter.free(base)
    else:
        exporter.kill()
    with pytest.raises(DriverError):
        memory.open_handle(handle)


def test_physical_memory_without_access_is_not_copied(memory: DeviceMemory) -> None:
    address = memory.allocate(2 * MIB, "vmm")
    no_access = (c_int * 3)(1, 0, 0)
    memory.call("cuMemSetAccess", c_ulonglong(address), c_size_t(2 * MIB), no_access, c_size_t(1))
    with pytest.raises(DriverError) as lost:
        memory.read(address, 1)
    assert lost.value.code == ILLEGAL_ADDRESS


# -- what is counted, and how copies happen -----------------------------------------------------


def test_pageable_memory_is_copied_at_once_and_counted(
    driver: Driver, memory: DeviceMemory
) -> None:
    device, stream = memory.allocate(MIB), new_stream(memory)
    memory.write(device, pattern(MIB))
    before = driver.counters()["pageable_copies"]
    host = ctypes.create_string_buffer(MIB)
    copy(memory, ctypes.addressof(host), device, MIB, stream)
    assert host.raw == pattern(MIB)  # nobody waited for the stream
    assert driver.counters()["pageable_copies"] == before + 1
    memory.call("cuStreamDestroy_v2", stream)
    memory.free(device)


def test_what_a_waiting_call_writes_to_the_device_may_land_after_it(
    driver: Driver, memory: DeviceMemory
) -> None:
    device, host = memory.allocate(MIB), ctypes.create_string_buffer(pattern(MIB), MIB)
    source = c_ulonglong(ctypes.addressof(host))
    writes = {
        "cuMemcpy": (c_ulonglong(device), source, c_size_t(MIB)),
        "cuMemsetD8_v2": (c_ulonglong(device), 7, c_size_t(MIB)),
    }
    driver.inject("latency", microseconds=50_000)
    for name, arguments in writes.items():
        memory.call(name, *arguments)
        ctypes.memset(host, 0, MIB)  # the source is the caller's again
        with pytest.raises(DriverError) as under_way:
            memory.call("cuStreamQuery", None)
        assert under_way.value.code == NOT_READY
        memory.call("cuStreamSynchronize", None)
        expected = pattern(MIB) if name == "cuMemcpy" else bytes([7]) * MIB
        assert memory.read(device, MIB) == expected
    memory.free(device)


def test_a_copy_of_pinned_memory_happens_after_the_call(
    driver: Driver, memory: DeviceMemory
) -> None:
    device, stream = memory.allocate(MIB), new_stream(memory)
    memory.write(device, pattern(MIB))
    driver.inject("latency", microseconds=50_000)
    with Pinned(memory, MIB) as host:
        copy(memory, host.address, device, MIB, stream)
        assert host.mapping[:] == bytes(MIB)
        memory.call("cuStreamSynchronize", stream)
        assert host.mapping[:] == pattern(MIB)
    assert driver.counters()["copies_async"] == 1
    memory.call("cuStreamDestroy_v2", stream)
    memory.free(device)


def test_a_batch_goes_from_its_last_copy_to_its_first(memory: DeviceMemory) -> None:
    device, stream = memory.allocate(MIB), new_stream(memory)
    memory.write(device, b"first" + b"later")
    with Pinned(memory, mmap.PAGESIZE) as host:
        batch(memory, [(host.address, device, 5), (host.address, device + 5, 5)], stream)
        memory.call("cuStreamSynchronize", stream)
        assert host.mapping[:5] == b"first"
    memory.call("cuStreamDestroy_v2", stream)
    memory.free(device)


def test_a_batch_of_memory_that_the_device_reaches_by_another_address_is_an_error_that_stays(
    driver: Driver, memory: DeviceMemory
) -> None:
    device, stream = memory.allocate(MIB), new_stream(memory)
    driver.inject("host_pointer", usable=0)
    with Pinned(memory, mmap.PAGESIZE) as host:
        batch(memory, [(device, host.address, 8)], stream)
        with pytest.raises(DriverError) as lost:
            memory.call("cuStreamSynchronize", stream)
        assert lost.value.code == ILLEGAL_ADDRESS
        assert driver.counters()["bad_batches"] == 1
        driver.reset()


def test_an_older_driver_has_the_older_batch_or_none(driver: Driver, memory: DeviceMemory) -> None:
    def entry(version: int) -> int | None:
        address, found = c_void_p(), c_int()
        arguments = (b"cuMemcpyBatchAsync", byref(address), version, c_ulonglong(0), byref(found))
        code = memory.library.cuGetProcAddress_v2(*arguments)
        assert code == (0 if address.value else 500)
        return address.value

    new, old = entry(13000), entry(12080)
    assert new is not None
    assert old is not None
    assert new != old
    driver.inject("driver_version", version=12080)
    assert entry(13000) == entry(12080) == old  # with its failIdx, whatever was asked for
    driver.inject("driver_version", version=12040)
    assert entry(13000) is None


# -- injected faults --------------------------------------------------------------------------


def test_an_injected_copy_error_comes_after_so_many_copies_and_stays(
    driver: Driver, exporter: Exporter
) -> None:
    base = exporter.allocate(MIB)
    driver.inject("copy_error", code=ILLEGAL_ADDRESS, after=2)
    exporter.write(base, b"one")
    assert exporter.read(base, 3) == b"one"
    for _ in range(2):
        with pytest.raises(ExporterError) as lost:
            exporter.read(base, 3)
        assert lost.value.code == ILLEGAL_ADDRESS


def test_registering_fails_past_an_injected_bound(driver: Driver, memory: DeviceMemory) -> None:
    before = driver.counters()["registered_bytes"]
    driver.inject("register_fails_after", bytes=before + MIB)
    with Pinned(memory, MIB):
        more = Pinned(memory, mmap.PAGESIZE)
        with pytest.raises(DriverError) as refused:
            more.__enter__()
        assert refused.value.code == 2
        more.mapping.close()
    with Pinned(memory, MIB):
        assert driver.counters()["registered_bytes"] == before + MIB


def test_contexts_take_memory_and_exclusive_mode_allows_one(
    driver: Driver, exporter: Exporter
) -> None:
    driver.inject("context_bytes", bytes=100 * MIB)
    before = driver.free_bytes()
    second = Exporter(driver)
    assert driver.free_bytes() == before - 100 * MIB
    second.close()
    assert driver.free_bytes() == before
    driver.inject("compute_mode", mode=3)
    with pytest.raises(ExporterError) as busy:
        Exporter(driver)
    assert busy.value.code == 46


def test_device_memory_ends(driver: Driver, exporter: Exporter) -> None:
    taken = driver.setting("device_bytes.bytes") - driver.free_bytes()
    driver.inject("device_bytes", bytes=taken + 64 * MIB)
    assert driver.free_bytes() == 64 * MIB
    with pytest.raises(ExporterError) as full:
        exporter.allocate(64 * MIB + 1)
    assert full.value.code == 2
    exporter.allocate(64 * MIB)
    assert driver.free_bytes() == 0


def test_each_of_several_devices_has_memory_of_its_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.inject("devices", count=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", driver.uuids[1])
    other = Exporter(driver)
    assert other.uuid == driver.uuids[1]
    first, second = driver.free_bytes(0), driver.free_bytes(1)
    other.allocate(MIB)
    assert (driver.free_bytes(0), driver.free_bytes(1)) == (first, second - MIB)
    other.close()


def test_a_setting_that_is_none_is_an_error_of_the_test(driver: Driver) -> None:
    with pytest.raises(ValueError, match=r"no setting bandwidth\.furlongs"):
        driver.inject("bandwidth", furlongs=1)


# -- the fake's own declarations ----------------------------------------------------------------


@pytest.mark.skipif(not CUDA_HEADERS, reason="no CUDA toolkit: nothing to compare with")
@pytest.mark.parametrize("headers", CUDA_HEADERS[:1], ids=str)
def test_the_fakes_functions_have_the_signatures_of_nvidias_header(headers: Path) -> None:
    sources = sorted(map(str, fake_library.SOURCES.glob("*.c")))
    checked = subprocess.run(
        [
            *(fake_library.compiler(), *fake_library.FLAGS, "-O0", "-fsyntax-only"),
            *("-DKVD_WITH_CUDA_H", "-isystem", str(headers), *sources),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(not CUDA_HEADERS, reason="no CUDA toolkit: nothing to compare with")
def test_that_comparison_sees_a_wrong_signature(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.c"
    wrong.write_text('#include "api.h"\nCUresult cuMemFree_v2(int address) { return address; }\n')
    checked = subprocess.run(
        [
            *(fake_library.compiler(), "-fsyntax-only", "-DKVD_WITH_CUDA_H"),
            *("-isystem", str(CUDA_HEADERS[0]), "-I", str(fake_library.SOURCES), str(wrong)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "conflicting types for 'cuMemFree_v2'" in checked.stderr.replace("‘", "'").replace(
        "’", "'"
    )
