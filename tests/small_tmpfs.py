"""A real tmpfs of a test's own size, and a neighbour who fills it; a skip with the reason else."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_DETACH = 2
_MS_RDONLY, _MS_REMOUNT = 1, 32
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def small_tmpfs(mount: Path, size: int, more: str = "") -> Iterator[Path]:
    """A tmpfs of that many bytes at `mount`, which is made; `more` options begin with a comma."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    mount.mkdir()
    if not mount_tmpfs(mount, size, more):
        pytest.skip(f"no tmpfs can be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        yield mount
    finally:
        assert _libc.umount2(os.fsencode(mount), 0) == 0, "something still uses the tmpfs"


def mount_tmpfs(mount: Path, size: int, more: str = "") -> bool:
    """Mount an empty one there; whether that worked."""
    options = f"size={size},mode=0700{more}".encode()
    return bool(_libc.mount(b"none", os.fsencode(mount), b"tmpfs", 0, options) == 0)


def remount_read_only(mount: Path) -> None:
    """From now on nobody writes there."""
    flags = _MS_REMOUNT | _MS_RDONLY
    done = _libc.mount(b"none", os.fsencode(mount), b"tmpfs", flags, None)
    assert done == 0, os.strerror(ctypes.get_errno())


def detach(mount: Path) -> None:
    """Unmount it, though somebody uses it (umount -l)."""
    assert _libc.umount2(os.fsencode(mount), _MNT_DETACH) == 0, os.strerror(ctypes.get_errno())


def fill(mount: Path, name: str = "a neighbour's") -> Path:
    """Take every byte that is left; the file to remove again."""
    path = mount / name
    fs = os.statvfs(mount)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, fs.f_bavail * fs.f_frsize))
    assert os.statvfs(mount).f_bavail == 0
    return path
