"""systemd's notification socket may be full when something is said that is not said again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.control.notify import notify


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Systemd's end, with as many messages as it takes."""
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(10)
        _fill(str(path))
        yield systemd


def _fill(path: str) -> None:
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as others, contextlib.suppress(BlockingIOError):
        for _ in range(10_000):
            others.sendto(b"WATCHDOG=1", path)


def heard(systemd: socket.socket, last: str) -> bool:
    """Whether this comes after all that was there."""
    return any(systemd.recv(4096).decode() == last for _ in range(10_000))


def test_what_is_said_once_waits_for_room(
    full: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    speaker = threading.Thread(target=notify, args=("READY=1", "STATUS=serving"))
    speaker.start()
    time.sleep(0.2)
    assert speaker.is_alive()
    assert heard(full, "READY=1\nSTATUS=serving")
    speaker.join(10)
    assert not speaker.is_alive()
    assert not caplog.text


@pytest.mark.usefixtures("full")
def test_one_that_nobody_reads_holds_no_daemon_up_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began = time.process_time()
    notify("STOPPING=1", room_s=0.5)
    assert time.process_time() - began < 0.2, "it must not look all the time"
    assert "does not take ('STOPPING=1',)" in caplog.text
    caplog.clear()
    notify("WATCHDOG=1", room_s=0)
    assert "does not take ('WATCHDOG=1',)" in caplog.text


def test_without_a_socket_and_with_one_that_is_gone_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert not caplog.text
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")
    assert "does not take ('READY=1',)" in caplog.text
