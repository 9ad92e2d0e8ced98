"""What movers and tiers say in the daemon's log: much at first, and never silenced for good."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvd.processes import complaints
from kvd.processes.complaints import COMPLAINT_SECONDS, MAX_COMPLAINTS, log_limited


def test_a_process_complains_so_often_and_then_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(complaints, "_said", 0)
    monkeypatch.setattr(complaints, "_began", time.monotonic())
    monkeypatch.setattr(complaints, "_title", "mover")
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
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


SAYS_LITTLE = """
import logging, os
from kvd.processes.child import bind_life_to
from kvd.processes.complaints import introduce, log_limited
bind_life_to(os.getppid())
introduce("tier disk")
log_limited("its place is gone\\nfor good")
logging.getLogger("store").warning("its index is %s", "full")
logging.getLogger("store").info("all is well")
"""


def test_the_journal_takes_what_a_process_complains_of_for_warnings(tmp_path: Path) -> None:
    """`journalctl -p warning` leaves out what has no priority."""
    with (tmp_path / "log").open("wb") as log:
        status = os.fstat(log.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        command = [sys.executable, "-c", SAYS_LITTLE]
        subprocess.run(command, check=True, stderr=log, env=environment)
    first, second, third = (tmp_path / "log").read_text().splitlines()
    assert first.startswith("<4>kvd tier disk ")
    assert first.endswith(": its place is gone")
    assert second == "<4>for good"
    assert third.startswith("<4>kvd tier disk ")  # of a store's own `logging`
    assert third.endswith(": its index is full")


SAYS_MUCH = """
import logging, os, threading
from kvd.processes.child import bind_life_to
from kvd.processes.complaints import log_limited
bind_life_to(os.getppid())
def say():
    for number in range(2000):
        log_limited("x" * 1000)
        logging.getLogger("store").warning("y" * 1000)
threads = [threading.Thread(target=say) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(7)
"""


@pytest.mark.parametrize("log", ["a pipe that nobody reads", "a pipe without an end", "/dev/full"])
def test_a_log_without_room_neither_holds_a_process_up_nor_ends_it(log: str) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb") as pipe:
        if log == "a pipe without an end":
            reader.close()
        with Path(log).open("wb") if log == "/dev/full" else pipe as stream:
            child = subprocess.run(
                [sys.executable, "-c", SAYS_MUCH], stderr=stream, timeout=30, check=False
            )
    assert child.returncode == 7
