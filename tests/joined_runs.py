"""One summary over several runs of pytest, each in an environment of its own.

The first runs are given `--reports-to FILE`, the last `--reports-from FILE` for each of them: it
counts what they reported among its own, failures with their text, so that its last line speaks for
all. Each may spread its tests over processes (pytest-xdist): the one that gathers their reports
does this, too.

With `--again-from FILE` the last run has no tests but those that failed in that run. It runs them
once more, in fresh processes and with nothing beside them, and counts what they do now; that they
failed before is told as a rerun.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ENDED = "ended"
RERUN = "rerun"  # as pytest-rerunfailures has it
WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reports-to", type=Path, help="write this run's reports to a file")
    parser.addoption(
        "--reports-from",
        type=Path,
        action="append",
        default=[],
        help="count another run's reports among ours",
    )
    parser.addoption(
        "--again-from", type=Path, help="run what failed in another run, and count all of its tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of those processes
        return
    written, read = config.getoption("reports_to"), config.getoption("reports_from")
    if written is not None:
        config.pluginmanager.register(Writer(config, written))
    for path in read:
        config.pluginmanager.register(Reader(path))
    again = config.getoption("again_from")
    if again is not None:
        config.pluginmanager.register(Again(again))


class Writer:
    """Writes each report as a line of JSON as it comes, and in the end that it was the end."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._file = path.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._write(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._file.write(json.dumps({ENDED: int(exitstatus)}))
        self._file.close()

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        plain = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        plain.pop("node", None)  # xdist's: which process it came from
        self._file.write(json.dumps(plain, default=str) + "\n")
        self._file.flush()


class Reader:
    """Reports what the other run did after our own tests have run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        reports = list(self._reports(session))
        session.testscollected += len({report.nodeid for report in reports})
        for report in reports:
            if isinstance(report, pytest.CollectReport):
                session.config.hook.pytest_collectreport(report=report)
            else:
                session.config.hook.pytest_runtest_logreport(report=report)
        return result

    def _reports(
        self, session: pytest.Session
    ) -> Iterator[pytest.TestReport | pytest.CollectReport]:
        if not self._path.exists():
            yield self._of_the_whole_run("skipped", "the other environment can't be made here")
            return
        yield from self._written(session.config)

    def _written(self, config: pytest.Config) -> Iterator[pytest.TestReport | pytest.CollectReport]:
        ended = None
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                plain = json.loads(line)
            except ValueError:  # torn: killed while it wrote
                break
            ended = plain.get(ENDED)
            if ended is None:
                report = config.hook.pytest_report_from_serializable(config=config, data=plain)
                if isinstance(report.longrepr, list):  # a skip's place and reason, by way of JSON
                    report.longrepr = tuple(report.longrepr)
                yield report
        if ended is None:
            yield self._of_the_whole_run(
                "failed", f"{self._path}: the other run ended without a word"
            )
        elif ended not in WHOLE:
            yield self._of_the_whole_run(
                "failed", f"{self._path}: the other run broke off (pytest's code {ended})"
            )

    def _of_the_whole_run(self, outcome: str, why: str) -> pytest.TestReport:
        """A report in the place of those that never came."""
        tests = f"tests/{self._path.stem.removesuffix('-reports')}"
        return pytest.TestReport(
            nodeid=tests,
            location=(tests, 0, "the whole run"),
            keywords={},
            outcome=outcome,  # type: ignore[arg-type]
            longrepr=(tests, 0, why) if outcome == "skipped" else why,
            when="call",
        )


class Again(Reader):
    """Runs what failed in the other run, and reports the rest of it as a `Reader` does."""

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        failed = {report.nodeid for report in self._written(config) if report.failed}
        items[:] = [item for item in items if item.nodeid in failed]

    def _reports(
        self, session: pytest.Session
    ) -> Iterator[pytest.TestReport | pytest.CollectReport]:
        run = {item.nodeid for item in session.items}
        for report in self._written(session.config):
            if report.nodeid not in run:
                yield report
            elif report.failed:
                report.outcome = RERUN  # type: ignore[assignment]
                yield report
