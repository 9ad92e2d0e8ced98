"""What this process takes of the GPU's memory, by NVML's own count of each process.

Free memory alone can't tell it: the engine allocates while its mover starts. NVML counts by
process, where it is installed and where this process has the pid here that the driver knows it by
(not in a container with PIDs of its own). It leaves out what is opened of another process's.
"""

from __future__ import annotations

import os
from typing import Any

from kvd.processes.complaints import log_limited


class ProcessMemory:
    """NVML's view of this process on one GPU. Never raises: where it is blind, so is the caller."""

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = None
        try:
            import pynvml  # noqa: PLC0415 - of nvidia-ml-py, which may be absent
        except ImportError as error:
            log_limited(f"what movers take of GPUs is estimated: {error} (install nvidia-ml-py)")
            return
        try:
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            log_limited(f"what movers take of GPUs is estimated: NVML says {error}")
            return
        self._nvml = pynvml

    def used_bytes(self) -> int | None:
        """Device memory of this process's own now; None where NVML does not tell."""
        if self._nvml is None:
            return None
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        except self._nvml.NVMLError:
            return None
        # A driver that may not say how much says None.
        found = (process.usedGpuMemory for process in running if process.pid == os.getpid())
        return next(found, None)
