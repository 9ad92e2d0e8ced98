"""Documents say what the code does, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvd.config.settings import SETTINGS
from kvd.core.model.slots import STEPS
from tests.tidy.source import ROOT, committed_files, where

LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([\w-]+)\)")
ROOMS = "kvd|kvd_client|kvd_proto|client|docs|tests|proto|helm|deploy|benchmarks|examples"
NAMED_PATH = re.compile(rf"`((?:{ROOMS})/[\w./-]+)`")
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


def anchors(document: Path) -> set[str]:
    """The names by which links reach a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_to_a_heading_leads_to_one() -> None:
    links = [
        (path, path.parent / link if link else path, anchor)
        for path in committed_files()
        if path.suffix == ".md"
        for link, anchor in ANCHOR.findall(path.read_text())
        if "://" not in link
    ]
    assert len(links) > 10
    assert [
        f"{path.relative_to(ROOT)}: #{anchor}"
        for path, target, anchor in links
        if anchor not in anchors(target)
    ] == []


def test_every_path_that_a_guide_names_is_there() -> None:
    guides = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    guides += [path for path in committed_files() if path.is_relative_to(ROOT / "docs")]
    named = [
        (path, name)
        for path in guides
        if path.suffix == ".md"
        for name in NAMED_PATH.findall(path.read_text())
        if "NAME" not in name and not name.startswith("benchmarks/results/")  # to be filled in
    ]
    assert len(named) > 50
    roots = (ROOT, ROOT / "client" / "src")
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in named
        if not any((root / name).exists() for root in roots)
    ] == []


def test_nobody_is_told_to_take_kvd_from_an_index() -> None:
    """PyPI's kvd is another project's: what installs it by name installs that."""
    by_name = re.compile(r"\bkvd(?:-client)?\[|install (?:-\S+ )*['\"]?kvd(?:-client)?['\"=<>~]")
    texts = {".md", ".py", ".txt", ".conf", ".service", ".tpl", ".yaml"}
    told = [
        f"{path}: {found[0]}"
        for path in committed_files()
        if path.suffix in texts and "adr" not in path.parts and path != Path(__file__)
        for found in by_name.finditer(path.read_text())
    ]
    assert told == []


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


def test_every_guide_is_in_the_index() -> None:
    folder = ROOT / "docs"
    listed = set(LINK.findall((folder / "README.md").read_text()))
    assert {path.name for path in folder.glob("*.md")} - {"README.md"} <= listed


def test_the_diagram_of_slot_states_shows_the_steps_that_the_code_allows() -> None:
    drawn = STEP.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert set(drawn) == {(before.name, after.name) for before, after in STEPS}
    assert len(drawn) == len(STEPS)
