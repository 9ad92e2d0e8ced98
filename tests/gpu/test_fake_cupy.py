"""The small package `cupy` answers as CuPy does, and runs a kernel's source as it is written."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.gpu.driver import Driver

# An interpreter with CuPy 14 in it, on a machine with or without a GPU.
REAL_CUPY = os.environ.get("KVD_REAL_CUPY")
REVERSE = """
extern "C" __global__ void reverse(unsigned char* to, const unsigned char* from, unsigned count)
{
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        to[at] = from[count - 1 - at];
}
"""


@pytest.fixture
def runtime(driver: Driver) -> ModuleType:
    if not driver.is_fake:
        pytest.skip("asks the fake driver alone")
    from cupy.cuda import runtime

    found: ModuleType = runtime
    return found


@pytest.fixture
def memory(runtime: Any) -> Iterator[int]:
    address = runtime.malloc(4096)
    yield address
    runtime.free(address)


def kernel(name: str, source: str = REVERSE) -> Any:
    import cupy

    return cupy.RawKernel(source, name)


def test_an_error_has_the_runtimes_name_and_status(runtime: Any) -> None:
    with pytest.raises(runtime.CUDARuntimeError) as refused:
        runtime.hostUnregister(4096)
    assert refused.value.status == 713
    assert str(refused.value) == (
        "cudaErrorHostMemoryNotRegistered: "
        "pointer does not correspond to a registered memory region"
    )
    assert pickle.loads(pickle.dumps(refused.value)).status == 713


def test_a_query_answers_the_status_and_does_not_raise(driver: Driver, runtime: Any) -> None:
    stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
    driver.inject("latency", microseconds=100_000)
    runtime.eventRecord(event, stream)
    assert (runtime.eventQuery(event), runtime.streamQuery(stream)) == (600, 600)
    runtime.streamSynchronize(stream)
    assert (runtime.eventQuery(event), runtime.streamQuery(stream)) == (0, 0)
    runtime.eventDestroy(event)
    runtime.streamDestroy(stream)


def test_a_direction_that_the_addresses_belie_is_refused(runtime: Any, memory: int) -> None:
    host = np.zeros(16, dtype=np.uint8)
    with pytest.raises(runtime.CUDARuntimeError) as refused:
        runtime.memcpy(memory, host.ctypes.data, 16, runtime.memcpyDeviceToHost)
    assert refused.value.status == 1
    runtime.memcpy(memory, host.ctypes.data, 16, runtime.memcpyHostToDevice)


def test_a_rectangle_is_copied_by_its_pitches(runtime: Any, memory: int) -> None:
    host = np.arange(64, dtype=np.uint8)
    runtime.memset(memory, 0xEE, 4096)
    runtime.memcpy2D(*(memory, 100), *(host.ctypes.data, 16), 5, 4, runtime.memcpyHostToDevice)
    found = np.empty(400, dtype=np.uint8)
    runtime.memcpy(found.ctypes.data, memory, 400, runtime.memcpyDeviceToHost)
    expected = np.full((4, 100), 0xEE, dtype=np.uint8)
    expected[:, :5] = host.reshape(4, 16)[:, :5]
    assert np.array_equal(found.reshape(4, 100), expected)


def test_a_kernel_runs_for_every_thread_of_its_grid(runtime: Any, memory: int) -> None:
    import cupy

    content = np.arange(1000, dtype=np.uint16).view(np.uint8)[:1500].copy()
    runtime.memcpy(memory, content.ctypes.data, 1500, runtime.memcpyHostToDevice)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kernel("reverse")((24,), (64,), (memory + 2000, memory, np.uint32(1500)))
    stream.synchronize()
    found = np.empty(1500, dtype=np.uint8)
    runtime.memcpy(found.ctypes.data, memory + 2000, 1500, runtime.memcpyDeviceToHost)
    assert np.array_equal(found, content[::-1])


def test_a_kernels_bad_address_is_an_error_that_stays(
    driver: Driver, runtime: Any, memory: int
) -> None:
    kernel("reverse")((1,), (64,), (0, memory, np.uint32(64)))
    for _ in range(2):
        with pytest.raises(runtime.CUDARuntimeError) as lost:
            runtime.deviceSynchronize()
        assert lost.value.status == 700
    assert driver.counters()["kernel_faults"] == 1
    driver.reset()


def test_an_argument_of_another_size_than_the_parameters_is_refused(
    runtime: Any, memory: int
) -> None:
    with pytest.raises(TypeError, match=r"\[8, 8, 4\] bytes, not \[8, 8, 8\]"):
        kernel("reverse")((1,), (64,), (memory, memory, 64))


def test_a_kernel_that_does_not_compile_says_where(runtime: Any) -> None:
    from cupy.cuda.compiler import CompileException

    with pytest.raises(CompileException, match=r"broken\.cu:1"):
        kernel("broken", 'extern "C" __global__ void broken() { nothing(); }').compile()


@pytest.mark.skipif(REAL_CUPY is None, reason="KVD_REAL_CUPY names no interpreter with CuPy")
def test_every_name_and_constant_of_the_runtime_is_cupys(runtime: Any) -> None:
    assert REAL_CUPY is not None
    program = (
        "import json, cupy.cuda.runtime as r\n"
        "print(json.dumps({n: v if isinstance(v := getattr(r, n), int) else callable(v)"
        " for n in dir(r)}, default=str))"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([REAL_CUPY, "-c", program], env=clean, capture_output=True, check=True)
    real = json.loads(ran.stdout)
    ours = {
        name: value if isinstance(value := getattr(runtime, name), int) else True
        for name in dir(runtime)
        if getattr(getattr(runtime, name), "__module__", "cupy").startswith("cupy")
        and (name[0].islower() or name.startswith("CUDA"))
        and not isinstance(getattr(runtime, name), ModuleType)
    }
    for helper in ("call", "call_bound", "current_device", "library", "annotations"):
        ours.pop(helper, None)
    assert {name: real.get(name) for name in ours} == ours
