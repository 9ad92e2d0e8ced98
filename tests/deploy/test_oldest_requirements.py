"""What kvd and kvd-client ask for at least, and nothing newer: whether it is enough."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.control.running_daemon import daemon

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LEAST = re.compile(r"([\w-]+)>=([\d.]+)")
GIVE = ("--only-binary=:all:", "--disable-pip-version-check", "--quiet")


def oldest() -> dict[str, str]:
    """The least version of each package that either may be installed with."""
    found: dict[str, str] = {}
    for project in ("client/pyproject.toml", "pyproject.toml"):  # kvd asks for more
        asked = tomllib.loads((ROOT / project).read_text())["project"]["dependencies"]
        found |= {match[1]: match[2] for match in map(LEAST.match, asked) if match}
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables by which a Python has the oldest versions before those of this environment."""
    place = tmp_path_factory.mktemp("oldest")
    pinned = [f"{name}=={version}" for name, version in oldest().items()]
    pip = [sys.executable, "-m", "pip", "install", *GIVE, "--target", str(place), *pinned]
    done = subprocess.run(pip, check=False, capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"they can't be had here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    paths = os.pathsep.join(map(str, (place, ROOT, ROOT / "client/src")))
    return {"PYTHONPATH": paths}


HELP_OF_EACH = """
from kvd.cli.commands import CLI, COMMANDS
for name, _, _ in COMMANDS:
    CLI.main([name, "--help"], prog_name="kvd", standalone_mode=False)
"""


def run(*words: str | Path, environment: dict[str, str]) -> str:
    """What a Python printed with these variables; it must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        check=False, capture_output=True, text=True, cwd="/", env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_they_are_what_is_tried(environment: dict[str, str]) -> None:
    tell = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]), sep='\\n')"
    found = run("-c", tell, *oldest(), environment=environment).split()
    for (name, least), version in zip(oldest().items(), found, strict=True):
        assert f"{version}.".startswith(f"{least}."), name


def test_each_command_can_be_called(environment: dict[str, str]) -> None:
    assert "Run the daemon" in run("-c", HELP_OF_EACH, environment=environment)


def test_an_engine_loads_what_one_before_it_stored(environment: dict[str, str]) -> None:
    with daemon(environment=environment) as running:
        example = (ROOT / "examples/embed_engine.py", running.socket)
        assert run(*example, environment=environment).startswith("loaded 0 of 80 tokens")
        assert run(*example, environment=environment).startswith("loaded 80 of 80 tokens")
        told = run("-m", "kvd", "status", "--socket", running.socket, environment=environment)
        assert "5 ready" in told


def test_messages_over_the_limit_take_no_memory(environment: dict[str, str]) -> None:
    file = ROOT / "tests/control/test_memory_return.py"
    chosen = ("-k", "over_the_limit", "-p", "no:cacheprovider", "--rootdir", ROOT)
    assert "1 passed" in run("-m", "pytest", file, *chosen, environment=environment)
