"""What systemd is told: ready, still starting, alive, stopping (sd_notify(3), by hand)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(*lines: str) -> None:
    """Send lines such as READY=1 to NOTIFY_SOCKET; nothing where there is none. Never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as sender:
        try:
            sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("systemd's notification socket does not take %s: %s", lines, error)


def watchdog_seconds() -> float:
    """How often systemd wants a sign of life; 0 = it wants none of this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    with contextlib.suppress(ValueError):
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    return 0.0


async def feed_watchdog() -> None:
    """Say WATCHDOG=1 at half the wanted period, from the loop whose life it proves."""
    period = watchdog_seconds()
    while period > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(period / 2)
