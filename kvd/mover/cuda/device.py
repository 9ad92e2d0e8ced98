"""The one GPU that this process sees: opened by UUID, refused where its mode is not proved safe."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from cupy.cuda import runtime

from kvd.core.errors import InvalidArgument
from kvd.mover.copy_engine import DeviceLost
from kvd.mover.cuda import node
from kvd.mover.layout import GpuConfig
from kvd.mover.registration_errors import (
    GPU_MEMORY_SHORT,
    GPU_MODE_UNSUPPORTED,
    GPU_UNKNOWN,
    TRANSPORT_UNSUPPORTED,
)
from kvd_proto.libcuda import (
    ERROR_INVALID_VALUE,
    ERROR_OUT_OF_MEMORY,
    ComputeMode,
    CudaError,
    CudaUnavailable,
    DeviceAttribute,
    Libcuda,
    libcuda,
)

ONLY = 0  # CUDA_VISIBLE_DEVICES names one GPU, whatever its number on the machine
FIELD = "memories[0]"  # all memories of a rank lie on one GPU

_ERROR_NO_DEVICE = 100
_DRIVER_VERSION = Path("/sys/module/nvidia/version")
_MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - where MPS puts its pipe unless told otherwise
_MEBIBYTE = 1 << 20


class Device:
    """The GPU, with its primary context made and this thread, and all that it starts, bound.

    Raises InvalidArgument, with a reason of kvd.mover.registration_errors, for a GPU that this
    process can't use. The context ends with the process.
    """

    def __init__(self, gpu: GpuConfig) -> None:
        self.uuid = gpu.uuid
        self._bound = threading.local()
        if gpu.uuid.startswith("MIG-"):
            raise _refused_mode("a MIG instance", "register memory of a whole GPU")
        self._free_bytes_before = gpu.free_bytes_before
        self.name = "its name is not known yet"
        driver = _driver(gpu.uuid)
        try:
            self._check_uuid(driver)
            self.name = driver.device_name(ONLY)
            _check_mode(driver, self.name)
            self.driver_version = _driver_version(driver)
            self.numa_node = node.node_of(driver.pci_bus_id(ONLY))
            if gpu.bind_to_node:
                node.bind_to(self.numa_node)  # the driver's threads too: they start with a context
            self._make_context()
        except (CudaError, runtime.CUDARuntimeError) as error:
            raise self.refusal(error) from error

    def bind(self) -> None:
        """Make the context this thread's: calls by ctypes take the one that is current.

        Costs something only in a thread's first call.
        """
        if getattr(self._bound, "is_here", False):
            return
        try:
            runtime.setDevice(ONLY)
        except runtime.CUDARuntimeError as error:
            raise DeviceLost(f"{self.uuid} answers no more: {error}") from error
        self._bound.is_here = True

    def bytes_taken(self) -> int:
        """Device memory that went since the worker looked, before this process had a context.

        All that the context brings is in it, and whatever else was allocated on the GPU
        meanwhile. 0: the worker did not say what it saw, or more is free than then.
        """
        if not self._free_bytes_before:
            return 0
        free, _total = runtime.memGetInfo()
        return max(0, self._free_bytes_before - int(free))

    def _check_uuid(self, driver: Libcuda) -> None:
        found = driver.uuid_of(ONLY)
        if found != self.uuid:
            raise InvalidArgument(
                f"the mover was given {found}, not the {self.uuid} that the memory lies on",
                FIELD,
                GPU_UNKNOWN,
            )

    def _make_context(self) -> None:
        runtime.setDevice(ONLY)
        runtime.memGetInfo()  # whatever the runtime puts off, this needs the context

    def refusal(self, error: Exception) -> InvalidArgument:
        """What an error of CUDA's means where the mover readies the GPU for itself."""
        code = getattr(error, "status", getattr(error, "code", 0))
        if code != ERROR_OUT_OF_MEMORY:
            return InvalidArgument(
                f"{self.uuid} ({self.name}) can't be made ready for copies: {error}",
                FIELD,
                TRANSPORT_UNSUPPORTED,
            )
        free = "an unknown amount"
        if self._free_bytes_before:
            free = f"{self._free_bytes_before} bytes ({self._free_bytes_before // _MEBIBYTE} MiB)"
        return InvalidArgument(
            f"{free} of {self.uuid} was free when the rank registered, too little for the mover's "
            f"CUDA context ({error}): lower the engine's gpu_memory_utilization",
            FIELD,
            GPU_MEMORY_SHORT,
        )


def _driver(uuid: str) -> Libcuda:
    try:
        driver = libcuda()
        runtime.getDeviceCount()
    except CudaUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, CudaError) and cause.code == _ERROR_NO_DEVICE:
            raise _unknown(uuid) from error
        raise InvalidArgument(
            f"the daemon can't use GPUs: {error}", FIELD, TRANSPORT_UNSUPPORTED
        ) from error
    except runtime.CUDARuntimeError as error:
        if error.status == _ERROR_NO_DEVICE:
            raise _unknown(uuid) from error
        raise InvalidArgument(
            f"the daemon's CuPy does not fit its CUDA driver: {error}",
            FIELD,
            TRANSPORT_UNSUPPORTED,
        ) from error
    return driver


def _unknown(uuid: str) -> InvalidArgument:
    return InvalidArgument(
        f"the daemon sees no GPU {uuid}: give its container this GPU, or run it on this machine",
        FIELD,
        GPU_UNKNOWN,
    )


def _driver_version(driver: Libcuda) -> str:
    """The driver's own version, or where the machine hides it the CUDA version it speaks."""
    try:
        return _DRIVER_VERSION.read_text().strip()
    except OSError:
        version = driver.driver_version()
        return f"cuda-{version // 1000}.{version % 1000 // 10}"


def _check_mode(driver: Libcuda, name: str) -> None:
    if " MIG " in name:
        raise _refused_mode(f"a MIG instance ({name})", "register memory of a whole GPU")
    mode = driver.device_attribute(ONLY, DeviceAttribute.COMPUTE_MODE)
    if mode in (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED):
        raise _refused_mode(
            f"a GPU in compute mode {ComputeMode(mode).name}",
            "set the default mode (nvidia-smi --compute-mode=DEFAULT)",
        )
    if _shared_by_mps(driver):
        raise _refused_mode(
            "a GPU whose contexts are shared by MPS",
            "stop MPS, or unset CUDA_MPS_PIPE_DIRECTORY for the daemon",
        )


def _shared_by_mps(driver: Libcuda) -> bool:
    try:
        return driver.device_attribute(ONLY, DeviceAttribute.MPS_ENABLED) != 0
    except CudaError as error:
        if error.code != ERROR_INVALID_VALUE:
            raise
    # The driver is older than the question.
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_DIRECTORY)
    return (Path(directory) / "control").exists()


def _refused_mode(what: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        f"the memory lies on {what}, which is not proved safe: {fix}", FIELD, GPU_MODE_UNSUPPORTED
    )
