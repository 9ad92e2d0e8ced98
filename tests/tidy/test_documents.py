"""Documents say what the code does, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvd.config.settings import SETTINGS
from kvd.core.model.slots import STEPS
from tests.tidy.source import ROOT, committed_files, where

LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
STEP = re.compile(r"^  ([A-Z]+) --> ([A-Z]+): ", re.MULTILINE)
TABLE_CHARACTERS = 200  # of one line: a terminal shows no more in two lines of its own
ROW = re.compile(r"^\| `([a-z_]+)` \| (?:`([^`]*)`)? ?\| (.*) \|$", re.MULTILINE)


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_setting_is_documented_with_its_default_and_meaning() -> None:
    rows = ROW.findall((ROOT / "docs" / "configuration.md").read_text())
    assert rows == [
        (setting.name, shown(setting.default), setting.meaning.replace("%%", "%"))
        for setting in SETTINGS
    ]


@pytest.mark.parametrize(
    "document",
    [path for path in committed_files() if path.suffix == ".md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_no_line_of_a_table_is_too_wide_for_a_terminal() -> None:
    documents = [path for path in committed_files() if path.suffix == ".md"]
    lines = {path: list(enumerate(path.read_text().splitlines(), start=1)) for path in documents}
    assert any(line.startswith("|") for _, line in lines[ROOT / "ARCHITECTURE.md"])
    assert [
        f"{where(path, number)}: {len(line)}"
        for path in documents
        for number, line in lines[path]
        if line.startswith("|") and len(line) > TABLE_CHARACTERS
    ] == []


def test_every_decision_is_in_the_list() -> None:
    folder = ROOT / "docs" / "adr"
    listed = set(LINK.findall((folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("0*.md")}


def test_the_diagram_of_slot_states_shows_the_steps_that_the_code_allows() -> None:
    drawn = STEP.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert set(drawn) == {(before.name, after.name) for before, after in STEPS}
    assert len(drawn) == len(STEPS)
