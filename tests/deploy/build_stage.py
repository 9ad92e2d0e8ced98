"""Runs the first stage of the Dockerfile without Docker, in a directory of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Absolute paths of the image that the stage writes to; each becomes one under the scratch root.
IMAGE_PATHS = re.compile(r"(?<![\w./-])/(?=(?:src|build|opt/kvd)\b)")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its continued lines joined."""

    name: str
    rest: str


def instructions(dockerfile: Path) -> list[Instruction]:
    """All instructions in order, comments left out."""
    lines = [
        line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    split = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [Instruction(name, rest.strip()) for name, _, rest in split]


def first_stage(dockerfile: Path) -> list[Instruction]:
    """What stands between the first FROM and the second."""
    every = instructions(dockerfile)
    starts = [index for index, step in enumerate(every) if step.name == "FROM"]
    assert len(starts) == 2, "a build stage and the image itself"
    return every[starts[0] + 1 : starts[1]]


def run_first_stage(
    context: Path, scratch: Path, arguments: Mapping[str, str] | None = None
) -> None:
    """Carry the stage out: COPY copies from the context, RUN runs in bash, paths moved.

    `arguments` are docker's --build-arg: the stage sees those that it names by ARG.
    Raises CalledProcessError with the step's output when one fails.
    """
    where = scratch / "src"
    where.mkdir()
    environment = clean_environment()
    for step in first_stage(context / "Dockerfile"):
        if step.name == "COPY":
            *sources, target = step.rest.split()
            for source in sources:
                copy(context / source, where, target)
        elif step.name == "RUN":
            moved = IMAGE_PATHS.sub(f"{shlex.quote(str(scratch))}/", step.rest)
            moved = moved.replace("--no-cache-dir ", "")  # what was downloaded before will do
            subprocess.run(
                ["/bin/bash", "-euo", "pipefail", "-c", moved],
                cwd=where,
                check=True,
                env=environment,
            )
        elif step.name == "ARG":
            name, _, default = step.rest.partition("=")
            environment[name] = (arguments or {}).get(name, default)
        else:
            assert step.name in ("WORKDIR", "SHELL"), f"this runner doesn't know {step.name}"


def copy(source: Path, where: Path, target: str) -> None:
    """Copy as COPY does: into a directory where the target ends in `/`, else to that name."""
    to = where / target / source.name if target.endswith("/") else where / target
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, to)


def clean_environment() -> dict[str, str]:
    """This process's environment without what would show the steps our own packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
