"""What the machine and its control groups let a process have, for whoever explains it."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

from kvd.linux.proc import PROC

_KERNEL = re.compile(r"(\d+)\.(\d+)")
_NODE = re.compile(r"node\d+")
_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")
_LIMIT = re.compile(r"^Max ([a-z ]+?)\s{2,}(\S+)\s+\S+", re.MULTILINE)
NODES = Path("/sys/devices/system/node")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def kernel_release(text: str) -> tuple[int, int]:
    """6.1.0-18-amd64 as (6, 1)."""
    found = _KERNEL.match(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def limits_of(pid: int | None, proc: Path = PROC) -> tuple[int, int]:
    """File descriptors and locked bytes of a process; our own where that can't be seen. -1: any."""
    found = {
        name: -1 if soft == "unlimited" else int(soft)
        for name, soft in _LIMIT.findall(_text(proc / str(pid or "self") / "limits"))
    }
    return (
        found.get("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        found.get("locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
    )


def most_file_bytes() -> int | None:
    """Bytes that a file which this process writes may have; None: any."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def have_at_most(more_bytes: int) -> None:
    """Let this process take so much more memory of its own than it has; what it shares is not
    counted. An allocation beyond it fails, whoever makes it."""
    pages = int((PROC / "self" / "statm").read_text().split()[5])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = pages * resource.getpagesize() + more_bytes
    given = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([most, *given]), hard))


def node_bytes(folder: Path = NODES) -> tuple[int, ...]:
    """Memory of each NUMA node that has some."""
    nodes = sorted(node for node in folder.glob("node*") if _NODE.fullmatch(node.name))
    totals = (_TOTAL.search(_text(node / "meminfo")) for node in nodes)
    return tuple(int(total[1]) << 10 for total in totals if total and int(total[1]))


def processor_quota(file: Path = QUOTA) -> float | None:
    """Processors that this control group may use; None: as many as there are."""
    quota, _, period = _text(file).strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def why_not_loaded(library: str) -> str:
    """Why a library can't be loaded; "" where it can."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
