"""Is there room for the pool? Asked before a byte is taken, since running out later kills.

A file system that is full turns the first touch of a page into SIGBUS, a memory limit turns it
into the OOM killer. Both are refused at start, with the figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvd.pool.config import PoolConfig, PoolError

PROC = Path("/proc")
# What control and a few movers take beside the pool; see the bars on PSS in the benchmarks.
PROCESS_BYTES = 256 << 20
# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    device: str
    root: str
    point: str
    fs_type: str
    options: str


@dataclass(frozen=True, slots=True)
class SpaceFigures:
    """What is there, in bytes. `held`: what the pool's own files take already."""

    filesystem_free: int
    held: int
    memory_available: int
    memory_limit: int | None


def mounts(proc: Path = PROC) -> Iterator[Mount]:
    """Mounts that this process sees."""
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, ending = left.split(), right.split()
        yield Mount(fields[2], fields[3], fields[4], ending[0], ending[-1])


def filesystem_type(directory: Path) -> str:
    """Type of the file system under a directory; "unknown" where the kernel doesn't tell."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((m.fs_type for m in mounts() if m.device == wanted), "unknown")


def memory_limit(proc: Path = PROC) -> int | None:
    """Tightest memory limit of this process's cgroup and those above it, v1 or v2."""
    paths: dict[str, str] = {}
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    limits: list[int] = []
    for mount in mounts(proc):
        if mount.fs_type == "cgroup" and "memory" not in mount.options.split(","):
            continue
        if mount.fs_type in paths:
            name = "memory.max" if mount.fs_type == "cgroup2" else "memory.limit_in_bytes"
            limits += _limits_upward(mount, paths[mount.fs_type], name)
    return min(limits, default=None)


def _limits_upward(mount: Mount, path: str, name: str) -> Iterator[int]:
    """Limits from the process's own group up to the mount's root."""
    point = Path(mount.point)
    # Where the container has no cgroup namespace of its own, `path` starts with the mount's root.
    inner = path.removeprefix(mount.root) if mount.root != "/" else path
    group = point / inner.strip("/")
    while True:
        try:
            text = (group / name).read_text().strip()
        except OSError:
            text = "max"  # not visible from here, or the root group
        if text != "max" and int(text) < _NO_LIMIT:
            yield int(text)
        if group == point:
            return
        group = group.parent


def memory_available(proc: Path = PROC) -> int:
    """MemAvailable in bytes."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PoolError("/proc/meminfo has no MemAvailable: kvd needs Linux 3.14 or newer")


def measure(directory: Path, held: int) -> SpaceFigures:
    """Figures for a pool in this directory whose files hold `held` bytes already."""
    fs = os.statvfs(directory)
    return SpaceFigures(fs.f_bavail * fs.f_frsize, held, memory_available(), memory_limit())


def require_space(config: PoolConfig, figures: SpaceFigures) -> None:
    """PoolError with the figures and the fix where the pool and its slot table don't fit."""
    need = config.extents * config.extent_bytes + config.table_bytes
    need_text = (
        f"the pool needs {_size(need)} ({_size(need - config.table_bytes)} of extents and up to"
        f" {_size(config.table_bytes)} of slot table)"
    )
    room = figures.filesystem_free + figures.held
    if room < need:
        raise PoolError(
            f"{need_text}, but the file system of {config.directory} has {_size(room)}"
            f" ({_size(figures.held)} of it held by the pool already): enlarge it"
            f" (mount -o remount,size={-(-need // (1 << 20))}m, or an emptyDir's sizeLimit)"
            " or lower the pool's size"
        )
    if figures.memory_limit is not None and figures.memory_limit < need + PROCESS_BYTES:
        raise PoolError(
            f"{need_text} and {_size(PROCESS_BYTES)} for its processes, but the memory limit of"
            f" this control group is {_size(figures.memory_limit)}: raise the limit (MemoryMax=,"
            " or resources.limits.memory) or lower the pool's size"
        )
    if figures.memory_available < need - figures.held:
        raise PoolError(
            f"{need_text}, of which it holds {_size(figures.held)}, but only"
            f" {_size(figures.memory_available)} of memory are available: free memory or lower"
            " the pool's size"
        )


def require_tmpfs(config: PoolConfig) -> None:
    """PoolError where the directory isn't in memory, unless the operator allowed it."""
    fs_type = filesystem_type(config.directory)
    if fs_type != "tmpfs" and not config.any_filesystem:
        raise PoolError(
            f"{config.directory} is on {fs_type}, not on tmpfs: the pool would go through a disk."
            " Give it a directory on a tmpfs (huge=within_size for huge pages), or allow any file"
            " system explicitly"
        )


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
