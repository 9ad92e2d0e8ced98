"""Shows why a test failed that passed when it was run once more (pytest-rerunfailures).

Without this its name is all that is left of it, and nobody can mend it.
"""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After the failures: each first attempt, as a failure would be shown."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_sep("_", f"run once more: {report.nodeid} ({report.when})")
        terminalreporter.write_line(report.longreprtext)
        for title, content in report.sections:
            terminalreporter.write_sep("-", title)
            terminalreporter.write_line(content.rstrip())
