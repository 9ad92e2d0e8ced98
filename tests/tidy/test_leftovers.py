"""Nothing half done is committed, and nothing that only works on the author's machine."""

from __future__ import annotations

import ast
import re

from tests.tidy.source import ROOT, committed_files, functions, parse, python_files, where

# Put together here, so that this file doesn't find itself.
MARKERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) + r")\b")
PRIVATE_PATHS = re.compile("|".join(["/wo" + "rk/", r"\.\./sha" + "red", "/opt/whe" + "els"]))
REGISTRY_HOSTS = re.compile(
    r"\b(" + "|".join(["py" + "pi", "registry.n" + "pmjs", "deb.de" + "bian"]) + r")\.(org|com)\b"
)
BINARY = {".gz", ".png", ".npz"}


def places(pattern: re.Pattern[str]) -> list[str]:
    """Every line of a committed text file in which the pattern stands."""
    return [
        f"{where(path, number)} {line.strip()[:80]}"
        for path in committed_files()
        if path.suffix not in BINARY
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]


def is_seam(node: ast.ClassDef) -> bool:
    """Whether a class is a Protocol or abstract: its methods may have no body."""
    return any("Protocol" in ast.unparse(base) or "ABC" in ast.unparse(base) for base in node.bases)


def has_no_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a docstring, `...`, or a NotImplementedError at most."""
    body = [
        node
        for node in function.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    if not body:
        return any(
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and node.value.value is Ellipsis
            for node in function.body
        )
    return isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.unparse(body[0])


def test_no_file_says_that_something_is_still_to_be_done() -> None:
    assert places(MARKERS) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert places(PRIVATE_PATHS) == []


def test_no_file_names_a_package_registrys_host() -> None:
    assert places(REGISTRY_HOSTS) == []


def test_no_function_is_a_stub() -> None:
    stubs = []
    for path in python_files():
        seams = [n for n in ast.walk(parse(path)) if isinstance(n, ast.ClassDef) and is_seam(n)]
        allowed = {id(method) for seam in seams for method in ast.walk(seam)}
        stubs += [
            f"{where(path, function.lineno)} {function.name}"
            for function in functions(path)
            if id(function) not in allowed and has_no_body(function)
        ]
    assert stubs == []


def test_every_executable_file_says_what_runs_it() -> None:
    commands = [path for path in (ROOT / ".ci").iterdir() if path.is_file()]
    assert commands
    for path in commands:
        assert path.stat().st_mode & 0o111, path
        assert path.read_text().startswith("#!"), path
