"""Every command of every guide runs as it is written, or its guide says why it isn't run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvd.cli.commands import CLI
from tests.guides.blocks import Block, every_block
from tests.tidy.source import ROOT
from tests.waiting import wait_until

SECONDS = 60  # for one block; most take one
RUN = [block for block in every_block() if block.is_run]
OWN_MACHINE = ["unshare", "-m", "-n", "sh", str(ROOT / "tests" / "guides" / "house.sh")]
KVD = r"^(\S*\bkvd "
SERVES = re.compile(KVD + r"serve\b(?![^\n]*--(?:check|print-config))[^#\n]*)", re.MULTILINE)
ASKS = re.compile(KVD + r"(?!serve\b))", re.MULTILINE)
# What goes on until Ctrl-C gets it; and the doctor may find that this machine could be better.
ENDLESS = re.compile(
    KVD + r"(?:status\b[^#\n]*--watch|events\b[^#\n]*--follow)[^#\n]*)", re.MULTILINE
)
DOCTOR = re.compile(KVD + r"(?:doctor|serve\b[^#\n]*--check)[^#\n]*)", re.MULTILINE)
READY = (
    " & served=$!; trap 'kill $served; wait $served' EXIT;"
    " until kvd status >/dev/null 2>&1; do kill -0 $served; sleep 0.1; done "
)


def script(text: str, given: dict[str, str]) -> str:
    """The block for bash: as it is written, but for Ctrl-C, and names that are to be filled in."""
    text = text.replace("\\\n", " ")
    for name, value in given.items():
        text = re.sub(rf"(?<![\w/.-]){name}(?![\w/])", value, text)
    text = SERVES.sub(lambda found: found[1].rstrip() + READY, text)
    text = ENDLESS.sub(r"timeout -k 3 3 \1 || [ $? = 124 ] ", text)
    text = DOCTOR.sub(r"{ \1 || [ $? = 3 ]; } ", text)
    return f"set -euo pipefail\n{text}"


def commands_of_kvd() -> list[tuple[str, str]]:
    """Every command of kvd's in a block, run or not, with the block's place."""
    return [
        (block.name, line)
        for block in every_block()
        for line in block.text.replace("\\\n", " ").splitlines()
        if re.match(r"(?:\S*/)?kvd [a-z]", line)
    ]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the names in capitals."""
    place = tmp_path_factory.mktemp("given")
    trace = place / "trace.jsonl"
    lines = [
        {"timestamp": n, "input_length": 1024, "output_length": 9, "hash_ids": [n % 3, 100 + n % 7]}
        for n in range(40)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "torch_dtype": "bfloat16", "model_type": "llama",
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(model))
    return {"FILE": str(trace), "MODEL": str(place)}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `kvd`, `python` and `helm` are this checkout's."""
    folder = tmp_path_factory.mktemp("programs")
    python = shlex.quote(sys.executable)
    for name, command in {"kvd": "-m kvd", "python": "", "helm": "-m tests.guides.helm"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {python} {command} "$@"\n')
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    path = os.pathsep.join([str(folder), kept.get("PATH", "")])
    return {**kept, "PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'client' / 'src'}"}


@pytest.fixture(scope="module")
def machine(programs: dict[str, str]) -> Iterator[list[str]]:
    """The words that run a command beside a daemon that an engine has used."""
    tried = subprocess.run([*OWN_MACHINE, "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no machine of the guides' own can be made here: {tried.stderr.strip()}")
    serve = [*OWN_MACHINE, "kvd", "serve", "--pool-bytes", "64MiB"]
    with subprocess.Popen(serve, env=programs, cwd=ROOT, stderr=subprocess.PIPE) as daemon:
        try:
            socket = Path(f"/proc/{daemon.pid}/root/run/kvd/kvd.sock")
            wait_until(socket.exists, "the guides' daemon", SECONDS)
            inside = ["nsenter", "-m", "-n", "-t", str(daemon.pid), f"--wdns={ROOT}"]
            for _ in range(2):
                engine = [*inside, "python", "examples/embed_engine.py", "/run/kvd/kvd.sock"]
                subprocess.run(engine, check=True, env=programs, capture_output=True)
            yield inside
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate()


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_the_block_runs_as_it_is_written(
    block: Block, machine: list[str], programs: dict[str, str], given: dict[str, str]
) -> None:
    for module in ("helm_python", "kubernetes_validate"):
        if block.text.startswith("helm ") and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is missing: .ci/venv charts")
    for program in ("curl", "systemd-sysusers", "systemd-tmpfiles"):
        if program in block.text and shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here")
    text = script(block.text, given)
    where = machine if ASKS.search(block.text) and not SERVES.search(block.text) else OWN_MACHINE
    with subprocess.Popen(
        [*where, "bash", "-c", text],
        cwd=ROOT,
        env=programs,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as ran:
        try:
            said, _ = ran.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ran.pid, signal.SIGKILL)
    assert ran.returncode == 0, f"{text}\n{said.decode()}"


@pytest.mark.parametrize(("where", "line"), commands_of_kvd(), ids=lambda part: part)
def test_kvd_takes_the_command_as_it_is_written(where: str, line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    context = click.Context(CLI, info_name="kvd")
    command = CLI.get_command(context, name)
    assert command is not None, name
    if name == "serve":
        return  # its settings have a reader of their own
    parser = command.make_parser(click.Context(command, info_name=name))
    _, _, order = parser.parse_args(words)
    once = [each.name for each in order if isinstance(each, click.Option) and not each.multiple]
    assert sorted(once) == sorted(set(once)), "of an option that is given twice the last one counts"


def test_images_are_built_with_the_tags_that_the_chart_asks_for() -> None:
    chart = ROOT / "helm" / "kvd"
    version = re.findall(r"(?m)^appVersion: (.+)$", (chart / "Chart.yaml").read_text())
    engine = re.findall(r'repository: vllm-kvd, tag: "(.+?)"', (chart / "values.yaml").read_text())
    built = [block.text for block in every_block() if block.guide == "docs/kubernetes.md"]
    for image in (f"REGISTRY/kvd:{version[0]}", f"REGISTRY/vllm-kvd:{engine[0]}"):
        assert any("docker build" in text and f"-t {image} " in text for text in built), image
    for text in built:
        assert "gpu.enabled=true" not in text or "--set image.tag=cuda12" in text, text


def test_enough_blocks_are_run() -> None:
    assert len(RUN) >= 8
    assert any(SERVES.search(block.text) for block in RUN)


def test_a_command_that_fails_fails_its_block(machine: list[str], programs: dict[str, str]) -> None:
    assert shutil.which("nsenter")
    for text in ("false\ntrue", "kvd statsu\ntrue", "kvd status --socket /nobody\ntrue"):
        ran = subprocess.run([*machine, "bash", "-c", script(text, {})], env=programs, check=False)
        assert ran.returncode != 0, text
