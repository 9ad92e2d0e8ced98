"""The list of behaviours is complete, and every test that it names exists."""

from __future__ import annotations

import re

from tests.tidy.source import ROOT, functions, python_files

STATEMENTS = 40
TEXT = (ROOT / "docs" / "engine-behaviours.md").read_text()
ROW = re.compile(r"^\| (\d+) \|.*\| ([^|]*) \|$", re.MULTILINE)
NAMED = re.compile(r"`(test_\w+)`")


def test_every_statement_has_its_row_once_and_in_order() -> None:
    assert [int(number) for number, _ in ROW.findall(TEXT)] == list(range(1, STATEMENTS + 1))


def test_every_row_names_its_proof_or_whose_business_it_is() -> None:
    unproved = [
        number
        for number, proof in ROW.findall(TEXT)
        if not NAMED.findall(proof) and proof != "the engine's own"
    ]
    assert unproved == []


def test_every_test_that_is_named_exists() -> None:
    tests = {
        function.name
        for path in python_files()
        if "tests" in path.parts
        for function in functions(path)
    }
    named = set(NAMED.findall(TEXT))
    assert named
    assert named - tests == set()
