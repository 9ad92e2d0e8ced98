"""`python -m examples.cluster up` starts a Mooncake Store on the loopback, `down` ends it.

`up` a second time says what runs. Nothing of it is for production: one master, no second copy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.cluster.mooncake import ClusterError, MooncakeCluster
from kvd.linux.proc import start_time_of, state_of

DIRECTORY = Path(".cache") / "cluster"
STATE = DIRECTORY / "mooncake.json"
RPC_PORT, METRICS_PORT = 50051, 9003
END_S = 10.0
TIER = """
  [[tiers]]
  name = "cluster"
  kind = "mooncake"
  options = {{master = "{master}"}}
"""


def up(options: argparse.Namespace) -> int:
    """Start what is not running, and say how a daemon uses it."""
    running = _running()
    if running is not None:
        print(f"a Mooncake Store runs at {running['master']}")
    else:
        cluster = MooncakeCluster(
            DIRECTORY.absolute(),
            options.port,
            options.metrics_port,
            node_bytes=options.megabytes << 20,
        )
        try:
            print("starting the master ...", flush=True)
            master = cluster.start_master()
            print(f"starting a node of {options.megabytes} MiB ...", flush=True)
            pids = [master.pid, cluster.start_node().pid]
        except ClusterError as error:
            cluster.end()
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # `down` would not know of them
            cluster.end()
            print("interrupted; what was started has ended", file=sys.stderr)
            return 130
        processes = [[pid, start_time_of(pid)] for pid in pids]
        running = {"master": cluster.address, "processes": processes}
        STATE.write_text(json.dumps(running))
        print(f"a Mooncake Store runs at {cluster.address}; its logs are in {DIRECTORY}")
    print("A daemon keeps blocks there with this in its configuration file:")
    print(TIER.format(master=running["master"]))
    print("`make cluster-down` ends it, and what it holds is gone.")
    return 0


def down() -> int:
    """End what `up` started, and nothing else."""
    running = _running()
    if running is None:
        print("no Mooncake Store of `make cluster-up` runs")
    else:
        for pid, started in reversed(running["processes"]):
            _end(pid, started)
        print("the Mooncake Store has ended")
    STATE.unlink(missing_ok=True)
    return 0


def _running() -> dict[str, Any] | None:
    """What the last `up` started, while all of it runs; else it is ended and forgotten."""
    try:
        state: dict[str, Any] = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return None
    processes = state["processes"]
    if all(_is_running(pid, started) for pid, started in processes):
        return state
    for pid, started in processes:
        _end(pid, started)
    STATE.unlink()
    return None


def _is_running(pid: int, started: int) -> bool:
    return start_time_of(pid) == started and state_of(pid) != "Z"


def _end(pid: int, started: int) -> None:
    end_s = time.monotonic() + END_S
    while _is_running(pid, started) and time.monotonic() < end_s:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _number(greatest: int) -> Callable[[str], int]:
    """Reads a flag's whole number, from 1 on."""

    def read(word: str) -> int:
        if not word.isdecimal() or not 1 <= int(word) <= greatest:
            raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 to {greatest}")
        return int(word)

    return read


def main() -> int:
    """Do what the command line says."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m examples.cluster", description=__doc__)
    port = _number(65535)
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument(
        "--megabytes", type=_number(1 << 30), default=1024, help="that the node lends (1024)"
    )
    parser.add_argument("--port", type=port, default=RPC_PORT, help=f"of the master ({RPC_PORT})")
    parser.add_argument("--metrics-port", type=port, default=METRICS_PORT, help=f"({METRICS_PORT})")
    options = parser.parse_args()
    return down() if options.what == "down" else up(options)


if __name__ == "__main__":
    sys.exit(main())
