"""docs/vllm.md names every option of the vLLM connector, with the default that it has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvd_client.integrations.vllm.options import FOREIGN_KEYS, KvdOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>[^|]+?) \|", re.MULTILINE)


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    section = PAGE.read_text().partition("\n## Options\n")[2].partition("\nvLLM's own keys")[0]
    return {row["name"]: row["default"] for row in ROW.finditer(section)}


def test_every_option_is_documented_and_no_other(documented: dict[str, str]) -> None:
    assert set(documented) == {option.name for option in fields(KvdOptions)}


def test_documented_defaults_are_the_defaults(documented: dict[str, str]) -> None:
    for option in fields(KvdOptions):
        if isinstance(option.default, bool):
            assert documented[option.name] == str(option.default).lower()
        elif isinstance(option.default, float):
            assert float(documented[option.name]) == option.default


def test_refused_keys_name_no_option() -> None:
    assert not FOREIGN_KEYS.keys() & {option.name for option in fields(KvdOptions)}
