"""All threads of the daemon and of its movers take their memory from one heap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.scene import Scene

HEAP_BYTES = 64 << 20  # of a thread's heap glibc reserves so much, and makes little of it usable
TAKE = """
import ctypes, os, threading
from kvd.linux.calls import share_one_heap
said = share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(4)
def take():
    together.wait()  # all of them live at once, so none has another one's heap
    libc.malloc(4096)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
from tests.faults.test_one_heap import heaps_of_threads
print(said, heaps_of_threads(os.getpid()))
"""


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({}, "True"),
        ({"MALLOC_ARENA_MAX": "8"}, "False"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}, "False"),
    ],
)
def test_threads_share_a_heap_unless_somebody_chose_otherwise(
    chosen: dict[str, str], said: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in chosen} | chosen
    done = subprocess.run(
        [sys.executable, "-c", TAKE],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    shared, heaps = done.stdout.split()
    assert shared == said
    assert (int(heaps) == 0) == (said == "True"), "each thread had a heap of its own, or none had"


def test_a_daemon_at_work_and_its_movers_have_one_heap_each(scene: Scene) -> None:
    engine = scene.engine("one")
    for number in range(8):
        assert engine.store(f"prompt {number}", 4) == 4
        assert engine.load(f"prompt {number}", 4) == 4
    movers = scene.movers_of(engine)
    assert movers, "no mover is at work"
    for pid in (scene.daemon.pid, *movers):
        assert heaps_of_threads(pid) == 0, f"a thread of process {pid} has a heap of its own"


def heaps_of_threads(pid: int) -> int:
    """Heaps of a process besides the first: of each the rest of its reservation is closed."""
    found = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        first, end = (int(part, 16) for part in span.split("-"))
        found += rights == "---p" and end - first > HEAP_BYTES // 2 and end % HEAP_BYTES == 0
    return found
