"""The options of a Valkey tier, as the configuration's table gives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvd.tiers.options import (
    Reader,
    path,
    read_options,
    seconds,
    size,
    switch,
    text,
    texts,
    whole,
)
from kvd.tiers.store import TierOptions, TierUnusable

_ADDRESS = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):\d{1,5}"
_YEAR = 366 * 86400.0


@dataclass(frozen=True, slots=True)
class ValkeyOptions:
    """Where the servers are, and how to talk to them.

    `addresses` are of some servers of a cluster, which name the others, or of a single server.
    A value has at most `value_bytes`; a longer block takes several.
    """

    addresses: tuple[str, ...]
    prefix: str = "kvd"
    ttl_seconds: float = 0.0  # 0: until the server makes room
    threads: int = 3
    value_bytes: int = 4 << 20
    request_timeout_seconds: float = 1.0
    connect_timeout_seconds: float = 1.0
    username: str = ""
    password_file: Path | None = None
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            if not 1 <= int(address.rpartition(":")[2]) <= 65535:
                raise TierUnusable(f"addresses: {address!r} has no port from 1 to 65535")
        if self.username and self.password_file is None:
            raise TierUnusable("password_file: is needed with username")
        if (self.cert_file is None) != (self.key_file is None):
            raise TierUnusable("cert_file: it and key_file go together")
        if not self.tls and (self.ca_file or self.cert_file):
            raise TierUnusable("tls: must be true where ca_file or cert_file is given")

    @classmethod
    def of(cls, options: TierOptions) -> ValkeyOptions:
        """Read a table. TierUnusable names the option that is wrong."""
        return cls(**read_options(options, _READERS, ["addresses"]))


_READERS: dict[str, Reader] = {
    "addresses": texts(_ADDRESS, '"host:port"'),
    # It stands in names and in patterns that are matched with them.
    "prefix": text(r"[A-Za-z0-9_.-]{1,64}", "1 to 64 letters, digits, _ . -"),
    "ttl_seconds": seconds(0, _YEAR),
    "threads": whole(1, 64),
    "value_bytes": size(64 << 10, 256 << 20),
    "request_timeout_seconds": seconds(0.05, 60),
    "connect_timeout_seconds": seconds(0.05, 60),
    "username": text(r"\S{1,256}", "a name without spaces"),
    "password_file": path,
    "tls": switch,
    "ca_file": path,
    "cert_file": path,
    "key_file": path,
}
