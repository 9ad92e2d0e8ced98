"""Small files, small functions, few parameters: the sizes that STYLE sets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy.source import functions, python_files, where

FILE_LINES = 600
FUNCTION_LINES = 60
PARAMETERS = 6
LINE_CHARACTERS = 100
PRAGMA = re.compile(r"  # (noqa|type: ignore)\b.*$")  # a word to a tool may stick out


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that a caller gives: all but self and cls."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in given)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files()}
    assert lengths
    assert [f"{where(p, n)}" for p, n in lengths.items() if n > FILE_LINES] == []


def test_no_function_is_longer_than_60_lines() -> None:
    assert [
        f"{where(path, function.lineno)} {function.name}: {length(function)}"
        for path in python_files()
        for function in functions(path)
        if length(function) > FUNCTION_LINES
    ] == []


def test_no_function_takes_more_than_6_parameters() -> None:
    def is_ours(path: Path) -> bool:  # a test's parameters are its fixtures
        return "tests" not in path.parts

    assert [
        f"{where(path, function.lineno)} {function.name}: {parameter_count(function)}"
        for path in python_files()
        if is_ours(path)
        for function in functions(path)
        if parameter_count(function) > PARAMETERS
    ] == []


def test_no_line_is_wider_than_100_characters() -> None:
    assert [
        where(path, number)
        for path in python_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(PRAGMA.sub("", line)) > LINE_CHARACTERS
    ] == []
