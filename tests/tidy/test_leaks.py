"""The check that nothing is left behind sees what it is for."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


BESIDE = """
import sys
from pathlib import Path
import pytest

from tests import leaks
assert leaks.take_own_shared_memory()
Path(leaks.SHARED_MEMORY, "kvd-test-leaked").touch()
print(*leaks.look().files, flush=True)
sys.stdin.read()
"""


def beside(code: str) -> subprocess.Popen[str]:
    """Another process that runs tests beside these."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a /dev/shm of its own")
def test_other_runs_of_the_tests_are_not_seen() -> None:
    before = leaks.look().files
    with beside(BESIDE) as one, beside(BESIDE) as another:
        for each in (one, another):
            assert each.stdout is not None
            assert each.stdout.readline() == "kvd-test-leaked\n"
        assert leaks.look().files == before


def test_without_a_shared_memory_of_ones_own_names_tell_whose_a_file_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leaks, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(leaks, "_has_own_shared_memory", False)
    for name in (f"kvd-test-{os.getpid()}-a", f"kvd-test-{os.getpid()}1-b", "kvd-demo.c", "other"):
        (tmp_path / name).touch()
    assert leaks.look().files == {f"kvd-test-{os.getpid()}-a"}
    monkeypatch.setattr(leaks, "_has_own_shared_memory", True)
    assert len(leaks.look().files) == 3
