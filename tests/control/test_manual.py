"""The man page and the page of commands say what the code does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.cli import manual
from kvd.cli.commands import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", [manual.PAGE, manual.GUIDE])
def test_the_pages_are_those_that_the_code_makes(page: str, tmp_path: Path) -> None:
    manual.write(tmp_path)
    hint = "run: python -m kvd.cli.manual"
    assert (tmp_path / page).read_text() == (DOCS / page).read_text(), hint


def test_the_man_page_names_every_command_and_option() -> None:
    page = manual.man_page().replace("\\-", "-")
    for name, _, _ in COMMANDS:
        assert f".SS kvd {name}\n" in page
    assert ".B --watch\n" in page
    assert ".B --pool-bytes SIZE\n" in page


@pytest.mark.parametrize(
    "usage",
    ["explain [OPTIONS] [REQUEST]", "record [OPTIONS] FILE", "size [OPTIONS] [MODEL]",
     "quota [OPTIONS] [TENANT] [SIZE|none]", "completion [OPTIONS] {bash|zsh|fish}"],
)  # fmt: skip
def test_both_pages_say_what_a_command_takes_beside_options(usage: str) -> None:
    assert f"\n`kvd {usage}`\n" in manual.guide()
    assert f".B kvd {usage}\n" in manual.man_page().replace("\\-", "-")


def test_man_finds_nothing_wrong_with_the_page() -> None:
    if shutil.which("man") is None:
        pytest.skip("man is not installed (Debian package man-db)")
    command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", str(DOCS / manual.PAGE)]
    shown = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
