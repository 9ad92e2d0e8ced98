"""The NUMA node that a GPU hangs on, as sysfs says it, and keeping a process there.

Copies cross no socket, and staging and page tables lie near, when a mover runs where its GPU is.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvd.core.keys import NODE_UNKNOWN
from kvd.linux.proc import numbers_of

SYSFS = Path("/sys")


def node_of(pci_bus_id: str, sysfs: Path = SYSFS) -> int:
    """The NUMA node of a PCI device; NODE_UNKNOWN where the machine doesn't say."""
    domain, _, place = pci_bus_id.lower().partition(":")
    try:
        # The driver's tools write the domain with up to 8 digits, sysfs with 4 where that will do.
        device = f"{int(domain, 16):04x}:{place}"
        node = int((sysfs / "bus/pci/devices" / device / "numa_node").read_text())
    except (OSError, ValueError):
        return NODE_UNKNOWN
    return node if node >= 0 else NODE_UNKNOWN


def online_nodes(sysfs: Path = SYSFS) -> frozenset[int]:
    """Numbers of the machine's NUMA nodes; empty where it doesn't say."""
    return _numbers_in(sysfs / "devices/system/node/online")


def cpus_of(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """The node's processors; empty where the machine doesn't say."""
    return _numbers_in(sysfs / f"devices/system/node/node{node}/cpulist")


def bind_to(node: int, sysfs: Path = SYSFS) -> bool:
    """Keep this thread, and those that it starts, on the node's processors.

    False, with nothing changed: there is one node only, the node is not known, or this process
    may run on none of its processors.
    """
    if node == NODE_UNKNOWN or len(online_nodes(sysfs)) < 2:
        return False
    allowed = os.sched_getaffinity(0) & cpus_of(node, sysfs)
    if not allowed:
        return False
    os.sched_setaffinity(0, allowed)
    return True


def _numbers_in(path: Path) -> frozenset[int]:
    try:
        return numbers_of(path.read_text())
    except (OSError, ValueError):
        return frozenset()
