"""What a line of the daemon's log says beside its message: whom it is about, and its priority."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from kvd.linux.standard_streams import goes_to_journal
from kvd.observability.logs import (
    JournalFormatter,
    JsonFormatter,
    PromptHandler,
    TextFormatter,
)
from tests.control.daemon_rig import RawEngine, identity
from tests.control.running_daemon import RunningDaemon, daemon
from tests.small_tmpfs import small_tmpfs

LEVELS = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def lines_of(running: RunningDaemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in running.log.read_text().splitlines()]


def test_lines_about_a_session_and_a_rank_name_them_in_json() -> None:
    with daemon("--log-format", "json") as running:
        engine = RawEngine(running.socket, identity=identity("some-engine"))
        number = engine.scheduler.opened.session_id
        engine.close()
        running.stop()
        said = lines_of(running)
    opened, *ends = [line for line in said if line.get("session") == number]
    assert "namespace" in opened["message"]
    assert ends, "its end is about it, too"
    for line in (opened, *ends):
        assert (line["engine"], line["tenant"]) == ("some-engine", "default")
        assert (line["user"], line["namespace"]) == (0, 1)
    ranks = [
        line["rank"] for line in said if line.get("engine") == "some-engine" and "rank" in line
    ]
    assert ranks
    assert set(ranks) == {0}
    assert all("session" not in line for line in said if "serves on" in line["message"])


def test_the_journal_gets_a_priority_in_front_of_each_line(tmp_path: Path) -> None:
    running = RunningDaemon()
    try:
        running.log.touch()
        status = running.log.stat()
        running.environment = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        running.start()
        running.stop()
        lines = running.log.read_text().splitlines()
    finally:
        running.remove()
    assert lines
    for line in lines:
        level = line.split()[1]
        assert line.startswith(f"<{LEVELS[level]}>20"), line


def test_nobody_else_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as log:
        assert not goes_to_journal(log)
        monkeypatch.setenv("JOURNAL_STREAM", "1:2")
        assert not goes_to_journal(log)
        assert not goes_to_journal(StringIO())


@pytest.mark.parametrize("level", LEVELS)
def test_every_line_of_a_record_has_its_priority(level: str) -> None:
    record = logging.LogRecord("kvd", getattr(logging, level), "", 1, "one\ntwo", (), None)
    lines = JournalFormatter(TextFormatter()).format(record).split("\n")
    assert len(lines) == 2
    assert all(line.startswith(f"<{LEVELS[level]}>") for line in lines)


@pytest.mark.parametrize("name", ["\x9b31m", "\u2028", "\udc80", "\x1b[2J", "é"])
def test_what_a_name_holds_reaches_no_terminal_by_json(name: str) -> None:
    record = logging.LogRecord("kvd", logging.INFO, "", 1, "tenant %s", (name,), None)
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert line.isascii()
    assert json.loads(line)["message"] == f"tenant {name}"


def test_a_log_that_nobody_reads_holds_nobody_up_and_tells_what_it_lacks() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading, "rb") as reader:  # noqa: PTH123 - descriptors
        handler = PromptHandler(stream)
        handler.setFormatter(TextFormatter())

        def say(message: str) -> None:
            handler.emit(logging.LogRecord("test", logging.INFO, "", 0, message, None, None))

        for number in range(1000):
            say(f"line {number} {'x' * 1000}")
        os.set_blocking(reading, False)
        first = reader.read().decode().splitlines()
        assert 10 < len(first) < 1000
        say("read again")
        rest = reader.read().decode().splitlines()
        assert f"{1000 - len(first)} lines were left out" in rest[-2]
        assert rest[-1].endswith("read again")
        say("the next")
        assert "left out" not in reader.read().decode()


def test_a_log_on_a_full_disk_tells_what_it_lacks(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", 64 * 1024) as disk, (disk / "log").open("w") as stream:
        handler = PromptHandler(stream)
        handler.setFormatter(JsonFormatter())

        def say(message: str) -> None:
            handler.emit(logging.LogRecord("test", logging.INFO, "", 0, message, None, None))

        (disk / "others").write_bytes(bytes(32 * 1024))
        for number in range(100):  # the last that has room is cut
            say(f"line {number} {'x' * 1000}")
        (disk / "others").unlink()
        say("room again")
        *whole, cut, told, last = (disk / "log").read_text().splitlines()
        assert len(whole) > 10
        with pytest.raises(json.JSONDecodeError):
            json.loads(cut)
        assert f"{100 - len(whole)} lines were left out" in json.loads(told)["message"]
        assert json.loads(last)["message"] == "room again"


def test_a_terminal_that_stands_still_holds_nobody_up() -> None:
    reading, writing = os.openpty()
    with open(writing, "w") as stream:  # noqa: PTH123 - a descriptor
        handler = PromptHandler(stream)
        handler.setFormatter(TextFormatter())

        def say_much() -> None:
            """Lines of many lengths: for the last one there is some room, and not enough."""
            for number in range(1000):
                message = f"line {number} {'x' * (37 * (number % 50))}"
                handler.emit(logging.LogRecord("test", logging.INFO, "", 0, message, None, None))

        saying = threading.Thread(target=say_much, daemon=True)
        saying.start()
        saying.join(10)
        is_held_up = saying.is_alive()
        os.close(reading)  # whoever waits there gets an error
        saying.join()
        handler.close()
    assert not is_held_up


CUT_SHORT = """
import mmap, os, tempfile
from kvd.observability import logs
logs.start("info", "text")
logs.tell_of_faults()
with tempfile.TemporaryFile() as file:
    os.truncate(file.fileno(), 1 << 20)
    table = mmap.mmap(file.fileno(), 1 << 20)
    os.truncate(file.fileno(), 0)
    table[0]
"""


@pytest.mark.parametrize("is_full", [False, True])
def test_a_file_that_was_cut_short_ends_the_process_with_its_line_in_the_log(is_full: bool) -> None:
    reader, writer = os.pipe()
    if is_full:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
    script = [sys.executable, "-c", CUT_SHORT]
    ended = subprocess.run(script, stderr=writer, check=False, timeout=60.0)
    os.close(writer)
    with os.fdopen(reader, "rb") as log:
        said = log.read().decode()
    assert ended.returncode == -signal.SIGBUS
    if not is_full:
        assert "Fatal Python error: Bus error" in said
        assert 'File "<string>", line 10' in said
