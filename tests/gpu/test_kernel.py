"""The copy kernel: valid CUDA with wide accesses, and lists that live as long as they must."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvd
from kvd.core.events import JobKind
from kvd.mover.cuda.runs import Runs
from tests.gpu.copy_rig import GPU, Rig, open_rig
from tests.gpu.driver import Driver

SOURCE = Path(kvd.__file__).parent / "mover" / "cuda" / "copy_stretches.cu"
KIB = 1 << 10
NVCC = shutil.which("nvcc")


@pytest.fixture
def rig(driver: Driver) -> Iterator[Rig]:
    del driver
    with open_rig(512 * KIB, 512 * KIB) as made:
        yield made


def stretches(rig: Rig, places: list[tuple[int, int, int]]) -> Runs:
    """Runs of one stretch each: offsets on host and device, bytes."""
    host, device, width = (
        np.array(column, dtype=np.uint64) for column in zip(*places, strict=True)
    )
    return Runs(
        host + np.uint64(rig.host_address),
        device + np.uint64(rig.device),
        width,
        width,
        width,
        np.ones_like(width),
    )


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc here")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_source_compiles_for_the_device(tmp_path: Path, architecture: str) -> None:
    assert NVCC is not None
    built = tmp_path / "kernel.cubin"
    options = ["-std=c++14", "-Werror", "all-warnings", f"-arch={architecture}", "-cubin"]
    subprocess.run([NVCC, *options, "-o", str(built), str(SOURCE)], check=True)
    symbols = built.read_bytes()
    assert b"copy_by_16" in symbols
    assert b"copy_by_8" in symbols


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc here")
def test_sixteen_bytes_move_by_one_instruction(tmp_path: Path) -> None:
    assert NVCC is not None
    built = tmp_path / "kernel.ptx"
    options = ["-std=c++14", "-arch=sm_80", "-ptx"]
    subprocess.run([NVCC, *options, "-o", str(built), str(SOURCE)], check=True)
    by_16, by_8 = (
        re.search(rf"\.entry {name}\(.*?\n}}", built.read_text(), re.DOTALL)
        for name in ("copy_by_16", "copy_by_8")
    )
    assert by_16 is not None
    assert by_8 is not None
    wide = r"ld\.(global\.)?v(2\.[ub]64|4\.[ub]32)"
    assert len(re.findall(wide, by_16[0])) >= 4
    assert not re.search(wide, by_8[0])


@pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])
@pytest.mark.parametrize(
    "places",
    [
        [(0, 0, 16)],
        [(0, 16, 512), (512, 8192, 2048), (4096, 1024, 4096)],
        [(0, 0, 2048 + 16), (4096, 8192, 2048 - 16), (8192, 4096, 496)],
        [(8, 0, 16), (64, 128, 64)],
        [(0, 8, 4096), (8192, 16384, 24)],
        [(0, 0, 8), (16, 16, 16)],
        [(0, 0, 100 * KIB)],
        [(16 * n, 32 * n, 16) for n in range(3000)],
    ],
    ids=[
        "a word of 16",
        "whole turns of a warp",
        "a bit more and less than a turn",
        "host memory off by 8",
        "device memory off by 8",
        "bytes off by 8",
        "a stretch for many warps",
        "more stretches than warps",
    ],
)
def test_the_kernel_copies_exactly_what_is_listed(
    rig: Rig, kind: JobKind, places: list[tuple[int, int, int]]
) -> None:
    rig.check("kernel", kind, stretches(rig, places))


def test_wide_words_are_used_only_where_everything_is_aligned(rig: Rig) -> None:
    from kvd.mover.cuda.kernel import CopyKernel

    kernel = CopyKernel()
    used: list[str] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *_: object) -> None:
            used.append(self.name)

    kernel._by_16, kernel._by_8 = Noting("by 16"), Noting("by 8")
    for row in ([32, 64, 48], [40, 64, 48], [32, 72, 48], [32, 64, 56]):
        columns = tuple(np.array([value, 16], dtype=np.uint64)[:1] for value in row)
        kernel.copy((columns[0], columns[1], columns[2]), rig.stream)
    assert used == ["by 16", "by 8", "by 8", "by 8"]


def test_lists_are_used_again_once_their_copies_have_run(rig: Rig) -> None:
    from kvd.mover.cuda.copiers import KernelCopier

    copier = KernelCopier(GPU)
    for _ in range(20):
        copier.submit(JobKind.LOAD, stretches(rig, [(0, 0, 64)]), rig.stream)
        rig.sync()
    lists = copier._kernel._free + copier._kernel._held.release()
    assert len(lists) == 1


def test_a_list_has_room_for_any_number_of_stretches(rig: Rig) -> None:
    places = [(16 * n, 16 * n, 8) for n in range(20_000)]
    rig.check("kernel", JobKind.STORE, stretches(rig, places))
