"""A Mooncake Store on the loopback: its master, and nodes that lend memory."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"
START_S = 30.0
_SEGMENT = "segment_total_capacity_bytes{"


class ClusterError(Exception):
    """The cluster can't be had; the message says what to change."""


@dataclass(slots=True)
class MooncakeCluster:
    """The processes of one cluster, and what they are told. Their words go to files in `logs`.

    `node_bytes` is what each node lends. A node that said nothing for `dead_s` is given up; what
    was just read or looked for stays for `lease_ms`, whatever needs room.
    """

    logs: Path
    rpc_port: int
    metrics_port: int
    node_bytes: int = 1 << 30
    dead_s: int = 10
    lease_ms: int = 10_000
    host: str = HOST  # where all of them listen
    master: subprocess.Popen[bytes] | None = None
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """What the option `master` of a tier is to say."""
        return f"{self.host}:{self.rpc_port}"

    def start_master(self) -> subprocess.Popen[bytes]:
        """Returns when it answers. ClusterError where it does not."""
        for port in (self.rpc_port, self.metrics_port):
            # Two masters would share it, and each know half of the blocks.
            if _answers(self.host, port):
                raise ClusterError(f"port {port} is taken; another can be named")
        self.master = self._start(
            "mooncake_master",
            f"--rpc_address={self.host}",
            f"--rpc_port={self.rpc_port}",
            f"--metrics_host={self.host}",
            f"--metrics_port={self.metrics_port}",
            f"--client_ttl={self.dead_s}",
            f"--default_kv_lease_ttl={self.lease_ms}",
        )
        self._wait_for(self.master, lambda: _answers(self.host, self.rpc_port), "the master")
        return self.master

    def start_node(self) -> subprocess.Popen[bytes]:
        """Returns when its memory can be used. ClusterError where it can't."""
        before = self._segments()
        node = self._start(
            "mooncake_client",
            f"--host={self.host}",
            f"--port={free_port()}",
            f"--global_segment_size={self.node_bytes // (1 << 20)} MB",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
        )
        self.nodes.append(node)
        # Not by what all lend: one that is dead may be given up meanwhile.
        self._wait_for(node, lambda: not self._segments() <= before, "the node")
        return node

    def capacity_bytes(self) -> int:
        """What all nodes lend, as the master knows it; 0 where it does not answer."""
        return self.figure("master_total_capacity_bytes")

    def figure(self, name: str) -> int:
        """One of the master's figures; 0 where it does not answer."""
        found = (line.split() for line in self._figures() if line.startswith(name + " "))
        return next((int(float(value)) for _, value in found), 0)

    def _segments(self) -> set[str]:
        """Names of what nodes lend, of which the master knows now."""
        named = (line.rpartition(" ") for line in self._figures() if line.startswith(_SEGMENT))
        return {name for name, _, value in named if float(value)}

    def _figures(self) -> list[str]:
        """The master's, a line each; none where it does not answer."""
        url = f"http://{self.host}:{self.metrics_port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                said: bytes = answer.read()
        except OSError:
            return []
        return said.decode().splitlines()

    def end(self) -> None:
        """End all of them, frozen ones too."""
        for process in (*self.nodes, *([self.master] if self.master else [])):
            end(process)
        self.master, self.nodes = None, []

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                [str(program_path(program)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt of make's is not for them
            )

    def _wait_for(
        self, process: subprocess.Popen[bytes], is_ready: Callable[[], bool], title: str
    ) -> None:
        end_s = time.monotonic() + START_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() >= end_s:
                self.end()
                raise ClusterError(f"{title} does not start; it says why in {self.logs}")
            time.sleep(0.05)


def program_path(program: str) -> Path:
    """Where Mooncake's wheel has a program. ClusterError where it is not installed."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        raise ClusterError("Mooncake is not installed: pip install -e ./client -e '.[mooncake]'")
    return Path(found.submodule_search_locations[0]) / program


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, also one that is frozen; returns when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
