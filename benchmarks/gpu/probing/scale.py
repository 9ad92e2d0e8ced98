"""How large the probe measures: as on a real device, or tiny, to try the probe itself."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Scale:
    """Sizes in bytes, and how often a figure is taken."""

    handle: int = 64 * MIB  # an allocation whose handle is opened
    held: int = 8 * GIB  # one whose freeing is timed
    registered: int = 4 * GIB  # of host memory
    copied: int = 256 * MIB  # by one measured copy
    copied_small: int = 64 * MIB  # in fragments under 64 KiB
    product: int = 8192  # width of the engine's matrices
    phase_seconds: float = 0.25  # of one phase beside the engine
    rounds: int = 8
    repeats: int = 5
    deaths: int = 3
    wakes: int = 200
    fragments: tuple[int, ...] = (
        4 * KIB,
        8 * KIB,
        16 * KIB,
        32 * KIB,
        64 * KIB,
        256 * KIB,
        2 * MIB,
    )
    mounts: bool = True  # file systems of huge pages, as root
    torch: bool = True  # which takes seconds to import

    def fitted(self, free_bytes: int) -> Scale:
        """The same, within half of the device's free memory and a quarter of the host's."""
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4
        shared = shutil.disk_usage("/dev/shm").free // 4
        held = min(self.held, free_bytes // 2 // MIB * MIB)
        registered = min(self.registered, min(host, shared) // GIB * GIB or 64 * MIB)
        return replace(self, held=held, registered=registered)


TINY = Scale(
    handle=2 * MIB,
    held=8 * MIB,
    registered=4 * MIB,
    copied=4 * MIB,
    copied_small=2 * MIB,
    product=64,
    phase_seconds=0.01,
    rounds=1,
    repeats=1,
    deaths=1,
    wakes=3,
    fragments=(8 * KIB, 2 * MIB),
    mounts=False,
    torch=False,
)
