"""The gateway's connection to a daemon that is away or hangs."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from kvd.gateway import upstream
from kvd.gateway.upstream import NoDaemonError, Upstream
from tests.waiting import PATIENCE_SECONDS


def test_no_call_waits_for_anothers_attempt_to_reach_a_daemon_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 4 * PATIENCE_SECONDS)
    path = str(tmp_path / "kvd.sock")
    asked = Upstream(path)

    def call() -> None:
        with pytest.raises(NoDaemonError):
            asked.call("/service/method", b"", 1.0, ())

    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(f"{path}.companion")
        hanging.listen()
        hanging.settimeout(PATIENCE_SECONDS)
        calls = [threading.Thread(target=call) for _ in range(2)]
        for each in calls:
            each.start()
        attempts = [hanging.accept()[0] for _ in calls]
        for attempt in attempts:
            attempt.close()
        for each in calls:
            each.join()
    asked.close()
