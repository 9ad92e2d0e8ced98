"""The options of a Mooncake tier, as the configuration's table gives them."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from kvd.tiers.options import Reader, read_options, seconds, text, whole
from kvd.tiers.store import TierOptions, TierUnusable

MOST_CALLS = 64
MOST_REPLICAS = 16
MOST_RPC_SECONDS = 600.0
PROTOCOLS = ("tcp", "rdma")
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")
_SCHEME = re.compile(r"(?:etcd|redis|k8s)://")


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
    calls: int = 5
    rpc_timeout_seconds: float = 4.0

    def __post_init__(self) -> None:
        places = _SCHEME.sub("", self.master).split(";")
        if not all(_is_place(place) for place in places):
            raise TierUnusable(
                f'master: {self.master!r} is neither "host:port" nor "etcd://host:port;host:port"'
            )
        if len(places) > 1 and not _SCHEME.match(self.master):
            raise TierUnusable('master: where there are several, "etcd://" stands before them')

    @classmethod
    def of(cls, options: TierOptions) -> MooncakeOptions:
        """Read a table. TierUnusable names the option that is wrong."""
        return cls(**read_options(options, _READERS, needed=("master",)))

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


_TEXT = text(r".*", "a text")
_READERS: dict[str, Reader] = {
    "master": _TEXT,
    "host": _TEXT,
    "metadata": _TEXT,
    "protocol": text("|".join(PROTOCOLS), f"one of {', '.join(PROTOCOLS)}"),
    "devices": _TEXT,
    "tenant": text(r"[A-Za-z0-9_.-]{1,64}", "1 to 64 letters, digits, . _ -"),
    "replicas": whole(1, MOST_REPLICAS),
    "calls": whole(1, MOST_CALLS),
    "rpc_timeout_seconds": seconds(0.1, MOST_RPC_SECONDS),
}
