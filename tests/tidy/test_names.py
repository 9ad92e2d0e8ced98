"""Names say what a thing is: the words that STYLE bans, wherever we choose a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.source import ROOT, functions, parse, python_files, where

# In a name of several words none of these stands for anything.
EMPTY_WORDS = {"util", "utils", "manager", "helper", "helpers", "misc"}
# Alone they name nothing; beside another word they may be somebody's protocol (ErrorInfo).
EMPTY_ALONE = {"data", "info"}
NOT_OURS = {"chunk", "chunks"}  # we say block, or batch
# Named by what we implement: asyncio's protocols.
NAMED_BY_OTHERS = {"data_received"}
# An adapter says its engine's own words, and a benchmark those of whom it measures.
THEIR_WORDS = {"chunk", "chunks", "manager"}
ADAPTERS = (
    "client/src/kvd_client/integrations/",
    "tests/vllm_conformance/",
    "benchmarks/lmcache/",
    "benchmarks/vllm/",
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words_of(name: str) -> list[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    return [word.lower() for word in WORD.findall(name)]


def chosen_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of the module itself, and of its classes, functions and parameters."""
    yield 1, path.stem
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
    for function in functions(path):
        if function.name in NAMED_BY_OTHERS:
            continue
        yield function.lineno, function.name
        if "tests" in path.parts:  # fixtures and Hypothesis' `data` have their own names
            continue
        every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        yield from ((argument.lineno, argument.arg) for argument in every)


def is_banned(name: str, path: str = "") -> bool:
    words = words_of(name)
    if path.startswith(ADAPTERS):
        words = [word for word in words if word not in THEIR_WORDS]
    return (
        bool(EMPTY_WORDS.intersection(words))
        or bool(NOT_OURS.intersection(words))
        or (len(words) == 1 and words[0] in EMPTY_ALONE)
    )


def test_the_check_knows_an_empty_name_from_a_good_one() -> None:
    banned = ["SlotManager", "utils", "data", "read_chunk", "Info", "test_helpers"]
    good = ["ErrorInfo", "SlotTable", "metadata", "index_page"]
    assert [name for name in banned + good if is_banned(name)] == banned
    adapter = ADAPTERS[0] + "vllm/any.py"
    assert not is_banned("KvdManager", adapter)
    assert is_banned("test_helpers", adapter)


def test_no_module_class_function_or_parameter_has_an_empty_name() -> None:
    assert [
        f"{where(path, line)} {name}"
        for path in python_files()
        for line, name in chosen_names(path)
        if is_banned(name, where(path, line))
    ] == []


def test_no_two_classes_of_the_product_have_one_name() -> None:
    product = (ROOT / "kvd", ROOT / "client" / "src")
    places: dict[str, list[str]] = {}
    for path in python_files():
        if any(path.is_relative_to(each) for each in product):
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(where(path, node.lineno))
    assert len(places) > 300
    assert [found for found in places.values() if len(found) > 1] == []
