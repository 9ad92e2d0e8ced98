"""Every named bound of the product stands on the page of limits, with its value and its tests."""

from __future__ import annotations

import ast
import operator
import re
from functools import cache
from typing import cast

import pytest

from tests.tidy.source import ROOT, parse, python_files

DOCUMENT = ROOT / "docs" / "limits.md"
PRODUCT = (ROOT / "kvd", ROOT / "client" / "src")
NAMED = re.compile(r"`(_?[A-Z][A-Z0-9]*_[A-Z0-9_]+)`")
IS_BOUND = re.compile(  # how much, how much at once, and how long
    r"_?(MAX|MOST|LONGEST|KEPT|REMEMBERED)_|\w+_(AT_ONCE|LOOKED_AT|PER_STEP|SECONDS|S|NS|MS|TICKS)$"
)
NO_BOUNDS = {"NS_PER_MS", "LONG_AGO_NS"}  # units, and a moment
GIVEN = re.compile(  # `NAME` = 0.5 to 1 s
    r"`(_?[A-Z][A-Z0-9_]*)`\s+=\s+([\d,.^]+(?: - 1)?)(?:\s+to\s+([\d.]+))?\s*((?:[KMGT]iB|ms|s)\b)?"
)
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "ms": 1e-3, "s": 1}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
TESTS = re.compile(r"`(tests/\w+)`:\s+((?:`test_\w+`(?:,\s+)?)+)")
FUNCTION = re.compile(r"def (test_\w+)\(")
PARTS = ("Whose", "Beyond it", "Tests")


def bounds() -> dict[str, str]:
    """Every name of a bound that a module of the product gives a value, and where."""
    return {name: where for name, where in constants().items() if is_bound(name)}


def is_bound(name: str) -> bool:
    return IS_BOUND.match(name) is not None and name not in NO_BOUNDS


def constants() -> dict[str, str]:
    """Every constant of the product's modules, and where."""
    return {name: where for where, name, _ in assignments()}


@cache
def assignments() -> list[tuple[str, str, ast.expr | None]]:
    """File, name and value of every constant of the product's modules."""
    return [
        (str(path.relative_to(ROOT)), name, node.value)
        for path in python_files()
        if any(path.is_relative_to(room) for room in PRODUCT)
        for node in parse(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in assigned(node)
        if name.isupper()
    ]


def evaluate(node: ast.expr, where: str) -> float | tuple[float, ...]:
    """What a constant's expression comes to: numbers, and constants of this file or another."""
    match node:
        case ast.Tuple():
            return tuple(cast(float, evaluate(element, where)) for element in node.elts)
        case ast.BinOp():
            left, right = (cast(float, evaluate(side, where)) for side in (node.left, node.right))
            return cast(float, OPERATORS[type(node.op)](left, right))
        case ast.Name():
            return value_of(node.id, where)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return value_of(name, where, module)
        case _:
            return cast(float, ast.literal_eval(node))


def value_of(name: str, where: str, module: str | None = None) -> float | tuple[float, ...]:
    """A constant's value as a file means it: its own, or the one that it imports."""
    origin = where
    for node in parse(ROOT / where).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == (module or name):
                    origin = f"{node.module}.{module}" if module else str(node.module)
    wanted = origin.removesuffix(".py").replace(".", "/")
    (found,) = (
        (file, value)
        for file, other, value in assignments()
        if other == name and file.removesuffix(".py").endswith(wanted)
    )
    assert found[1] is not None
    return evaluate(found[1], found[0])


def values(names: set[str]) -> dict[str, set[float | tuple[float, ...]]]:
    """Every value that the product's modules give to these constants."""
    found: dict[str, set[float | tuple[float, ...]]] = {}
    for where, name, value in assignments():
        if name in names and value is not None:
            found.setdefault(name, set()).add(evaluate(value, where))
    return found


def assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_every_bound_stands_on_the_page_of_limits() -> None:
    known = bounds()
    assert len(known) > 100
    missing = known.keys() - set(NAMED.findall(DOCUMENT.read_text()))
    assert not missing, {name: known[name] for name in missing}


def test_the_page_of_limits_names_no_bound_that_is_gone() -> None:
    named = {name for name in NAMED.findall(DOCUMENT.read_text()) if is_bound(name)}
    assert len(named) > 200
    assert named <= bounds().keys()


def given(text: str) -> dict[str, set[float | tuple[float, ...]]]:
    """Every value that a text gives to a constant, in the constant's own unit."""
    found: dict[str, set[float | tuple[float, ...]]] = {}
    for name, first, last, unit in GIVEN.findall(text):
        if unit in ("s", "ms"):
            per = 1e9 if name.endswith("_NS") else 1e3 if name.endswith("_MS") else 1
            numbers = [float(number) * UNITS[unit] * per for number in (first, last) if number]
        else:
            numbers = [count(number) * UNITS[unit] for number in (first, last) if number]
        rounded = tuple(round(n, 6) for n in numbers)
        found.setdefault(name, set()).add(rounded if last else rounded[0])
    return found


def count(text: str) -> float:
    """A number as the page writes it: 4,096, 0.25, 2^63 - 1."""
    power, _, less = text.replace(",", "").rstrip(".").partition(" - ")
    base, _, exponent = power.partition("^")
    number = int(base) ** int(exponent) if exponent else float(base)
    return number - int(less or 0)


def test_the_page_of_limits_gives_each_bound_the_value_that_it_has() -> None:
    said = given(DOCUMENT.read_text())
    there = values(set(bounds()))
    assert len(there) > 200
    wrong = {name: (said.get(name), there[name]) for name in there if said.get(name) != there[name]}
    assert not wrong, "on the page, and in the code"


def test_the_page_of_limits_gives_no_constant_a_value_that_it_has_not() -> None:
    said = given(DOCUMENT.read_text())
    there = values(set(said))
    assert {name: numbers for name, numbers in said.items() if not numbers <= there[name]} == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("`MAX_A` = 4,096.", 4096),
        ("`MAX_A` = 4 MiB: bytes", 4 << 20),
        ("`MAX_A` =\n  64 KiB", 65536),
        ("`MAX_A_MS` = 60 s.", 60_000),
        ("`A_NS` = 50 ms: between", 50_000_000),
        ("`A_S` = 0.5 to 1 s: for", (0.5, 1.0)),
        ("`MAX_A` = 2^63 - 1: a", 2**63 - 1),
        ("`MAX_A` = 10 sessions", 10),
    ],
)
def test_a_value_is_read_with_its_unit(text: str, value: object) -> None:
    assert list(given(text).values()) == [{value}]


def sections() -> dict[str, str]:
    """The text of every bound on the page, by its title."""
    parts = re.split(r"^(##+) (.+)$", DOCUMENT.read_text(), flags=re.MULTILINE)
    marks, titles, texts = parts[1::3], parts[2::3], parts[3::3]
    found = [(t, x) for m, t, x in zip(marks, titles, texts, strict=True) if m == "###"]
    assert len(found) == len(dict(found)), "a title stands twice"
    return dict(found)


def parts_of(text: str) -> dict[str, str]:
    """The list's lines by the word before their colon; what gives the bound is under no word."""
    found: dict[str, str] = {}
    for line in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
        word, _, rest = line.partition(":")
        part = word if word in PARTS else ""
        found[part] = found.get(part, "") + (rest if part else line)
    return found


def names_in(folder: str) -> set[str]:
    files = (ROOT / folder).glob("test_*.py")
    return {found for path in files for found in FUNCTION.findall(path.read_text())}


def test_each_bound_on_the_page_says_its_value_whose_it_is_and_what_is_beyond_it() -> None:
    known = sections()
    assert len(known) > 100
    wanted = {"", *PARTS}
    incomplete = {
        title: wanted - {part for part, said in parts_of(text).items() if said.strip()}
        for title, text in known.items()
    }
    assert {title: missing for title, missing in incomplete.items() if missing} == {}


def test_the_page_of_limits_names_a_test_for_each_bound() -> None:
    tests = {title: parts_of(text).get("Tests", "") for title, text in sections().items()}
    assert [title for title, named in tests.items() if not TESTS.search(named)] == []


def test_the_page_of_limits_names_each_constant_where_a_test_is_named_too() -> None:
    outside = re.sub(
        r"^### .+?(?=^##|\Z)", "", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert [name for name in NAMED.findall(outside) if is_bound(name)] == []


def test_the_tests_that_the_page_of_limits_names_are_there() -> None:
    text = DOCUMENT.read_text()
    named = [
        (folder, test)
        for folder, tests in TESTS.findall(text)
        for test in re.findall(r"test_\w+", tests)
    ]
    assert len(named) > 100
    assert {test for _, test in named} == set(re.findall(r"`(test_\w+)`", text))
    there = {folder: names_in(folder) for folder in {folder for folder, _ in named}}
    assert [(folder, test) for folder, test in named if test not in there[folder]] == []
