"""The options of an S3 tier, as the configuration's table gives them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from kvd.tiers.options import Reader, path, read_options, seconds, switch, text, whole
from kvd.tiers.store import OptionValue, TierOptions, TierUnusable

_URL = text(r"https?://[^\s/]+/?", '"https://host:port"')
_ENDPOINT = re.compile(
    r"https?://(?:\[(?P<v6>[^]%]*:[^]%]*)\]|(?P<v4>(?:\d+\.){3,}\d+)|[\w.-]+)"
    r"(?::(?P<port>[1-9]\d{0,4}))?/?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class S3Options:
    """Where the bucket is, and how to talk to it.

    `endpoint` "" is Amazon's of the region. Where no files with credentials are named, they come
    from the environment, or from the machine's role.
    """

    bucket: str
    endpoint: str = ""
    region: str = "us-east-1"
    prefix: str = "kvd"
    access_key_file: Path | None = None
    secret_key_file: Path | None = None
    session_token_file: Path | None = None
    ca_file: Path | None = None
    allow_http: bool = False
    virtual_hosted: bool = False
    conditional_put: bool = True
    threads: int = 16
    request_timeout_seconds: float = 4.0
    connect_timeout_seconds: float = 2.0
    retries: int = 0

    def __post_init__(self) -> None:
        if self.endpoint and not _has_host_and_port(self.endpoint):
            raise TierUnusable(
                f"endpoint: {self.endpoint!r} has no host (a name in ASCII, or an address), or no"
                " port from 1 to 65535 behind it, or has something else"
            )
        if (self.access_key_file is None) != (self.secret_key_file is None):
            raise TierUnusable("access_key_file: it and secret_key_file go together")
        if self.session_token_file is not None and self.access_key_file is None:
            raise TierUnusable(
                "session_token_file: it goes with the access_key_file and secret_key_file that are"
                " temporary"
            )
        if self.endpoint.startswith("http://") and not self.allow_http:
            raise TierUnusable(
                "endpoint: blocks would travel unencrypted; set allow_http true, or use https"
            )

    @classmethod
    def of(cls, options: TierOptions) -> S3Options:
        """Read a table. TierUnusable names the option that is wrong."""
        return cls(**read_options(options, _READERS, ["bucket"]))


def _has_host_and_port(endpoint: str) -> bool:
    """Whether the host is there, and the port too, if the endpoint names one, and nothing else."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"] or 1) > 65535:
        return False
    try:
        ipaddress.ip_address(found["v6"] or found["v4"] or "::")
    except ValueError:
        return False
    return True


def _endpoint(given: OptionValue) -> str:
    if isinstance(given, str) and "@" in given:  # it is not repeated: there may be a password
        raise TierUnusable(
            "endpoint: nobody signs in by it; name access_key_file and secret_key_file, and take"
            " away what ends in @"
        )
    endpoint: str = _URL(given)
    return endpoint


_READERS: dict[str, Reader] = {
    "bucket": text(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", "a bucket's name"),
    "endpoint": _endpoint,
    "region": text(r"[A-Za-z0-9-]{1,64}", "a region's name"),
    "prefix": text(
        r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,64}", "1 to 64 letters, digits, _ . -, and not . or .. alone"
    ),
    "access_key_file": path,
    "secret_key_file": path,
    "session_token_file": path,
    "ca_file": path,
    "allow_http": switch,
    "virtual_hosted": switch,
    "conditional_put": switch,
    "threads": whole(1, 256),
    "request_timeout_seconds": seconds(0.1, 600),
    "connect_timeout_seconds": seconds(0.1, 60),
    "retries": whole(0, 10),
}
