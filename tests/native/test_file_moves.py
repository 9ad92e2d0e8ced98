"""Blocks to a file and back by the native library: bytes, sums, and what it must not touch."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvd import native
from kvd.mover.checksums import checksums_of, empty_sums_of
from kvd.native.file_moves import FileMover, FileRuns

LIBRARY = native.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native library: {native.why_not()}")
LEVELS = LIBRARY.levels() if LIBRARY is not None else ()
CANARY = 0xA5
GAP = 64
NEVER = float("inf")


class Parts:
    """Parts of noise, with canaries between them, that go one after the other into a file."""

    def __init__(self, sizes: Sequence[Sequence[int]], seed: int) -> None:
        self.sizes = [size for run in sizes for size in run]
        starts = [GAP, *(GAP + end for end in itertools.accumulate(s + GAP for s in self.sizes))]
        self.memory: npt.NDArray[np.uint8] = np.full(starts[-1], CANARY, dtype=np.uint8)
        self.views = [
            memoryview(self.memory[start : start + size])  # type: ignore[arg-type]
            for start, size in zip(starts, self.sizes, strict=False)
        ]
        noise = np.random.default_rng(seed)
        for view in self.views:
            view[:] = noise.bytes(view.nbytes)
        self.runs = np.zeros((len(sizes), 4), dtype=np.uint64)
        self.runs[:, 1] = [len(run) for run in sizes]
        self.runs[1:, 0] = np.cumsum(self.runs[:-1, 1])
        self.runs[1:, 2] = np.cumsum([sum(run) for run in sizes])[:-1]
        self.runs[:, 3] = 99

    def moves(self, wanted: Sequence[int] | None = None) -> FileRuns:
        table = [(native.address_of(view), view.nbytes) for view in self.views]
        sums = empty_sums_of(self.sizes)
        known = None if wanted is None else np.array(wanted, dtype=np.uint64)
        return FileRuns(np.array(table, dtype=np.uint64), sums, known, self.runs)

    def content(self) -> bytes:
        return b"".join(map(bytes, self.views))

    def has_its_canaries(self) -> bool:
        return int((self.memory == CANARY).sum()) >= GAP * (len(self.views) + 1)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def mover(fd: int, calls: int = 4, level: str = "plain") -> FileMover:
    assert LIBRARY is not None
    return FileMover(LIBRARY.at(level), fd, calls)


SIZES = {
    "one": [[4096]],
    "larger than a stage": [[(2 << 20) + 4096], [8]],
    "parts that straddle stages": [[4096, (1 << 20) - 8, 24, 1 << 20, 4096], [40]],
    "more parts than a call takes": [[8 * (1 + n % 3) for n in range(700)], [1024] * 300],
    "many runs": [[512, 1024]] * 50,
}


@pytest.mark.parametrize("as_it_lies", [False, True], ids=["staged", "as it lies"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_what_was_written_is_read_with_the_same_sums(
    fd: int, sizes: list[list[int]], level: str, *, as_it_lies: bool
) -> None:
    files = mover(fd, level=level)
    files.writes_as_it_lies = as_it_lies
    gone, back = Parts(sizes, 1), Parts(sizes, 2)
    written, read = gone.moves(), back.moves()
    assert files.move(written, 3, NEVER, writes=True) == [0] * len(sizes)
    assert os.pread(fd, 16 << 20, 0) == gone.content()
    assert files.move(read, 3, NEVER, writes=False) == [0] * len(sizes)
    assert back.content() == gone.content()
    assert back.has_its_canaries()
    for parts, moves in ((gone, written), (back, read)):
        wanted = [int(checksums_of([view])[0]) for view in parts.views]
        assert moves.sums.sums.tolist() == wanted
    files.close()


@pytest.mark.parametrize("as_it_lies", [False, True], ids=["staged", "as it lies"])
def test_a_run_with_a_part_that_is_not_as_wanted_is_not_written(
    fd: int, *, as_it_lies: bool
) -> None:
    files, parts = mover(fd), Parts([[4096, 4096], [4096, 4096], [4096]], 1)
    files.writes_as_it_lies = as_it_lies
    wanted = [int(checksums_of([view])[0]) for view in parts.views]
    wanted[0] = 0  # nothing is known of it
    wanted[3] ^= 1 << 40
    flaws = files.move(parts.moves(wanted), 2, NEVER, writes=True)
    assert flaws == [0, errno.EBADMSG, 0]
    there, right = os.pread(fd, 1 << 20, 0), parts.content()
    assert there[:8192] == right[:8192]
    assert not any(there[8192:16384])
    assert there[16384:] == right[16384:]
    files.close()


def test_a_file_that_ends_too_early_costs_what_lies_behind_its_end(fd: int) -> None:
    files, parts = mover(fd), Parts([[4096, 4096], [4096], [4096]], 1)
    os.pwrite(fd, b"\x11" * 12288, 0)
    assert files.move(parts.moves(), 1, NEVER, writes=False) == [0, 0, errno.EIO]
    os.ftruncate(fd, 6000)
    assert files.move(parts.moves(), 1, NEVER, writes=False) == [errno.EIO] * 3
    assert parts.has_its_canaries()
    files.close()


def test_what_the_kernel_refuses_is_said_by_its_number(fd: int, tmp_path: Path) -> None:
    parts = Parts([[4096], [4096]], 1)
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    for refusing, writes in ((read_only, True), (-1, False)):
        files = mover(refusing)
        flaws = files.move(parts.moves(), 2, NEVER, writes=writes)
        assert flaws == [errno.EBADF] * 2
        files.close()
    os.close(read_only)


@pytest.mark.parametrize("writes", [True, False], ids=["write", "read"])
def test_nothing_is_begun_after_the_deadline(fd: int, *, writes: bool) -> None:
    files, parts = mover(fd), Parts([[4096]] * 3, 1)
    os.ftruncate(fd, 3 * 4096)
    before = parts.memory.copy()
    flaws = files.move(parts.moves(), 2, time.monotonic() - 0.001, writes=writes)
    assert flaws == [errno.ETIMEDOUT] * 3
    assert np.array_equal(parts.memory, before)
    assert not any(os.pread(fd, 3 * 4096, 0))
    files.close()


def test_more_moves_at_once_than_there_are_stages_are_all_right(fd: int) -> None:
    sizes = [[4096, 8192]] * 40
    gone = Parts(sizes, 1)
    files = mover(fd, calls=1)
    assert not any(files.move(gone.moves(), 1, NEVER, writes=True))
    found: list[bool] = []

    def read() -> None:
        back = Parts(sizes, 2)
        flaws = [files.move(back.moves(), 8, NEVER, writes=False) for _ in range(10)]
        found.append(not any(map(any, flaws)) and back.content() == gone.content())

    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [True] * 6
    files.close()
