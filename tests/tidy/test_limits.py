"""Every named bound of the product stands on the page of limits."""

from __future__ import annotations

import ast
import re

from tests.tidy.source import ROOT, parse, python_files

DOCUMENT = ROOT / "docs" / "limits.md"
PRODUCT = (ROOT / "kvd", ROOT / "client" / "src")
NAMED = re.compile(r"`(MAX_[A-Z0-9_]+)`")
PATHS = re.compile(r"`(tests/[a-z_0-9/]+\.py)`")


def bounds() -> dict[str, str]:
    """Every MAX_... that a module of the product gives a value, and where."""
    found = {}
    for path in python_files():
        if any(path.is_relative_to(room) for room in PRODUCT):
            for node in parse(path).body:
                for target in node.targets if isinstance(node, ast.Assign) else ():
                    if isinstance(target, ast.Name) and target.id.startswith("MAX_"):
                        found[target.id] = str(path.relative_to(ROOT))
    return found


def test_every_bound_stands_on_the_page_of_limits() -> None:
    known = bounds()
    assert len(known) > 100
    missing = known.keys() - set(NAMED.findall(DOCUMENT.read_text()))
    assert not missing, {name: known[name] for name in missing}


def test_the_page_of_limits_names_no_bound_that_is_gone() -> None:
    assert set(NAMED.findall(DOCUMENT.read_text())) <= bounds().keys()


def test_the_tests_that_the_page_of_limits_names_are_there() -> None:
    named = set(PATHS.findall(DOCUMENT.read_text()))
    assert {path for path in named if not (ROOT / path).is_file()} == set()
