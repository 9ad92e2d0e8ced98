"""What a mover takes of a GPU, as NVML counts it: here by a stand-in for its Python module."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from kvd.mover.cuda.process_memory import ProcessMemory

UUID = "GPU-00000000-6b76-6400-fa6b-000000000000"
MIB = 1 << 20


@dataclass
class Process:
    """One of NVML's processes, with its names."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815


class NvmlError(Exception):
    """As pynvml.NVMLError."""


class Nvml(ModuleType):
    """As the module pynvml."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.processes: list[Process] = []
        self.asked_for = ""
        self.starts = True
        self.answers = True

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.starts:
            raise NvmlError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        self.asked_for = uuid
        return self

    def nvmlDeviceGetComputeRunningProcesses(self, device: object) -> list[Process]:  # noqa: N802
        assert device is self
        if not self.answers:
            raise NvmlError("Insufficient Permissions")
        return self.processes


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_only_this_processs_memory_on_this_gpu_counts(nvml: Nvml) -> None:
    nvml.processes = [Process(os.getpid() + 1, 70000 * MIB), Process(os.getpid(), 500 * MIB)]
    assert ProcessMemory(UUID).used_bytes() == 500 * MIB
    assert nvml.asked_for == UUID


def test_container_with_pids_of_its_own_is_not_told(nvml: Nvml) -> None:
    nvml.processes = [Process(os.getpid() + 1, 500 * MIB)]
    assert ProcessMemory(UUID).used_bytes() is None


def test_driver_that_may_not_say_how_much_is_unknown(nvml: Nvml) -> None:
    nvml.processes = [Process(os.getpid(), None)]
    assert ProcessMemory(UUID).used_bytes() is None
    nvml.answers = False
    assert ProcessMemory(UUID).used_bytes() is None


def test_without_nvml_it_is_unknown_and_the_log_says_so_once(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nvml.starts = False
    memory = ProcessMemory(UUID)
    assert (memory.used_bytes(), memory.used_bytes()) == (None, None)
    assert capfd.readouterr().err.count("Driver Not Loaded") == 1
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert ProcessMemory(UUID).used_bytes() is None
    assert "install nvidia-ml-py" in capfd.readouterr().err
