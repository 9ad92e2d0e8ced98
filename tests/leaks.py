"""What a test may leave behind: processes, descriptors, mappings, shared-memory files.

All of it is the tests' own: whatever else runs on the machine, other tests too, is not seen.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
OURS_IN_SHARED_MEMORY = re.compile(r"kvd", re.IGNORECASE)
NEW_MOUNTS, PRIVATE_MOUNTS = 0x20000, 0x40000 | 0x4000  # CLONE_NEWNS; MS_PRIVATE | MS_REC
# Descriptors that only we open; libraries keep sockets, pipes and epolls of their own, and the
# CUDA driver memory files that last as long as the process: "/memfd:/.nvidia_drv.XXXXXX" once it
# is loaded, "/dev/shm/cuda.shm.*" where handles go between processes.
OUR_DESCRIPTORS = re.compile(
    r"^(/memfd:(?!/\.nvidia_)|/dev/shm/(?!cuda\.shm\.)|anon_inode:\[pidfd\]"
    r"|.*\.kv( \(deleted\))?$)"
)

kept: set[int] = set()
"""Processes that are to stay until this one ends."""


@dataclass(frozen=True)
class Left:
    """What there is at one moment; `-` on two of them says what came in between."""

    processes: frozenset[str]
    descriptors: frozenset[str]
    mappings: frozenset[str]
    files: frozenset[str]

    def since(self, before: Left) -> dict[str, list[str]]:
        """Whatever is here and was not before, by kind; empty when nothing is."""
        known = {title.split()[0] for title in before.processes}  # in whatever state by now
        new = {
            "processes": {title for title in self.processes if title.split()[0] not in known},
            "descriptors": self.descriptors - before.descriptors,
            "mappings": self.mappings - before.mappings,
            "shared-memory files": self.files - before.files,
        }
        return {kind: sorted(found) for kind, found in new.items() if found}


def look() -> Left:
    """Everything that this process and those below it hold now."""
    return Left(
        frozenset(child_processes()),
        frozenset(descriptors()),
        frozenset(mappings()),
        frozenset(shared_files()),
    )


def wait_until_clean(
    before: Left, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> dict[str, list[str]]:
    """What is still left after up to `seconds`: the ends of processes take a moment."""
    deadline = time.monotonic() + seconds
    left = look().since(before)
    while left and time.monotonic() < deadline:
        sleep(0.05)
        left = look().since(before)
    return left


def child_processes() -> set[str]:
    """Every process below this one, but for what is kept, as `pid name`, and `zombie` for one."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        name, _, rest = status.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        parents[int(folder.name)] = int(parent)
        # One that was there before may run at one look and sleep at the next.
        titles[int(folder.name)] = f"{folder.name} {name}" + (" zombie" if state == "Z" else "")
    below: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level} - below
        below |= level
    return {titles[pid] for pid in below - kept}


def descriptors() -> set[str]:
    """Open descriptors of the kinds that only we open, as `number target`."""
    found = set()
    for link in (PROC / "self" / "fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # the directory's own descriptor
            continue
        if OUR_DESCRIPTORS.match(target):
            found.add(f"{link.name} {target}")
    return found


def mappings() -> set[str]:
    """Mapped memfds and shared-memory files of this process, as `address target`."""
    found = set()
    for line in (PROC / "self" / "maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and OUR_DESCRIPTORS.match(fields[5]):
            found.add(f"{fields[0]} {fields[5]}")
    return found


def shared_files() -> set[str]:
    """Files of /dev/shm that are ours: in one of our own all that bear our name, else our pid."""
    if _has_own_shared_memory:
        pattern = OURS_IN_SHARED_MEMORY
    else:
        pattern = re.compile(rf"kvd.*\b{os.getpid()}\b", re.IGNORECASE)
    return {path.name for path in SHARED_MEMORY.iterdir() if pattern.search(path.name)}


_has_own_shared_memory = False


def take_own_shared_memory() -> bool:
    """Mount a /dev/shm that only this process and those that it starts see; False: we may not.

    It goes with the last of them, and with it what a killed run left there.
    """
    global _has_own_shared_memory
    libc = ctypes.CDLL(None, use_errno=True)
    _has_own_shared_memory = _has_own_shared_memory or (
        os.geteuid() == 0
        and libc.unshare(NEW_MOUNTS) == 0
        and libc.mount(b"none", b"/", None, PRIVATE_MOUNTS, None) == 0
        and libc.mount(b"tmpfs", str(SHARED_MEMORY).encode(), b"tmpfs", 0, b"mode=1777") == 0
    )
    return _has_own_shared_memory
