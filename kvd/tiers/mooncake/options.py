"""The options of a Mooncake tier, as the configuration's table gives them."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvd.tiers.store import TierOptions, TierUnusable

MOST_CALLS = 64
MOST_REPLICAS = 16
MOST_RPC_SECONDS = 600.0
PROTOCOLS = ("tcp", "rdma")
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")
_SCHEME = re.compile(r"(?:etcd|redis|k8s)://")
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Where the cluster is, and how to talk to it.

    `master` is "host:port", or with high availability "etcd://host:port;host:port". `host` is this
    node's address as the others know it; "" takes the one by which the master is reached.
    """

    master: str
    host: str = ""
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    tenant: str = "default"
    replicas: int = 1
    calls: int = 4
    rpc_timeout_seconds: float = 4.0

    def __post_init__(self) -> None:
        places = _SCHEME.sub("", self.master).split(";")
        if not all(_is_place(place) for place in places):
            raise TierUnusable(
                f'master: {self.master!r} is neither "host:port" nor "etcd://host:port;host:port"'
            )
        if len(places) > 1 and not _SCHEME.match(self.master):
            raise TierUnusable('master: where there are several, "etcd://" stands before them')
        if self.protocol not in PROTOCOLS:
            raise TierUnusable(f"protocol: {self.protocol!r} is none of {', '.join(PROTOCOLS)}")
        if not _TENANT.fullmatch(self.tenant):
            raise TierUnusable(f"tenant: {self.tenant!r} is not 1 to 64 letters, digits, . _ -")
        for name, given, most in (
            ("replicas", self.replicas, MOST_REPLICAS),
            ("calls", self.calls, MOST_CALLS),
        ):
            if not 1 <= given <= most:
                raise TierUnusable(f"{name}: {given} is not 1..{most}")
        if not 0.1 <= self.rpc_timeout_seconds <= MOST_RPC_SECONDS:
            raise TierUnusable(
                f"rpc_timeout_seconds: {self.rpc_timeout_seconds} is not 0.1..{MOST_RPC_SECONDS:g}"
            )

    @classmethod
    def of(cls, options: TierOptions) -> MooncakeOptions:
        """Read a table. TierUnusable names the option that is wrong."""
        unknown = sorted(set(options) - set(_READERS))
        if unknown:
            known = ", ".join(sorted(_READERS))
            raise TierUnusable(f"{unknown[0]}: no such option; known: {known}")
        if "master" not in options:
            raise TierUnusable('master: is needed, such as "10.0.0.1:50051"')
        return cls(**{name: _READERS[name](name, given) for name, given in options.items()})

    def own_host(self) -> str:
        """This node's address."""
        if self.host:
            return self.host
        place = _SCHEME.sub("", self.master).split(";", maxsplit=1)[0]
        name, _, port = place.rpartition(":")
        try:
            found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            family, kind, number, _, address = found[0]
            with socket.socket(family, kind, number) as asking:
                asking.connect(address)  # sends nothing
                own: str = asking.getsockname()[0]
        except OSError as error:
            raise TierUnusable(f"master: {name} leads nowhere ({error}); set host too") from None
        return own


def _is_place(place: str) -> bool:
    match = _PLACE.fullmatch(place)
    return match is not None and 1 <= int(match[1]) <= 65535


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise TierUnusable(f"{name}: {given!r} is no text")
    return given


def _whole(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise TierUnusable(f"{name}: {given!r} is no whole number")
    return given


def _seconds(name: str, given: Any) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TierUnusable(f"{name}: {given!r} is no number")
    return float(given)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "master": _text,
    "host": _text,
    "metadata": _text,
    "protocol": _text,
    "devices": _text,
    "tenant": _text,
    "replicas": _whole,
    "calls": _whole,
    "rpc_timeout_seconds": _seconds,
}
