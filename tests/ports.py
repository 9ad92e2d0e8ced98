"""Ports for tests whose servers must be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_dice = random.SystemRandom()  # no seed makes two processes draw alike


def free_port() -> int:
    """A port of the loopback address that nobody listens on now.

    Nor does the kernel give it to anybody who asks for any port, before its server listens.
    """
    end = int(_EPHEMERAL.read_text().split()[0])
    while True:
        port = _dice.randrange(FIRST, end) if end > FIRST else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            bound: int = probe.getsockname()[1]
            return bound
