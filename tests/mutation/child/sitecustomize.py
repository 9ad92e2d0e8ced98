"""Run at the start of each Python process that a trial starts: plants the mutant, or traces.

`KVD_MUTANT` names a JSON file with the changed module's path and text; `KVD_TRACE` a file to which
each line of `KVD_TRACED` (directories and files, by `:`) is written, the first time that it runs:
a process that is killed has told what it ran.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the mutant in its module's place, and leaves no bytecode of it."""

    text = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds all that is found without it."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin == self._path:
            loader = _Loader(name, self._path)
            loader.text = self._text
            spec.loader = loader
        return spec


def _trace_into(file: str, under: tuple[str, ...]) -> None:
    seen: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, _: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in seen:
            seen.add(place)
            with open(file, "a") as out:  # noqa: PTH123 - pathlib may be what is traced
                out.write(f"{place[0]}:{place[1]}\n")
        return local

    def anywhere(frame: FrameType, _event: str, _: object) -> Any:
        return local if frame.f_code.co_filename.startswith(under) else None

    threading.settrace(anywhere)
    sys.settrace(anywhere)


if "KVD_MUTANT" in os.environ:
    _told = json.loads(Path(os.environ["KVD_MUTANT"]).read_text())
    sys.meta_path.insert(0, _Finder(_told["path"], _told["text"]))
if "KVD_TRACE" in os.environ:
    _trace_into(os.environ["KVD_TRACE"], tuple(os.environ["KVD_TRACED"].split(":")))
