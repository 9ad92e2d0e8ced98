"""Shows of a test that failed what the processes wrote meanwhile that it had started."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests import daemon_process

MOST_LOGS, MOST_LINES = 4, 60
CLOCKS_DIFFER_S = 1.0  # a file's time is the kernel's, of its last tick


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The last lines of each `*.log` beneath pytest's own temporary folder, and of each daemon."""
    report = yield
    if report.failed:
        factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
        for log in _written(factory.getbasetemp(), call.start - CLOCKS_DIFFER_S):
            report.sections.append((f"the end of {log.parent.name}/{log.name}", _end_of(log)))
    return report


def _written(folder: Path, since_s: float) -> list[Path]:
    """The logs that were written to since then, by wall clock, the latest last."""
    logs = {*folder.rglob("*.log"), *daemon_process.logs}
    times = {log: log.stat().st_mtime for log in logs if log.is_file()}
    since = sorted((log for log, at in times.items() if at >= since_s), key=times.__getitem__)
    return since[-MOST_LOGS:]


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-MOST_LINES:])
