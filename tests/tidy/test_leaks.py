"""The check that nothing is left behind sees what it is for."""

from __future__ import annotations

import mmap
import os
import subprocess
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


def test_an_open_memfd_and_its_mapping_are_seen() -> None:
    before = leaks.look()
    memory = os.memfd_create("kvd-test")
    os.truncate(memory, 4096)
    mapping = mmap.mmap(memory, 4096)
    assert leaks.look().since(before).keys() == {"descriptors", "mappings"}
    mapping.close()
    os.close(memory)
    assert leaks.look().since(before) == {}


def test_a_file_in_shared_memory_is_seen(shared_directory: Path) -> None:
    assert shared_directory.name in leaks.look().files
