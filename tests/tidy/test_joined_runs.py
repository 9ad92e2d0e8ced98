"""The second of two runs of pytest ends with a summary that counts the first, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

FIRST = "import pytest\ndef test_good(): pass\ndef test_bad(): assert 6 * 9 == 42\n"
SECOND = "def test_fine(): pass\n"


def run(tmp_path: Path, source: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """A run of pytest over one file, far from our own configuration."""
    (tmp_path / "test_it.py").write_text(source)
    words = ["-p", "tests.joined_runs", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, tmp_path, *map(str, flags), tmp_path],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_summary_counts_both_runs_and_shows_what_failed_in_the_first(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    run(tmp_path, FIRST, "--reports-to", reports)
    second = run(tmp_path, SECOND, "--reports-from", reports)
    assert "1 failed, 2 passed" in second.stdout.splitlines()[-1]
    assert "assert (6 * 9) == 42" in second.stdout
    assert second.returncode == 1


def test_runs_that_are_spread_over_processes_are_joined_alike(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    reports = tmp_path / "reports"
    run(tmp_path, FIRST, "--reports-to", reports, "-n", "2")
    second = run(tmp_path, SECOND, "--reports-from", reports, "-n", "2")
    assert "1 failed, 2 passed" in second.stdout.splitlines()[-1], second.stdout
    assert "assert (6 * 9) == 42" in second.stdout
    assert second.returncode == 1


def test_a_first_run_that_all_passed_leaves_the_second_passed(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    run(tmp_path, SECOND, "--reports-to", reports)
    second = run(tmp_path, SECOND, "--reports-from", reports)
    assert "2 passed" in second.stdout.splitlines()[-1]
    assert second.returncode == 0


def test_a_first_run_that_was_killed_is_a_failure(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    run(tmp_path, SECOND, "--reports-to", reports)
    written = reports.read_text()
    reports.write_text(written[: len(written) - 3])
    second = run(tmp_path, SECOND, "--reports-from", reports)
    assert "1 failed, 2 passed" in second.stdout.splitlines()[-1]
    assert second.returncode == 1


def test_a_first_run_that_never_was_is_skipped_with_a_reason(tmp_path: Path) -> None:
    second = run(tmp_path, SECOND, "--reports-from", tmp_path / "nothing", "-rs")
    assert "1 passed, 1 skipped" in second.stdout.splitlines()[-1]
    assert "the other environment can't be made here" in second.stdout
    assert second.returncode == 0


def test_what_failed_is_run_once_more_and_told_as_a_rerun_where_it_passes(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    flag = tmp_path / "there"
    source = (
        "import pathlib\n"
        "def test_good(): assert not pathlib.Path(__file__).with_name('there').exists()\n"
        "def test_once(): assert pathlib.Path(__file__).with_name('there').exists()\n"
    )
    run(tmp_path, source, "--reports-to", reports)
    flag.touch()
    second = run(tmp_path, source, "--again-from", reports, "-p", "tests.shown_reruns")
    assert "2 passed, 1 rerun" in second.stdout.splitlines()[-1], second.stdout
    assert "run once more: test_it.py::test_once (call)" in second.stdout
    assert second.returncode == 0


def test_what_fails_again_is_a_failure(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    run(tmp_path, FIRST, "--reports-to", reports)
    second = run(tmp_path, FIRST, "--again-from", reports)
    assert "1 failed, 1 passed, 1 rerun" in second.stdout.splitlines()[-1], second.stdout
    assert second.returncode == 1


@pytest.mark.parametrize("passes", [True, False])
def test_a_third_run_counts_what_the_second_ran_once_more_for_the_first(
    tmp_path: Path, passes: bool
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    run(tmp_path, FIRST, "--reports-to", first)
    mended = FIRST.replace("42", "54") if passes else FIRST
    run(tmp_path, mended, "--again-from", first, "--reports-to", again)
    third = run(tmp_path, SECOND, "--reports-from", again, "-p", "tests.shown_reruns")
    told = "3 passed, 1 rerun" if passes else "1 failed, 2 passed, 1 rerun"
    assert told in third.stdout.splitlines()[-1], third.stdout
    assert "run once more: test_it.py::test_bad (call)" in third.stdout
    assert third.returncode == (0 if passes else 1)


def test_nothing_is_run_once_more_where_all_passed(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    run(tmp_path, SECOND, "--reports-to", reports)
    second = run(tmp_path, "def test_fine(): assert False\n", "--again-from", reports)
    assert "1 passed" in second.stdout.splitlines()[-1], second.stdout
    assert second.returncode == 0


def test_what_was_skipped_is_counted_with_its_reason(tmp_path: Path) -> None:
    """A test, and a whole file."""
    reports = tmp_path / "reports"
    source = "import pytest\ndef test_one(): pytest.skip('no such thing')\ndef test_two(): pass\n"
    (tmp_path / "test_other.py").write_text(
        "import pytest\npytest.skip('nor this', allow_module_level=True)\n"
    )
    run(tmp_path, source, "--reports-to", reports)
    (tmp_path / "test_other.py").unlink()
    second = run(tmp_path, source, "--again-from", reports, "-rs")
    assert "1 passed, 2 skipped" in second.stdout.splitlines()[-1], second.stdout
    assert "no such thing" in second.stdout
    assert "nor this" in second.stdout
    assert second.returncode == 0


@pytest.mark.parametrize("left", ["nothing", "a torn end", "the end of one that broke off"])
def test_a_run_that_did_not_get_to_its_end_is_a_failure_though_all_passed(
    tmp_path: Path, left: str
) -> None:
    reports = tmp_path / "reports"
    run(tmp_path, SECOND, "--reports-to", reports)
    if left == "nothing":
        reports.unlink()
    else:
        *lines, _ = reports.read_text().splitlines()
        end = '{"end' if left == "a torn end" else f'{{"ended": {pytest.ExitCode.INTERRUPTED:d}}}'
        reports.write_text("\n".join([*lines, end]))
    second = run(tmp_path, SECOND, "--again-from", reports)
    assert "1 failed" in second.stdout.splitlines()[-1], second.stdout
    assert second.returncode == 1


@pytest.mark.parametrize("flags", [[], ["-n", "1"]])
def test_what_breaks_outside_of_a_test_is_not_made_good_by_running_it_again(
    tmp_path: Path, flags: list[str]
) -> None:
    """Neither a file that can't be read nor a process that ends in its midst."""
    if flags:
        pytest.importorskip("xdist")
    reports = tmp_path / "reports"
    source = "import os\ndef test_end(): os._exit(3)\n" if flags else "raise ValueError\n"
    run(tmp_path, source, "--reports-to", reports, "--max-worker-restart", "0", *flags)
    second = run(tmp_path, SECOND, "--again-from", reports)
    assert "failed" in second.stdout.splitlines()[-1] or "error" in second.stdout.splitlines()[-1]
    assert second.returncode != 0
