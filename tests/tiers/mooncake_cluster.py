"""Real clusters for the tests of the Mooncake tier, each on ports of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from examples.cluster.mooncake import MooncakeCluster, free_port
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import OptionValue, TierOptions

LEASE_MS = 2000


@contextlib.contextmanager
def mooncake_cluster(
    logs: Path, *, megabytes: int = 64, nodes: int = 1
) -> Iterator[MooncakeCluster]:
    """A master that gives up its dead within 2 s, and nodes."""
    cluster = MooncakeCluster(
        logs, free_port(), free_port(), node_bytes=megabytes << 20, dead_s=2, lease_ms=LEASE_MS
    )
    try:
        cluster.start_master()
        for _ in range(nodes):
            cluster.start_node()
        yield cluster
    finally:
        cluster.end()


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Returns when nothing of it runs any more."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def options_of(cluster: MooncakeCluster, **others: OptionValue) -> dict[str, OptionValue]:
    return {"master": cluster.address, "rpc_timeout_seconds": 1.0, **others}


def opened(cluster: MooncakeCluster, **others: OptionValue) -> MooncakeStore:
    return MooncakeStore(options_of(cluster, **others))


def open_from_rig(options: TierOptions) -> MooncakeStore:
    """What a TierRig starts: it gives an option of its own to all stores."""
    return MooncakeStore({name: given for name, given in options.items() if name != "signs"})
