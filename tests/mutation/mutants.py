"""The mutants of a room's modules: which there are, a sample of them, and each one's source.

mutmut's operators make them. Only functions are mutated: not constants, defaults, or functions
with decorators.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import libcst
from mutmut.mutation.file_mutation import create_mutations

from tests.tidy.source import ROOT


@dataclass(frozen=True)
class Mutant:
    """One change of one function; its key stays while the function's text does."""

    key: str
    path: str  # from the repository's root
    function: str  # its qualified name
    source: MutatedModule
    change: Any  # mutmut's

    @cached_property
    def text(self) -> str:
        """The whole module with the change in it."""
        changed = self.source.tree.deep_replace(self.change.original_node, self.change.mutated_node)
        assert isinstance(changed, libcst.Module)
        code: str = changed.code  # Any where libcst is not installed
        return code

    @cached_property
    def difference(self) -> list[str]:
        """What was and what is, without context."""
        lines = difflib.unified_diff(
            self.source.text.splitlines(), self.text.splitlines(), lineterm="", n=0
        )
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]

    @cached_property
    def lines(self) -> range:
        """The lines of the statement that is changed: who runs none of them can't tell."""
        before, after = self.source.text.splitlines(), self.text.splitlines()
        same = (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        return statement_around(self.source.syntax, next(same, len(after) - 1) + 1)


class MutatedModule:
    """One module and all its mutants."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT).as_posix()
        self.text = path.read_text()
        self.tree, changes, *_ = create_mutations(self.path, self.text)
        self._changes = changes

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    def mutants(self) -> Iterator[Mutant]:
        names = dict(_functions(self.tree.body))
        texts: dict[Any, str] = {}
        counts: dict[Any, int] = {}
        for change in self._changes:
            function = change.contained_by_top_level_function
            if (
                function is None
                or function not in names
                or _in_parameters(function, change.original_node)
            ):
                continue
            name = names[function]
            if function not in texts:
                words = f"{self.path} {name} {self.tree.code_for_node(function)}"
                texts[function] = hashlib.sha256(words.encode()).hexdigest()[:8]
            counts[function] = number = counts.get(function, 0) + 1
            key = f"{self.path}:{name}:{number}:{texts[function]}"
            yield Mutant(key, self.path, name, self, change)


def all_mutants(paths: Iterable[Path]) -> list[Mutant]:
    """Of these modules, and of all in these directories."""
    files = sorted({file for path in paths for file in modules(path)})
    return [mutant for file in files for mutant in MutatedModule(file).mutants()]


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many, each as likely as any other; a larger sample of the same seed has these in it."""

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()

    return sorted(mutants, key=place)[:count]


def statement_around(module: ast.Module, line: int) -> range:
    """The lines of the smallest statement with this line in it; of a compound one its head."""
    found = range(line, line + 1)
    smallest = len(module.body) + 10**9
    for node in ast.walk(module):
        if not isinstance(node, ast.stmt) or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        end = node.end_lineno or node.lineno
        if node.lineno <= line <= end and end - node.lineno < smallest:
            smallest = end - node.lineno
            inner = [each.lineno for each in getattr(node, "body", [])]
            head = min(inner) if inner and line < min(inner) else end + 1
            found = range(node.lineno, head)
    return found


def modules(path: Path) -> list[Path]:
    """Itself, or all in it."""
    return [path] if path.is_file() else list(path.rglob("*.py"))


def _functions(body: Iterable[Any], inside: str = "") -> Iterator[tuple[Any, str]]:
    for node in body:
        if isinstance(node, libcst.FunctionDef):
            yield node, inside + node.name.value
        elif isinstance(node, libcst.ClassDef):
            yield from _functions(node.body.body, f"{inside}{node.name.value}.")


def _in_parameters(function: libcst.FunctionDef, node: libcst.CSTNode) -> bool:
    """Defaults belong to the function, not to its code, and are not planted."""
    pending: list[libcst.CSTNode] = [function.params]
    while pending:
        one = pending.pop()
        if one is node:
            return True
        pending.extend(one.children)
    return False
