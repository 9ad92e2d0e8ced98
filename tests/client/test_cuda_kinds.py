"""What is made of a driver's answers about memory and GPUs, among them those of older drivers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvd_client import CudaMemoryRefused, DeviceSpan
from kvd_client.worker import cuda_memory
from kvd_client.worker.cuda_memory import HandleKind, allocation_of, check_gpu, device_of, kind_of
from kvd_client.worker.cuda_refusals import CudaRefusal
from kvd_client.worker.spans import Allocation
from kvd_proto.libcuda import (
    ERROR_INVALID_VALUE,
    AllocationProperties,
    CudaError,
    DeviceAttribute,
    Libcuda,
    MemoryType,
    PointerAttribute,
)

BASE = 0x7F00_0000_0000
SPAN = DeviceSpan(BASE + 64, 4096)
MAPPED_BYTES = 2 << 20
CUDA_ERROR_LAUNCH_FAILED = 719


@dataclass
class ScriptedDriver:
    """Answers as it is told; what it is told nothing of is an invalid value."""

    pointer: dict[PointerAttribute, int] = field(default_factory=dict)
    attributes: dict[DeviceAttribute, int] = field(default_factory=dict)
    name: str = "NVIDIA H100 80GB HBM3"
    mapped: dict[int, int] = field(default_factory=dict)  # physical handle by mapping's base
    handle_types: int = 0
    location: int = 1
    error: int = ERROR_INVALID_VALUE
    released: int = 0
    retained: int = 0
    context: int = 0xC0
    bound_to: list[int] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def current_context(self) -> int:
        return self.context

    @contextmanager
    def bound(self, context: int) -> Iterator[None]:
        self.bound_to.append(context)
        yield

    def device(self, number: int) -> int:
        return number

    def uuid_of(self, device: int) -> str:
        return f"GPU-{device}"

    def retain_primary(self, device: int) -> int:
        return 0xAA0 + device

    def memory_bytes(self) -> tuple[int, int]:
        return 1 << 30, 1 << 32

    def pointer_attribute(self, address: int, attribute: PointerAttribute) -> int:
        return self._answer(self.pointer, attribute)

    def device_attribute(self, device: int, attribute: DeviceAttribute) -> int:
        return self._answer(self.attributes, attribute)

    def _answer(self, known: Any, attribute: Any) -> int:
        if attribute not in known:
            raise self._failed(attribute.name)
        return cast(int, known[attribute])

    def _failed(self, what: str) -> CudaError:
        return CudaError(what, self.error, "CUDA_ERROR", "as the test has it")

    def device_name(self, device: int) -> str:
        return self.name

    def address_range(self, address: int) -> tuple[int, int]:
        return BASE, MAPPED_BYTES

    def retain_allocation(self, address: int) -> int:
        for base, handle in self.mapped.items():
            if base <= address < base + MAPPED_BYTES:
                self.retained += 1
                return handle
        raise self._failed("cuMemRetainAllocationHandle")

    def call(self, name: str, *arguments: Any) -> None:
        if name in ("cuIpcGetMemHandle", "cuDevicePrimaryCtxRelease_v2"):
            self.calls.append((name, arguments[-1]))
            return
        if name == "cuMemRelease":
            self.released += 1
            return
        assert name == "cuMemGetAllocationPropertiesFromHandle"
        properties = ctypes.cast(arguments[0], ctypes.POINTER(AllocationProperties)).contents
        properties.requested_handle_types = self.handle_types
        properties.location.type = self.location

    @property
    def typed(self) -> Libcuda:
        return cast(Libcuda, self)


def refusal(reason: CudaRefusal) -> Any:
    return pytest.raises(CudaMemoryRefused, match=rf"\[{reason}\]")


# -- memory ---------------------------------------------------------------------------------------


def test_legacy_memory_is_known_where_the_driver_has_no_word_for_pools() -> None:
    driver = ScriptedDriver({PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE: 1})
    assert kind_of(driver.typed, SPAN) is HandleKind.LEGACY
    assert allocation_of(driver.typed, SPAN, HandleKind.LEGACY) == Allocation(BASE, MAPPED_BYTES)


def test_pool_memory_is_refused_even_where_it_calls_itself_legacy() -> None:
    driver = ScriptedDriver(
        {PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE: 1, PointerAttribute.MEMPOOL_HANDLE: 0xBEEF}
    )
    with refusal(CudaRefusal.POOL_MEMORY):
        kind_of(driver.typed, SPAN)


def test_memory_that_is_neither_legacy_nor_mapped_by_this_process_is_not_shareable() -> None:
    driver = ScriptedDriver({PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE: 0})
    with refusal(CudaRefusal.NOT_SHAREABLE):
        kind_of(driver.typed, SPAN)


@pytest.mark.parametrize("handle_types", [0, 2, 8])
def test_vmm_memory_that_no_descriptor_can_be_had_of_is_refused_with_the_settings_that_make_it(
    handle_types: int,
) -> None:
    driver = ScriptedDriver(mapped={BASE: 1}, handle_types=handle_types)
    with refusal(CudaRefusal.VMM_NOT_EXPORTABLE) as refused:
        kind_of(driver.typed, SPAN)
    assert "expandable_segments:False" in refused.value.fix
    assert "--enable-sleep-mode" in refused.value.fix
    assert driver.released == driver.retained == 1


def test_vmm_memory_with_a_descriptor_among_its_handle_types_is_taken() -> None:
    driver = ScriptedDriver(mapped={BASE: 1}, handle_types=1 | 8)
    assert kind_of(driver.typed, SPAN) is HandleKind.VMM
    assert driver.released == driver.retained == 1


def test_vmm_memory_on_the_host_is_refused() -> None:
    driver = ScriptedDriver(mapped={BASE: 1}, handle_types=1, location=3)
    with refusal(CudaRefusal.HOST_MEMORY):
        kind_of(driver.typed, SPAN)


def test_a_physical_allocation_is_taken_by_its_mapping_and_not_by_all_that_was_reserved() -> None:
    mapping = BASE + MAPPED_BYTES
    driver = ScriptedDriver(
        {
            PointerAttribute.MAPPING_BASE_ADDR: mapping,
            PointerAttribute.MAPPING_SIZE: MAPPED_BYTES,
        },
        mapped={mapping: 2},
    )
    span = DeviceSpan(mapping + 64, 4096)
    assert allocation_of(driver.typed, span, HandleKind.VMM) == Allocation(mapping, MAPPED_BYTES)


def test_an_older_driver_is_asked_for_the_range_of_a_physical_allocation() -> None:
    driver = ScriptedDriver(mapped={BASE: 1})
    assert allocation_of(driver.typed, SPAN, HandleKind.VMM) == Allocation(BASE, MAPPED_BYTES)


@pytest.mark.parametrize("neighbour", [{BASE + MAPPED_BYTES: 2}, {}])
def test_a_span_that_leaves_its_physical_allocation_is_refused(neighbour: dict[int, int]) -> None:
    driver = ScriptedDriver(mapped={BASE: 1} | neighbour)
    with refusal(CudaRefusal.SEVERAL_ALLOCATIONS):
        allocation_of(driver.typed, DeviceSpan(BASE + 8, MAPPED_BYTES), HandleKind.VMM)
    assert driver.released == driver.retained


def test_a_span_that_leaves_its_legacy_allocation_is_refused() -> None:
    with refusal(CudaRefusal.OUT_OF_ALLOCATION):
        allocation_of(ScriptedDriver().typed, DeviceSpan(BASE + 8, MAPPED_BYTES), HandleKind.LEGACY)


def test_pinned_host_memory_is_refused() -> None:
    driver = ScriptedDriver({PointerAttribute.MEMORY_TYPE: MemoryType.HOST})
    with refusal(CudaRefusal.HOST_MEMORY):
        device_of(driver.typed, SPAN)


@pytest.mark.parametrize("side", [MemoryType.HOST, MemoryType.DEVICE])
def test_managed_memory_is_refused_on_whichever_side_it_is(side: MemoryType) -> None:
    driver = ScriptedDriver({PointerAttribute.MEMORY_TYPE: side, PointerAttribute.IS_MANAGED: 1})
    with refusal(CudaRefusal.MANAGED_MEMORY):
        device_of(driver.typed, SPAN)


def test_an_error_that_is_no_answer_is_no_refusal() -> None:
    driver = ScriptedDriver(error=CUDA_ERROR_LAUNCH_FAILED)
    for ask in (device_of, kind_of):
        with pytest.raises(CudaError):
            ask(driver.typed, SPAN)


# -- GPUs -----------------------------------------------------------------------------------------

DEFAULT_MODE = {DeviceAttribute.COMPUTE_MODE: 0}


def test_a_whole_gpu_in_its_default_mode_is_taken() -> None:
    check_gpu(ScriptedDriver(attributes=DEFAULT_MODE | {DeviceAttribute.MPS_ENABLED: 0}).typed, 0)


def test_a_mig_slice_is_refused_by_its_name() -> None:
    driver = ScriptedDriver(attributes=DEFAULT_MODE, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    with refusal(CudaRefusal.MIG):
        check_gpu(driver.typed, 0)


@pytest.mark.parametrize("mode", [2, 3])
def test_a_gpu_that_lets_no_second_process_in_is_refused(mode: int) -> None:
    driver = ScriptedDriver(attributes={DeviceAttribute.COMPUTE_MODE: mode})
    with refusal(CudaRefusal.COMPUTE_MODE):
        check_gpu(driver.typed, 0)


def test_a_driver_that_knows_of_mps_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    on = ScriptedDriver(attributes=DEFAULT_MODE | {DeviceAttribute.MPS_ENABLED: 1})
    with refusal(CudaRefusal.MPS):
        check_gpu(on.typed, 0)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    check_gpu(ScriptedDriver(attributes=DEFAULT_MODE | {DeviceAttribute.MPS_ENABLED: 0}).typed, 0)


def test_with_a_driver_that_does_not_know_of_mps_its_variable_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    check_gpu(ScriptedDriver(attributes=DEFAULT_MODE).typed, 0)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    with refusal(CudaRefusal.MPS):
        check_gpu(ScriptedDriver(attributes=DEFAULT_MODE).typed, 0)


# -- the context ----------------------------------------------------------------------------------


def legacy_driver(monkeypatch: pytest.MonkeyPatch, **pointer: int) -> ScriptedDriver:
    """One that `export_regions` finds, with legacy memory on device 1."""
    answers = {
        PointerAttribute.MEMORY_TYPE: int(MemoryType.DEVICE),
        PointerAttribute.DEVICE_ORDINAL: 1,
        PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE: 1,
    }
    answers |= {PointerAttribute[name]: value for name, value in pointer.items()}
    driver = ScriptedDriver(answers, DEFAULT_MODE | {DeviceAttribute.MPS_ENABLED: 0})
    monkeypatch.setattr(cuda_memory, "libcuda", lambda: driver)
    return driver


def test_memory_is_exported_and_room_looked_up_in_its_own_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = legacy_driver(monkeypatch, CONTEXT=0xBEEF)
    regions = cuda_memory.export_regions([SPAN, SPAN])
    assert regions.gpu.uuid == "GPU-1"
    assert [handle.offset for handle in regions.handles] == [64]
    assert regions.gpu.memory_bytes() == (1 << 30, 1 << 32)
    assert driver.bound_to == [0xBEEF, 0xBEEF]
    regions.close()
    assert driver.calls == [("cuIpcGetMemHandle", BASE)]


def test_memory_of_no_context_keeps_the_primary_one_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = legacy_driver(monkeypatch)
    regions = cuda_memory.export_regions([SPAN])
    assert driver.bound_to == [0xAA1]
    regions.close()
    regions.close()
    assert driver.calls[1:] == [("cuDevicePrimaryCtxRelease_v2", 1)]


def test_a_thread_without_a_context_is_told_to_make_one_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    legacy_driver(monkeypatch).context = 0
    with refusal(CudaRefusal.NO_CONTEXT):
        cuda_memory.export_regions([SPAN])
