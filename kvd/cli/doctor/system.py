"""What the doctor reads of the machine: figures that no setting says."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import kvd
from kvd import native
from kvd.linux import limits

OWN_VERSION = kvd.__version__


@dataclass(frozen=True, slots=True)
class System:
    """This machine. Limits of -1 are none."""

    processor: str
    kernel: tuple[int, int]
    descriptors: int
    locked_bytes: int
    node_bytes: tuple[int, ...]  # memory of each NUMA node
    processors_allowed: float | None  # by the control group's quota; None: no quota
    gpus: tuple[str, ...]  # device files
    gpus_closed: tuple[str, ...]  # of those, not to be opened by this user
    has_gpu_driver: bool  # the kernel's
    cuda_problem: str  # why libcuda can't be loaded; "" where it can
    has_cupy: bool
    native_problem: str
    client_version: str | None

    @classmethod
    def read(cls, daemon_pid: int | None = None, root: Path = Path("/")) -> System:
        """As it is now; the limits are the daemon's where its process can be seen."""
        descriptors, locked = limits.limits_of(daemon_pid, root / "proc")
        gpus = sorted(str(path) for path in (root / "dev").glob("nvidia[0-9]*"))
        return cls(
            processor=platform.machine(),
            kernel=limits.kernel_release(platform.release()),
            descriptors=descriptors,
            locked_bytes=locked,
            node_bytes=limits.node_bytes(root / "sys/devices/system/node"),
            processors_allowed=limits.processor_quota(root / "sys/fs/cgroup/cpu.max"),
            gpus=tuple(gpus),
            gpus_closed=tuple(gpu for gpu in gpus if not os.access(gpu, os.R_OK | os.W_OK)),
            has_gpu_driver=(root / "proc/driver/nvidia/version").exists(),
            cuda_problem=limits.why_not_loaded("libcuda.so.1") if gpus else "",
            has_cupy=importlib.util.find_spec("cupy") is not None,
            native_problem=native.why_not(),
            client_version=_version_of("kvd-client"),
        )


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
