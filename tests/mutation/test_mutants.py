"""The tool that mutates the core: what it changes and draws, and that a planted change is run."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="the set `mutation` is not installed")

from tests.mutation.__main__ import interval
from tests.mutation.mutants import (
    MutatedModule,
    all_mutants,
    modules,
    sample,
    statement_around,
)
from tests.mutation.rooms import ROOMS
from tests.mutation.trials import (
    CHILD,
    Seen,
    after_others,
    begin_children,
    forked,
    own_place,
    plant,
)
from tests.tidy.source import ROOT

SHARES = ROOT / "kvd/core/shares.py"


def test_each_mutant_has_a_key_of_its_own_and_changes_its_module() -> None:
    mutants = all_mutants([SHARES])
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 10
    for mutant in mutants:
        assert mutant.difference, mutant.key
        assert set(mutant.lines) <= set(range(1, len(mutant.source.text.splitlines()) + 1))


def test_a_larger_sample_has_the_smaller_one_in_it() -> None:
    mutants = all_mutants([SHARES])
    few, more = sample(mutants, 5, seed=3), sample(mutants, 12, seed=3)
    assert more[:5] == few
    assert sample(mutants, 12, seed=4) != more


def test_who_runs_no_line_of_the_changed_statement_is_not_asked() -> None:
    mutant = all_mutants([SHARES])[0]
    inside, outside = mutant.lines.start, mutant.lines.stop
    assert Seen(0.1, {mutant.path: [inside]}).may_run(mutant)
    assert not Seen(0.1, {mutant.path: [outside]}).may_run(mutant)
    assert not Seen(0.1, {}).may_run(mutant)
    assert Seen(9.0, {}, slow=True).may_run(mutant), "a slow test is asked about all"


def test_quick_tests_come_first_and_then_slow_ones_that_were_seen_to_run_the_line() -> None:
    mutant = all_mutants([SHARES])[0]
    its = {mutant.path: [mutant.lines.start]}
    asked = [Seen(0.5, {}, slow=True), Seen(0.5, its, slow=True), Seen(0.4, its), Seen(0.1, its)]
    assert sorted(asked, key=lambda seen: after_others(seen, mutant)) == asked[::-1]


def test_a_statement_has_its_own_lines_and_a_compound_one_its_head() -> None:
    module = ast.parse("if (a and\n    b):\n    c = (1 +\n         2)\n    d = 3\n")
    assert statement_around(module, 2) == range(1, 3)
    assert statement_around(module, 4) == range(3, 5)
    assert statement_around(module, 5) == range(5, 6)


def half(number: int) -> int:
    return number // 2


def test_a_planted_change_is_run_in_its_process_alone(tmp_path: Path) -> None:
    mutants = list(MutatedModule(Path(__file__)).mutants())
    changed = next(
        m for m in mutants if m.function == "half" and "+    return number // 3" in m.difference
    )

    def work(tell: object) -> None:
        plant(changed, [half])  # type: ignore[list-item]
        assert callable(tell)
        tell(is_now=half(9))

    assert list(forked([("one", work)], processes=1)) == [("one", {"is_now": 3})]
    assert half(9) == 4


HALF = "def half(number):\n    return number // 2\n"


def run_child(directory: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{CHILD}{os.pathsep}{directory}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_a_trial_starts_runs_the_mutant_and_what_comes_later_does_not(tmp_path: Path) -> None:
    module, told = tmp_path / "halving.py", tmp_path / "mutant.json"
    module.write_text(HALF)
    told.write_text(json.dumps({"path": str(module), "text": HALF.replace("2", "3")}))
    code = "import halving; print(halving.half(9))"
    assert run_child(tmp_path, code, KVD_MUTANT=str(told)).stdout == "3\n"
    assert run_child(tmp_path, code).stdout == "4\n"


def test_lines_that_a_killed_process_ran_are_told(tmp_path: Path) -> None:
    (tmp_path / "halving.py").write_text(HALF)
    trace = tmp_path / "lines"
    trace.touch()
    code = "import halving, os; halving.half(9); os.kill(os.getpid(), 9)"
    ran = run_child(tmp_path, code, KVD_TRACE=str(trace), KVD_TRACED=str(tmp_path))
    assert ran.returncode == -signal.SIGKILL
    assert f"{tmp_path}/halving.py:2\n" in trace.read_text()


def test_what_a_trial_left_running_ends_with_it_though_it_is_stopped(tmp_path: Path) -> None:
    told = tmp_path / "pid"

    def work(tell: Callable[..., None]) -> None:
        begin_children()
        left = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        left.send_signal(signal.SIGSTOP)
        told.write_text(str(left.pid))
        tell(place=str(own_place(None)))

    ((_, said),) = forked([("one", work)], processes=1)
    assert not Path(said["place"]).exists()
    stat = Path("/proc") / told.read_text() / "stat"
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


WARNS = """
import warnings
import pytest

def test_as_it_is():
    warnings.warn("odd")

@pytest.mark.filterwarnings("error")
def test_strictly():
    warnings.warn("odd")
"""
TELL_WHO_FAILS = """
import sys
from tests.mutation.trials import _fails, collect_and

def work(items):
    print(*(item.name for item in items.values() if _fails(item)), file=sys.__stderr__)

collect_and(work, sys.argv[1:])
"""


def test_a_trial_heeds_a_tests_marks_on_warnings(tmp_path: Path) -> None:
    (tmp_path / "test_warns.py").write_text(WARNS)
    command = [sys.executable, "-c", TELL_WHO_FAILS, str(tmp_path / "test_warns.py")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "test_strictly" in ran.stderr
    assert "test_as_it_is" not in ran.stderr


def test_each_room_has_modules_and_tests() -> None:
    for room in ROOMS.values():
        assert all(path.exists() for path in room.paths()), room.name
        assert all((ROOT / each).exists() for each in room.tests), room.name
        assert room.has(str(modules(room.paths()[0])[0]))
        assert not room.has(__file__)


def test_a_process_that_dies_has_said_nothing() -> None:
    assert list(forked([("one", lambda tell: os._exit(7))], processes=2)) == [("one", {})]


def test_the_interval_of_a_sample_is_wilson_s() -> None:
    low, high = interval(90, 100)
    assert low == pytest.approx(0.826, abs=0.001)
    assert high == pytest.approx(0.945, abs=0.001)
