"""A real hugetlbfs for tests, where this machine lets us have one; a skip with the reason else."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE_BYTES = 2 << 20
_ROOT = Path("/sys/kernel/mm/hugepages")
_PAGES = _ROOT / "hugepages-2048kB" / "nr_hugepages"
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def huge_pages(mount: Path, pages: int) -> Iterator[Path]:
    """A hugetlbfs at `mount`, which is made, with that many more pages of 2 MiB in the machine.

    They are given back at the end, when nothing may use them any more.
    """
    if os.geteuid() != 0 or not _PAGES.exists():
        pytest.skip("only root can mount a hugetlbfs, on a kernel with pages of 2 MiB")
    mount.mkdir()
    with _alone(), _set_aside(pages):
        if _libc.mount(b"none", str(mount).encode(), b"hugetlbfs", 0, b"pagesize=2M") != 0:
            pytest.skip(f"no hugetlbfs can be mounted: {os.strerror(ctypes.get_errno())}")
        try:
            yield mount
        finally:
            assert _libc.umount2(str(mount).encode(), 0) == 0, "something still maps huge pages"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """The number of pages is the machine's: tests that run beside these wait."""
    fd = os.open(_ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _set_aside(pages: int) -> Iterator[None]:
    before = int(_PAGES.read_text())
    try:
        _PAGES.write_text(f"{before + pages}\n")
    except OSError as error:
        pytest.skip(f"the number of huge pages can't be set: {error}")
    try:
        if int(_PAGES.read_text()) < before + pages:
            pytest.skip("the machine has no memory for huge pages")
        yield
    finally:
        _PAGES.write_text(f"{before}\n")
