"""Every setting of the installed SGLang has been judged: it tells engines apart, or need not.

One that shapes the KV, or what is hashed, and that the namespace does not have lets an engine find
another's wrong bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import sglang
from sglang.srt.environ import EnvField, Envs
from sglang.srt.server_args import ServerArgs

from kvd_client.integrations.sglang import namespace
from kvd_client.integrations.sglang.options import HiCacheOptions
from kvd_client.integrations.sglang.pools import HostPool
from kvd_client.integrations.weights import HUB_SWITCHES
from tests.sglang.judged_arguments import ARGUMENTS
from tests.sglang.judged_variables import UNDECLARED, VARIABLES
from tests.sglang.rig import host_pool, mha_device_pool, storage_config

ROOT = Path(sglang.__file__).parent
DECLARED = {name for name, field in vars(Envs).items() if isinstance(field, EnvField)}
READ = re.compile(r"""(?:get_\w*env\w*|getenv|environ(?:\.\w+)?)\s*[(\[]\s*["']([A-Z]\w+)["']""")
WHAT_TO_DO = """
Read in SGLang what a new setting does. Where the same tokens under the same hash may have other KV
by it (other rounding, positions, layers or experts, keys left out, bytes in another order), add it
to SHAPING_ARGUMENTS or SHAPING_VARIABLES of kvd_client.integrations.sglang.namespace and to
tests/sglang/shaping_settings.py; else to a list of judged_arguments.py or judged_variables.py
there. Kernels that only add in another order are alike. In doubt it counts.
"""


def problems(
    settings: Collection[str], counted: Collection[str], lists: Mapping[str, str]
) -> list[str]:
    """What is wrong with the lists: one sentence a setting."""
    reasons: dict[str, list[str]] = {name: ["counted by the namespace"] for name in counted}
    for reason, text in lists.items():
        for name in text.split():
            reasons.setdefault(name, []).append(reason)
    return [
        *(f"{name}: nobody has judged it" for name in sorted(set(settings) - set(reasons))),
        *(f"{name}: SGLang has it no more" for name in sorted(set(reasons) - set(settings))),
        *(f"{name}: {' and '.join(why)}" for name, why in sorted(reasons.items()) if why[1:]),
    ]


class Asked:
    """SGLang's arguments, of which it is noted which are asked for."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return self.given.get(name)


@pytest.fixture
def counted_arguments(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """All that a namespace is made of, as the code asks for it."""
    given = {"speculative_draft_model_path": "/nowhere/draft", "model_path": "/nowhere/model"}
    arguments = Asked({**given, "load_format": "auto"})
    monkeypatch.setattr(namespace, "server_arguments", lambda: arguments)
    pool = HostPool("kv", host_pool(mha_device_pool()))
    options = HiCacheOptions.from_extra_config({"interface_v1": 1})
    namespace.build_namespace(storage_config({}), [pool], options, is_replicated=True)
    return arguments.names - {"_model_config"}


def test_every_argument_of_sglangs_has_been_judged(counted_arguments: set[str]) -> None:
    known = {name for kind in ServerArgs.__mro__ for name in vars(kind).get("__annotations__", {})}
    assert set(namespace.SHAPING_ARGUMENTS) <= counted_arguments
    found = problems(known, counted_arguments, ARGUMENTS)
    assert not found, "\n".join(found) + WHAT_TO_DO


def test_every_variable_of_sglangs_has_been_judged() -> None:
    counted = DECLARED & {*namespace.SHAPING_VARIABLES, *HUB_SWITCHES}
    found = problems(DECLARED, counted, VARIABLES)
    assert not found, "\n".join(found) + WHAT_TO_DO


def test_every_variable_that_sglang_reads_and_declares_nowhere_has_been_judged() -> None:
    read: set[str] = set()
    for room in ("srt", "kernels"):
        for file in (ROOT / room).rglob("*.py"):
            read.update(READ.findall(file.read_text()))
    counted = {*namespace.SHAPING_VARIABLES, namespace.RUN_VARIABLE} - DECLARED
    found = problems(read - DECLARED, counted, UNDECLARED)
    assert not found, "\n".join(found) + WHAT_TO_DO


@pytest.mark.parametrize("lists", [ARGUMENTS, VARIABLES, UNDECLARED])
def test_lists_are_sorted(lists: dict[str, str]) -> None:
    for text in lists.values():
        assert text.split() == sorted(text.split())


def test_a_setting_that_is_new_gone_or_judged_twice_is_named() -> None:
    lists = {"shapes nothing: ports": "port host", "shapes nothing: logs": "log host gone dtype"}
    assert problems(["dtype", "host", "log", "new", "port"], ["dtype"], lists) == [
        "new: nobody has judged it",
        "gone: SGLang has it no more",
        "dtype: counted by the namespace and shapes nothing: logs",
        "host: shapes nothing: ports and shapes nothing: logs",
    ]
