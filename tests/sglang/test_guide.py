"""The guide's flags and its example's are those of the SGLang that is tested with."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.fields import memory
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.server_args import ServerArgs

from kvd_client.integrations.sglang.options import HiCacheOptions
from kvd_client.integrations.sglang.pools import NO_FILES
from tests.daemons import ROOT

FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
OURS = {"socket", "pool-directory", "pool-bytes", "checkout"}
LASTING, ENDING = "exec sleep 60", "exit 3"
VALUES = ("page_first", "page_first_direct", "page_first_kv_split", "layer_first", "page_head")


@pytest.mark.parametrize("page", ["docs/sglang.md", "examples/sglang/run.sh"])
def test_every_flag_is_one_of_sglangs(page: str) -> None:
    named = set(FLAG.findall((ROOT / page).read_text())) - OURS
    assert "hicache-storage-backend-extra-config" in named
    known = {name for kind in ServerArgs.__mro__ for name in vars(kind).get("__annotations__", {})}
    assert {flag for flag in named if flag.replace("-", "_") not in known} == set()


def test_what_the_guide_says_of_layouts_and_modes_sglang_takes() -> None:
    taken = Path(memory.__file__).read_text()
    said = (ROOT / "docs" / "sglang.md").read_text()
    for value in (*VALUES, "buffer_only"):
        assert f'"{value}"' in taken
        assert value in said


def test_what_sglang_itself_puts_beside_the_options_is_let_through() -> None:
    source = Path(unified_radix_cache.__file__).read_text()
    added = re.findall(r'storage_extra_config\.setdefault\(\s*"(\w+)"', source)
    assert added == ["file_storage_path"]
    HiCacheOptions.from_extra_config({"interface_v1": 1, **dict.fromkeys(added, "/elsewhere")})


@pytest.mark.parametrize("is_file", [False, True])
def test_sglang_heeds_the_allocator_in_the_flag_alone_as_guide_and_error_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool
) -> None:
    text = '{"interface_v1": 1, "allocator": "shm"}'
    flag = str(tmp_path / "kvd.json")
    Path(flag).write_text(text)
    flag = f"@{flag}" if is_file else text
    memory_arguments = SimpleNamespace(
        hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=flag
    )
    monkeypatch.setattr(common, "get_memory", lambda: memory_arguments)
    parsed = HybridCacheController.parse_storage_backend_extra_config(flag)
    assert parsed[0] == {"interface_v1": 1, "allocator": "shm"}
    assert (common.get_allocator_type() == "shm") is not is_file
    assert "@file" in NO_FILES
    assert "@file" in (ROOT / "docs" / "sglang.md").read_text()


@pytest.mark.parametrize("ends", ["kvd", "python", "kvd python"])
def test_the_example_ends_with_a_word_where_daemon_or_engine_ends(
    tmp_path: Path, ends: str
) -> None:
    for command in ("kvd", "python", "curl"):
        does = ENDING if command in (*ends.split(), "curl") else LASTING
        (tmp_path / command).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / command).chmod(0o755)
    ran = subprocess.run(
        ["bash", ROOT / "examples" / "sglang" / "run.sh", "a-model"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30.0,
        check=False,
    )
    assert ran.returncode == 1
    assert "kvd or an engine has ended" in ran.stderr
    assert not list(tmp_path.glob("tmp.*"))  # removed together with the pool
