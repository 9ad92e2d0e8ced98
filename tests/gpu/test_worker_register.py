"""An engine's worker registers its GPU memory with a real daemon, or is told why it can't."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvd_client import EngineIdentity, Fragment, GroupLayout
from tests.daemon_process import DaemonProcess
from tests.gpu.driver import Driver
from tests.gpu.rank_engine import (
    COUNT,
    GAP_BYTES,
    LAYER_BYTES,
    LAYERS,
    GpuEngine,
    as_spans,
    check_gaps,
    engine_of,
)
from tests.gpu.rank_process import RankProcess, words
from tests.waiting import wait_until

# -- what is registered ---------------------------------------------------------------------------


def test_tensors_in_one_allocation_go_by_one_handle_and_come_back(
    engine: GpuEngine, process: RankProcess, layers: list[int], driver: Driver
) -> None:
    [handle] = process.exported()
    assert f"offset={GAP_BYTES}, bytes={layers[-1] + LAYER_BYTES - layers[0]}" in handle
    assert handle.startswith("IpcRegion")
    assert process.uuid in handle
    engine.store("a", "tensors", COUNT)
    assert engine.load("b", "tensors", COUNT) == COUNT
    check_gaps(process, layers)
    if driver.is_fake:
        assert driver.counters()["violations"] == 0


def test_raw_pointers_into_several_allocations_each_have_a_handle(
    daemon: DaemonProcess, process: RankProcess
) -> None:
    layers = [process.allocate(LAYER_BYTES + 4096) + 1024 for _ in range(LAYERS)]
    with engine_of(daemon, process, layers, as_spans(layers)) as engine:
        assert len(process.exported()) == LAYERS
        engine.store("a", "pointers", COUNT)
        assert engine.load("b", "pointers", COUNT) == COUNT


def test_exportable_vmm_memory_goes_by_descriptors_that_are_closed_with_it(
    daemon: DaemonProcess, process: RankProcess
) -> None:
    layers = [process.allocate(LAYER_BYTES, "vmm_exportable") for _ in range(LAYERS)]
    before = process.descriptors()
    with engine_of(daemon, process, layers, as_spans(layers)) as engine:
        handles = process.exported()
        assert len(handles) == LAYERS
        assert all(handle.startswith("VmmRegion") for handle in handles)
        engine.store("a", "physical", COUNT)
        assert engine.load("b", "physical", COUNT) == COUNT
    assert process.descriptors() == before


# -- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def refused(daemon: DaemonProcess, process: RankProcess) -> Iterator[RankProcess]:
    """A process with a Worker."""
    process.make(daemon.socket, EngineIdentity("refused", bytes(16)), 0, 1)
    yield process
    process.close_worker()


def reason_of(process: RankProcess, *memories: Any) -> str:
    """Why these memories are refused; the message has a fix, and nothing is left open."""
    groups = [GroupLayout(1, [Fragment(0, 0, 64, 64)])]
    before = process.descriptors()
    answer = process.register(memories, groups)
    assert process.descriptors() == before
    assert answer is not None, "it was not refused"
    reason, message = answer
    assert f"[{reason}]. To fix it: " in message
    return reason


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("managed", "MANAGED_MEMORY"), ("pool", "POOL_MEMORY"), ("vmm", "VMM_NOT_EXPORTABLE")],
)
def test_memory_that_has_no_handle_is_refused_by_its_kind(
    refused: RankProcess, kind: str, reason: str
) -> None:
    good = refused.allocate(4096, "vmm_exportable")
    bad = refused.allocate(4096, kind)
    assert reason_of(refused, (good, 4096), (bad, 4096)) == reason


def test_an_address_that_cuda_does_not_know_is_refused(refused: RankProcess) -> None:
    assert reason_of(refused, (0x7000_0000, 4096)) == "NOT_ON_CUDA"


def test_memory_that_was_freed_is_refused(refused: RankProcess) -> None:
    address = refused.allocate(4 << 20)  # smaller ones may lie in memory that is kept
    refused.free(address)
    assert reason_of(refused, (address, 4096)) == "NOT_ON_CUDA"


def test_more_bytes_than_were_allocated_are_refused(refused: RankProcess) -> None:
    address = refused.allocate(4096)
    assert reason_of(refused, (address + 2048, 1 << 30)) == "OUT_OF_ALLOCATION"


def test_a_span_over_several_physical_allocations_is_refused_and_each_of_them_is_taken(
    refused: RankProcess,
) -> None:
    address, nbytes = refused.allocate_in_pieces(2)
    assert reason_of(refused, (address, nbytes)) == "SEVERAL_ALLOCATIONS"
    half = nbytes // 2
    groups = [GroupLayout(1, [Fragment(0, 0, 64, 64), Fragment(1, 0, 64, 64)])]
    assert refused.register([(address + 64, half - 64), (address + half, half)], groups) is None
    first, second = refused.exported()
    assert f"offset=64, bytes={half - 64}, allocation_bytes={half}" in first
    assert f"offset=0, bytes={half}, allocation_bytes={half}" in second
    assert refused.unregister()


def test_a_tensor_on_the_cpu_is_refused(refused: RankProcess) -> None:
    tensor = words(0x7000_0000, (4, 64)) | {"device": "cpu"}
    assert reason_of(refused, tensor) == "NOT_ON_CUDA"


def test_memory_of_two_gpus_in_one_rank_is_refused(refused: RankProcess, driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("it takes a second GPU")
    driver.inject("devices", count=2)
    one, other = refused.allocate(4096), refused.allocate_on(1, 4096)
    assert reason_of(refused, (one, 4096), (other, 4096)) == "SEVERAL_GPUS"


@pytest.mark.parametrize(
    ("fault", "values", "reason"),
    [("compute_mode", {"mode": 3}, "COMPUTE_MODE"), ("mps", {"on": True}, "MPS")],
)
def test_a_gpu_in_a_mode_that_is_not_proved_safe_is_refused(
    refused: RankProcess, driver: Driver, fault: str, values: dict[str, int], reason: str
) -> None:
    if not driver.is_fake:
        pytest.skip("the GPU's settings are not a test's to change")
    address = refused.allocate(4096)
    driver.inject(fault, **values)
    assert reason_of(refused, (address, 4096)) == reason


def test_the_daemons_refusal_for_want_of_room_is_the_problem_and_is_logged_once(
    refused: RankProcess, driver: Driver
) -> None:
    if not driver.is_fake:
        pytest.skip("it takes a GPU without room")
    address = refused.allocate(4096)
    hog = refused.allocate(driver.free_bytes() - (64 << 20))
    groups = [GroupLayout(1, [Fragment(0, 0, 64, 64)])]
    assert refused.register([(address, 4096)], groups) is None
    wait_until(lambda: "gpu-memory-utilization" in refused.problem, "the refusal")
    first = refused.problem
    more = refused.allocate(1 << 20)  # other figures
    wait_until(lambda: refused.problem != first, "the next refusal")
    assert [line for line in refused.warnings() if "gpu-memory-utilization" in line] != []
    assert len(refused.warnings()) == 1
    refused.free(more)
    refused.free(hog)
    assert refused.wait_registered()
    assert refused.problem == ""
    assert refused.unregister()
