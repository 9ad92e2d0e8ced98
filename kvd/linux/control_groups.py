"""Limits of this process's control groups, v1 or v2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvd.linux.proc import PROC, Mount, mounts

# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 1 << 62


def memory_limit(proc: Path = PROC) -> int | None:
    """Tightest memory limit of this process's cgroup and those above it, v1 or v2."""
    return _tightest("memory", ("memory.limit_in_bytes", "memory.max"), proc)


def huge_limit(page_bytes: int, proc: Path = PROC) -> int | None:
    """Tightest limit of this process's cgroup and those above it on huge pages of that size."""
    name = f"hugetlb.{_short_size(page_bytes)}"
    used = _tightest("hugetlb", (f"{name}.limit_in_bytes", f"{name}.max"), proc)
    asked = _tightest("hugetlb", (f"{name}.rsvd.limit_in_bytes", f"{name}.rsvd.max"), proc)
    return min((limit for limit in (used, asked) if limit is not None), default=None)


def _tightest(controller: str, names: tuple[str, str], proc: Path) -> int | None:
    """Lowest of a limit in this process's control groups. `names` of its file in v1 and v2."""
    paths: dict[str, str] = {}
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    limits: list[int] = []
    for mount in mounts(proc):
        if mount.fs_type == "cgroup" and controller not in mount.options.split(","):
            continue
        if mount.fs_type in paths:
            name = names[mount.fs_type == "cgroup2"]
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


def _short_size(count: int) -> str:
    """As control groups name sizes of huge pages: 64KB, 2MB, 1GB."""
    for shift, unit in ((30, "GB"), (20, "MB")):
        if count >= 1 << shift:
            return f"{count >> shift}{unit}"
    return f"{count >> 10}KB"
