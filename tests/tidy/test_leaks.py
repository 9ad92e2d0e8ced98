"""The check that nothing is left behind sees what it is for."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import time
from pathlib import Path

from tests import leaks


def test_a_process_left_running_is_seen() -> None:
    before = leaks.look()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        left = leaks.look().since(before)
        assert [entry.split()[0] for entry in left["processes"]] == [str(sleeper.pid)]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert leaks.wait_until_clean(before, seconds=5.0) == {}


def test_a_process_that_was_there_before_may_be_in_another_state() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        wait_for_state(sleeper.pid, "S")
        before = leaks.look()
        sleeper.send_signal(signal.SIGSTOP)
        wait_for_state(sleeper.pid, "T")
        assert leaks.look().since(before) == {}
        sleeper.kill()


def wait_for_state(pid: int, state: str) -> None:
    """Returns once the process is in a state, by the kernel's letter for it."""
    while (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


def test_an_open_memfd_and_its_mapping_are_seen() -> None:
    before = leaks.look()
    memory = os.memfd_create("kvd-test")
    os.truncate(memory, 4096)
    mapping = mmap.mmap(memory, 4096)
    assert leaks.look().since(before).keys() == {"descriptors", "mappings"}
    mapping.close()
    os.close(memory)
    assert leaks.look().since(before) == {}


def test_what_a_cuda_driver_maps_for_good_is_not_ours() -> None:
    before = leaks.look()
    memory = os.memfd_create("/.nvidia_drv.XXXXXX")
    os.truncate(memory, 4096)
    mapping = mmap.mmap(memory, 4096)
    shared = Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1")
    with shared.open("w"):
        assert leaks.look().since(before) == {}
    shared.unlink()
    mapping.close()
    os.close(memory)


def test_a_file_in_shared_memory_is_seen(shared_directory: Path) -> None:
    assert shared_directory.name in leaks.look().files
