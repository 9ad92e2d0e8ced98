"""Every class that another module uses says in its first line what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.source import ROOT, imported_modules, parse, python_files, where

PRODUCT = (ROOT / "kvd", ROOT / "client" / "src")
LEAST_WORDS = 3


def product_files() -> list[Path]:
    return [p for p in python_files() if any(p.is_relative_to(room) for room in PRODUCT)]


def module_of(path: Path) -> str:
    """The name by which others import a file."""
    room = ROOT if path.is_relative_to(ROOT / "kvd") else ROOT / "client" / "src"
    return ".".join(path.relative_to(room).with_suffix("").parts).removesuffix(".__init__")


def public_classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node


def first_line(node: ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def test_every_class_that_another_module_imports_says_what_it_is() -> None:
    imported = {name for path in product_files() for name in imported_modules(path)}
    used = [
        (path, node)
        for path in product_files()
        for node in public_classes(path)
        if f"{module_of(path)}.{node.name}" in imported
    ]
    assert len(used) > 150
    assert [
        f"{where(path, node.lineno)} {node.name}"
        for path, node in used
        if len(first_line(node).split()) < LEAST_WORDS
    ] == []
