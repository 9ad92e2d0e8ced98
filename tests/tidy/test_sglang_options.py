"""docs/sglang.md names every option of the SGLang backend, with the default that it has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvd_client.integrations.sglang.options import SGLANG_KEYS, HiCacheOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sglang.md"
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>[^|]+?) \|", re.MULTILINE)


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    section = PAGE.read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    return {row["name"]: row["default"] for row in ROW.finditer(section)}


def test_every_option_is_documented_and_no_other(documented: dict[str, str]) -> None:
    assert set(documented) == {option.name for option in fields(HiCacheOptions)}
    assert not documented.keys() & SGLANG_KEYS


def test_documented_defaults_are_the_defaults(documented: dict[str, str]) -> None:
    for option in fields(HiCacheOptions):
        if isinstance(option.default, bool):
            assert documented[option.name] == str(option.default).lower()
        elif isinstance(option.default, float):
            assert float(documented[option.name]) == option.default


def test_options_are_checked_and_sglangs_own_keys_let_through() -> None:
    given = {"interface_v1": 1, "prefetch_threshold": 9, "lease_s": 3, "socket_path": "unix:/s"}
    options = HiCacheOptions.from_extra_config(given)
    assert (options.lease_s, options.socket_path) == (3.0, "/s")
    for wrong, words in (
        ({}, '"interface_v1": 1 is missing'),
        ({"interface_v1": 1, "lease": 3}, "did you mean lease_s"),
        ({"interface_v1": 1, "lease_s": 0}, "allowed is a number of seconds from 0.1 to 600"),
        ({"interface_v1": 1, "unshared": "yes"}, "allowed is true or false"),
        ({"interface_v1": 1, "socket_path": "kvd.sock"}, "allowed is an absolute path"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            HiCacheOptions.from_extra_config(wrong)
