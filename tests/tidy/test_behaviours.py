"""The list of behaviours is complete, and every test that it names exists."""

from __future__ import annotations

import re

from tests.tidy.source import ROOT, functions, python_files

STATEMENTS = 40
MODES = 8
TIERS = range(47, 54)  # those between are a cache's own, which is the daemon
TEXT = (ROOT / "docs" / "engine-behaviours.md").read_text()
SECTION = re.compile(r"^### (.+)\n((?:(?!##).*\n)*)", re.MULTILINE)
PROOF = re.compile(r"^- Proof:((?:.*\n)*)", re.MULTILINE)
NAMED = re.compile(r"`(test_\w+)`")
NUMBER = re.compile(r"^(\d+)\. ")
OWN = "none; this is the engine's own."


def proofs() -> list[tuple[str, str]]:
    """Title and proof of every section."""
    found = [(title, PROOF.search(text)) for title, text in SECTION.findall(TEXT)]
    return [(title, proof[1] if proof else "") for title, proof in found]


def test_every_statement_has_its_section_once_and_in_order() -> None:
    numbers = [NUMBER.match(title) for title, _ in proofs()]
    expected = [*range(1, STATEMENTS + 1), *[None] * MODES, *TIERS]
    assert [int(number[1]) if number else None for number in numbers] == expected


def test_every_section_says_something_beside_its_title() -> None:
    said = {title: PROOF.sub("", text).strip() for title, text in SECTION.findall(TEXT)}
    assert [title for title, text in said.items() if not text.endswith(".")] == []


def test_every_section_names_its_proof_or_whose_business_it_is() -> None:
    unproved = [
        title
        for title, proof in proofs()
        if not NAMED.findall(proof) and not (NUMBER.match(title) and proof.strip() == OWN)
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
