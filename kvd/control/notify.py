"""What systemd is told: ready, still starting, alive, stopping (sd_notify(3), by hand)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

log = logging.getLogger(__name__)


ROOM_SECONDS = 1.0  # for a socket that is full: systemd reads it when it comes to it


def notify(*lines: str, room_s: float = ROOM_SECONDS) -> None:
    """Send lines such as READY=1 to NOTIFY_SOCKET; nothing where there is none. Never raises.

    Waits for room there, for no longer than said: a message that got lost would not be sent again.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(room_s)
        try:
            sender.connect(address)  # else Linux does not tell when there is room
            sender.send("\n".join(lines).encode())
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
        notify("WATCHDOG=1", room_s=0)  # the next one will do
        await asyncio.sleep(period / 2)
