"""The tool that mutates the core: what it changes and draws, and that a planted change is run."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="the set `mutation` is not installed")

from tests.mutation.__main__ import interval
from tests.mutation.mutants import CORE, MutatedModule, all_mutants, sample, statement_around
from tests.mutation.trials import Seen, after_others, forked, plant

SHARES = CORE / "shares.py"


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


def test_a_process_that_dies_has_said_nothing() -> None:
    assert list(forked([("one", lambda tell: os._exit(7))], processes=2)) == [("one", {})]


def test_the_interval_of_a_sample_is_wilson_s() -> None:
    low, high = interval(90, 100)
    assert low == pytest.approx(0.826, abs=0.001)
    assert high == pytest.approx(0.945, abs=0.001)
