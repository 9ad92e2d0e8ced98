"""What movers and tiers say in the daemon's log: much at first, and never silenced for good."""

from __future__ import annotations

import os
import time

import pytest

from kvd.processes import complaints
from kvd.processes.complaints import COMPLAINT_SECONDS, MAX_COMPLAINTS, log_limited


def test_a_process_complains_so_often_and_then_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(complaints, "_said", 0)
    monkeypatch.setattr(complaints, "_began", time.monotonic())
    monkeypatch.setattr(complaints, "_title", "mover")
    complaints.introduce("tier 3")
    for number in range(MAX_COMPLAINTS + 50):
        log_limited(f"number {number}")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == MAX_COMPLAINTS
    assert said[-1] == f"kvd tier 3 {os.getpid()}: number {MAX_COMPLAINTS - 1}"
    monkeypatch.setattr(complaints, "_began", time.monotonic() - 2 * COMPLAINT_SECONDS - 1)
    for _ in range(5):
        log_limited("again")
    assert len(capsys.readouterr().err.splitlines()) == 2
