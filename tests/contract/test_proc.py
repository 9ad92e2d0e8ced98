"""What /proc says is read whatever names others have given to what stands in it."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvd.linux.proc import count_own_descriptors, mapped_inodes, mounts, start_time_of, state_of
from tests.small_tmpfs import small_tmpfs

NAMES = [b"\xff", b"a\x0cb", b"\xe2\x80\xa8", b") R 1 1"]  # the third is a separator of lines


@pytest.mark.parametrize("name", NAMES)
def test_mounts_are_known_whatever_one_is_called(tmp_path: Path, name: bytes) -> None:
    before = {mount.point for mount in mounts()}
    with small_tmpfs(tmp_path / os.fsdecode(name), 1 << 20):
        [found] = {mount.point for mount in mounts()} - before
        assert os.fsencode(found).endswith(name.replace(b" ", b"\\040"))


def test_descriptors_are_counted_though_none_is_left_to_look_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 6.2, too, which does not tell the number as the size of the directory."""
    most, limit = 3, resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as old_kernel:
        old_kernel.setattr(Path, "stat", lambda _: SimpleNamespace(st_size=0))
        assert count_own_descriptors() >= most
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit[1]))
        try:
            assert count_own_descriptors() == most
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_process_maps_is_known_whatever_it_is_called(name: bytes) -> None:
    memory = os.memfd_create(os.fsdecode(name))
    try:
        os.truncate(memory, mmap.PAGESIZE)
        with mmap.mmap(memory, mmap.PAGESIZE):
            assert os.fstat(memory).st_ino in mapped_inodes(os.getpid())
    finally:
        os.close(memory)


@pytest.mark.parametrize("name", NAMES)
def test_a_process_is_known_whatever_it_is_called(name: bytes) -> None:
    renames = f"open('/proc/self/comm', 'wb').write({name!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", renames], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert state_of(child.pid) in {"S", "R"}
        assert start_time_of(child.pid)
        child.communicate(b"\n")
