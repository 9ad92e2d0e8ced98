"""The shell blocks of guides, with what the guide says of running them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.tidy.source import ROOT, committed_files

SHELLS = ("", "sh", "bash", "shell", "console")
MARK = re.compile(r"^<!-- (run|not run: \S.{7,}) -->$")
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, and the mark in the line above it."""

    guide: str
    line: int
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.guide}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.mark == "<!-- run -->"

    @property
    def is_marked(self) -> bool:
        return MARK.fullmatch(self.mark) is not None


def blocks_of(guide: str, text: str) -> list[Block]:
    """Every shell block of a guide."""
    found = []
    for fence in _FENCE.finditer(text):
        if fence["language"] in SHELLS:
            above = text[: fence.start()].splitlines()
            mark = above[-1] if above else ""
            found.append(Block(guide, len(above) + 1, mark, fence["text"]))
    return found


def every_block() -> list[Block]:
    """Those of every guide; decisions and the plan of work are none."""
    return [
        block
        for path in committed_files()
        if path.suffix == ".md" and "adr" not in path.parts
        for block in blocks_of(str(path.relative_to(ROOT)), path.read_text())
    ]
