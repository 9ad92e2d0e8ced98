"""kvd's declarations of the CUDA driver against the header of a toolkit, where one is installed."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from ctypes import Structure, c_char_p, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from kvd_proto import libcuda
from tests.gpu import fake_library
from tests.gpu.driver import Driver

STRUCTURES: dict[type[Structure], tuple[str, dict[str, str]]] = {
    libcuda.IpcHandle: ("CUipcMemHandle", {}),
    libcuda.DeviceUuid: ("CUuuid", {}),
    libcuda.Location: ("CUmemLocation", {}),
    libcuda.AllocationProperties: (
        "CUmemAllocationProp",
        {
            "requested_handle_types": "requestedHandleTypes",
            "win32_handle_metadata": "win32HandleMetaData",
            "alloc_flags": "allocFlags",
        },
    ),
    libcuda.AccessDescription: ("CUmemAccessDesc", {}),
    libcuda.CopyAttributes: (
        "CUmemcpyAttributes",
        {
            "source_access_order": "srcAccessOrder",
            "source_location_hint": "srcLocHint",
            "destination_location_hint": "dstLocHint",
        },
    ),
}
ENUMS: dict[type[IntEnum], str] = {
    libcuda.PointerAttribute: "CU_POINTER_ATTRIBUTE_",
    libcuda.DeviceAttribute: "CU_DEVICE_ATTRIBUTE_",
    libcuda.MemoryType: "CU_MEMORYTYPE_",
    libcuda.ComputeMode: "CU_COMPUTEMODE_",
    libcuda.CaptureMode: "CU_STREAM_CAPTURE_MODE_",
}
NUMBERS = {
    "CUDA_SUCCESS": libcuda.CUDA_SUCCESS,
    "CUDA_ERROR_INVALID_VALUE": libcuda.ERROR_INVALID_VALUE,
    "CUDA_ERROR_OUT_OF_MEMORY": libcuda.ERROR_OUT_OF_MEMORY,
    "CUDA_ERROR_NOT_FOUND": libcuda.ERROR_NOT_FOUND,
    "CUDA_ERROR_NOT_SUPPORTED": libcuda.ERROR_NOT_SUPPORTED,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": libcuda.HANDLE_TYPE_POSIX_FD,
    "CU_MEM_LOCATION_TYPE_DEVICE": libcuda.LOCATION_DEVICE,
    "CU_EVENT_BLOCKING_SYNC": libcuda.EVENT_BLOCKING_SYNC,
    "CU_EVENT_DISABLE_TIMING": libcuda.EVENT_DISABLE_TIMING,
    "CU_IPC_HANDLE_SIZE": libcuda.IPC_HANDLE_BYTES,
}
POINTER_CLASS = 5  # of __builtin_classify_type


class Header:
    """cuda.h and the machine's compiler."""

    def __init__(self, compiler: str, include: Path, folder: Path) -> None:
        self._command = [compiler, "-std=gnu11", "-Wno-enum-compare", f"-I{include}"]
        self._folder = folder
        source = folder / "header.c"
        source.write_text("#include <cuda.h>\n")
        self.text = subprocess.check_output([*self._command, "-E", "-P", source], text=True)

    def values(self, expressions: Sequence[str]) -> list[int]:
        """What these C expressions are."""
        lines = [f'printf("%lld\\n", (long long)({each}));' for each in expressions]
        includes = "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n"
        source, program = self._folder / "values.c", self._folder / "values"
        source.write_text(includes + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n")
        subprocess.run([*self._command, source, "-o", program], check=True)
        return [int(line) for line in subprocess.check_output([program], text=True).split()]

    def parameters(self, function: str) -> list[str]:
        """The C types of a function's parameters; it has to be declared."""
        found = re.search(rf"\bCUresult\s+{function}\s*\(([^)]*)\)", self.text)
        assert found, f"cuda.h declares no {function}"
        return [re.sub(r"\w+\s*$", "", each).strip() for each in found.group(1).split(",")]


def include_directories() -> Iterator[Path]:
    """Where toolkits lie."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable]) / "include"
    yield from sorted(Path("/usr/local").glob("cuda*/include"))
    yield Path("/usr/include")


@pytest.fixture(scope="session")
def driver() -> Driver:
    """One that is never started: what is read here needs no driver, not even the fake one."""
    unstarted = Driver()
    unstarted.is_fake = False
    return unstarted


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    try:
        compiler = fake_library.compiler()
    except fake_library.NoCompiler:
        pytest.skip("no C compiler, so cuda.h can't be read")
    for include in include_directories():
        if (include / "cuda.h").is_file():
            return Header(compiler, include, tmp_path_factory.mktemp("header"))
    pytest.skip("no CUDA toolkit with cuda.h is installed")


@pytest.mark.parametrize("ours", STRUCTURES, ids=lambda ours: ours.__name__)
def test_a_structure_lies_in_memory_as_the_header_says(
    header: Header, ours: type[Structure]
) -> None:
    theirs, renamed = STRUCTURES[ours]
    if theirs not in header.text:
        pytest.skip(f"this toolkit is older than {theirs}")
    names = [field[0] for field in ours._fields_]
    offsets = [f"offsetof({theirs}, {renamed.get(name, name)})" for name in names]
    sizes = [f"sizeof((({theirs} *)0)->{renamed.get(name, name)})" for name in names]
    mine = [
        *(getattr(ours, name).offset for name in names),
        *(getattr(ours, name).size for name in names),
    ]
    assert header.values([f"sizeof({theirs})", *offsets, *sizes]) == [ctypes.sizeof(ours), *mine]


def test_the_flags_of_an_allocation_lie_as_the_header_says(header: Header) -> None:
    ours = libcuda.AllocationFlags
    names = {
        "compression_type": "compressionType",
        "gpu_direct_rdma_capable": "gpuDirectRDMACapable",
        "usage": "usage",
        "reserved": "reserved",
    }
    assert list(names) == [field[0] for field in ours._fields_]
    where = "offsetof(CUmemAllocationProp, allocFlags"
    found = header.values([f"{where}.{theirs}) - {where})" for theirs in names.values()])
    assert found == [getattr(ours, name).offset for name in names]


@pytest.mark.parametrize("ours", ENUMS, ids=lambda ours: ours.__name__)
def test_an_enums_members_have_the_headers_values(header: Header, ours: type[IntEnum]) -> None:
    known = [
        member for member in ours if re.search(rf"\b{ENUMS[ours]}{member.name}\b", header.text)
    ]
    assert len(known) >= len(ours) / 2
    assert header.values([ENUMS[ours] + member.name for member in known]) == known


def test_named_numbers_are_the_headers(header: Header) -> None:
    assert header.values(list(NUMBERS)) == list(NUMBERS.values())


@pytest.mark.parametrize("function", libcuda._FUNCTIONS)
def test_a_function_takes_what_the_header_says(header: Header, function: str) -> None:
    ours, theirs = libcuda._FUNCTIONS[function], header.parameters(function)
    assert len(ours) == len(theirs)
    for mine, their in zip(ours, theirs, strict=True):
        pointee = _pointee(mine)
        is_pointer = mine is c_void_p or pointee is not None
        expected = {
            f"__builtin_classify_type(({their})0) == {POINTER_CLASS}": int(is_pointer),
            f"sizeof({their})": ctypes.sizeof(mine),
        }
        if pointee is not None:
            expected[f"sizeof(*({their})0)"] = ctypes.sizeof(pointee)
        assert dict(zip(expected, header.values(list(expected)), strict=True)) == expected


def _pointee(kind: Any) -> Any:
    """What a declared pointer leads to; None for what is none, or leads to no one knows what."""
    if kind is c_char_p:
        return ctypes.c_char
    leads_to = getattr(kind, "_type_", None)
    return leads_to if isinstance(leads_to, type) else None
