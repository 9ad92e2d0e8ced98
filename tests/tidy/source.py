"""Our own files: what the tidy tests read."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "client/src/kvd_proto/v1/"


@cache
def committed_files() -> tuple[Path, ...]:
    """Every file that git tracks or would add, generated stubs left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    names = sorted(n for n in set(listed.split("\0")) if n and not n.startswith(GENERATED))
    return tuple(ROOT / n for n in names if (ROOT / n).is_file())


@cache
def python_files() -> tuple[Path, ...]:
    """Our own Python, generated stubs left out."""
    return tuple(p for p in committed_files() if p.suffix == ".py")


@cache
def parse(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(), filename=str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported_modules(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def where(path: Path, line: int) -> str:
    """A place as `file:line`, for a message."""
    return f"{path.relative_to(ROOT)}:{line}"
