"""Hosts on one machine: network namespaces on a bridge, each with an address of its own.

The namespace of the tests themselves is on the bridge too, at `address`: what serves the hosts
binds there.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

import pytest

_numbers = itertools.count()


class Host:
    """A namespace. What is started behind `command` runs there."""

    def __init__(self, namespace: str, address: str, link: str) -> None:
        self.namespace = namespace
        self.address = address
        self.link = link  # the bridge's end of its cable
        self.command = ("ip", "netns", "exec", namespace)

    def cut_off(self) -> None:
        """Pull the cable: packets vanish, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def join(self) -> None:
        _ip("link", "set", self.link, "up")


class Network:
    """A bridge and its hosts; all of it is gone at the end."""

    def __init__(self) -> None:
        self._bridge = f"kvd{os.getpid()}n{next(_numbers)}"  # of at most 15 letters
        place = os.getpid()
        self._net = f"10.{64 + place // 250 % 64}.{place % 250}"
        self.address = f"{self._net}.1"
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("only root, with iproute2, can make network namespaces")
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridge can be made: {error.stderr.decode().strip()}")
        _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for host in self._hosts:
            _ip("netns", "delete", host.namespace)  # its end of the cable goes with it
        _ip("link", "delete", self._bridge)

    def host(self) -> Host:
        """One more."""
        number = len(self._hosts)
        name = f"{self._bridge}h{number}"
        outer, inner = f"{self._bridge}o{number}"[-15:], f"{self._bridge}i{number}"[-15:]
        address = f"{self._net}.{2 + number}"
        _ip("netns", "add", name)
        host = Host(name, address, outer)
        self._hosts.append(host)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        _ip("link", "set", outer, "master", self._bridge, "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", inner)
        _ip("-n", name, "link", "set", inner, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return host


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)
