"""Every named bound of the product stands on the page of limits."""

from __future__ import annotations

import ast
import re

from tests.tidy.source import ROOT, parse, python_files

DOCUMENT = ROOT / "docs" / "limits.md"
PRODUCT = (ROOT / "kvd", ROOT / "client" / "src")
NAMED = re.compile(r"`(_?[A-Z][A-Z0-9]*_[A-Z0-9_]+)`")
IS_BOUND = re.compile(  # how much, how much at once, and how long
    r"_?(MAX|MOST|LONGEST|KEPT|REMEMBERED)_|\w+_(AT_ONCE|LOOKED_AT|PER_STEP|SECONDS|S|NS|MS|TICKS)$"
)
NO_BOUNDS = {"NS_PER_MS", "LONG_AGO_NS"}  # units, and a moment
TESTS = re.compile(r"`(tests/\w+)(?:/test_\w+\.py)?`: ((?:`test_\w+`(?:, )?)+)")
FUNCTION = re.compile(r"def (test_\w+)\(")


def bounds() -> dict[str, str]:
    """Every name of a bound that a module of the product gives a value, and where."""
    return {name: where for name, where in constants().items() if is_bound(name)}


def is_bound(name: str) -> bool:
    return IS_BOUND.match(name) is not None and name not in NO_BOUNDS


def constants() -> dict[str, str]:
    """Every constant of the product's modules, and where."""
    found = {}
    for path in python_files():
        if any(path.is_relative_to(room) for room in PRODUCT):
            for node in parse(path).body:
                for name in assigned(node):
                    if name.isupper():
                        found[name] = str(path.relative_to(ROOT))
    return found


def assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_every_bound_stands_on_the_page_of_limits() -> None:
    known = bounds()
    assert len(known) > 100
    missing = known.keys() - set(NAMED.findall(DOCUMENT.read_text()))
    assert not missing, {name: known[name] for name in missing}


def test_the_page_of_limits_names_no_bound_that_is_gone() -> None:
    named = {name for name in NAMED.findall(DOCUMENT.read_text()) if is_bound(name)}
    assert len(named) > 200
    assert named <= bounds().keys()


def rows() -> list[list[str]]:
    """The cells of every bound on the page."""
    lines = (line for line in DOCUMENT.read_text().splitlines() if line.startswith("| "))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "bound"]


def names_in(folder: str) -> set[str]:
    files = (ROOT / folder).glob("test_*.py")
    return {found for path in files for found in FUNCTION.findall(path.read_text())}


def test_the_page_of_limits_names_a_test_for_each_bound() -> None:
    assert [row[0] for row in rows() if not TESTS.search(row[-1]) and row[-1] != "the same"] == []


def test_the_tests_that_the_page_of_limits_names_are_there() -> None:
    named = [
        (folder, test)
        for row in rows()
        for folder, tests in TESTS.findall(row[-1])
        for test in re.findall(r"test_\w+", tests)
    ]
    assert len(named) > 100
    there = {folder: names_in(folder) for folder in {folder for folder, _ in named}}
    assert [(folder, test) for folder, test in named if test not in there[folder]] == []
