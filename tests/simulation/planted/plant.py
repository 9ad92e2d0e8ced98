"""Plants a bug: its module is compiled from the changed source when it is first imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

from tests.simulation.planted.bug import Bug


def source_of(bug: Bug) -> str:
    """The module's source as it is."""
    found = find_spec(bug.module)
    assert found is not None, f"there is no module {bug.module}"
    assert found.origin is not None, f"{bug.module} has no source"
    return Path(found.origin).read_text()


def changed(bug: Bug, source: str) -> str:
    """With the bug in it; AssertionError where the source has moved on."""
    count = source.count(bug.before)
    assert count == 1, f"{bug.name}: its source stands {count} times in {bug.module}"
    return source.replace(bug.before, bug.after)


class _Loader(SourceFileLoader):
    bug: Bug

    def get_code(self, fullname: str) -> CodeType:
        source = changed(self.bug, Path(self.path).read_text())
        return compile(source, self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._bug.module:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        assert found is not None, fullname
        assert found.origin is not None, fullname
        loader = _Loader(fullname, found.origin)
        loader.bug = self._bug
        found.loader = loader
        return found


def plant(bug: Bug) -> None:
    """Before the module is imported, in a process of its own."""
    assert bug.module not in sys.modules, "too late"
    sys.meta_path.insert(0, _Finder(bug))
