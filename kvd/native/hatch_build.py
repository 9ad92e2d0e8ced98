"""Builds the library of `copies.c`, when kvd is installed, put into a wheel, or as a command.

    python kvd/native/hatch_build.py    builds it beside its source, unless it is up to date

The compiler is $CC, or cc, gcc or clang, or zig's where PyPI's ziglang is installed. Without one
kvd is installed all the same, and numpy copies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).with_name("copies.c")
LIBRARY = Path(__file__).with_name("copies.so")
FLAGS = (
    "-std=c11",
    "-O3",
    "-fno-sanitize=all",
    "-fPIC",
    "-shared",
    "-pthread",
    "-s",
    "-Wall",
    "-Wextra",
)
COMPILE_S = 300.0


class NativeLibrary(BuildHookInterface[Any]):
    """hatchling's hook: adds the library to a wheel, or builds it in the tree for an editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it. Never fails: a wheel without it is as good, and slower."""
        if version == "editable":
            say(build(LIBRARY))
            return
        self._directory = tempfile.mkdtemp(prefix="kvd-native-")
        built = Path(self._directory, LIBRARY.name)
        flaw = build(built)
        say(flaw)
        if not flaw:
            build_data["force_include"][str(built)] = f"kvd/native/{LIBRARY.name}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Leave nothing behind."""
        if version != "editable":
            shutil.rmtree(self._directory, ignore_errors=True)


def compilers() -> list[list[str]]:
    """Commands to try, in order."""
    named = os.environ.get("CC")
    if named:
        return [shlex.split(named)]
    found = [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if importlib.util.find_spec("ziglang"):
        # Other than the others it builds for the processor at hand, if it is not told.
        found.append([sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"])
    return found


def build(target: Path) -> str:
    """Make the library; why it could not be made, or "". What is there is replaced at once."""
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    flaw = "there is no C compiler: kvd copies by numpy"
    for compiler in compilers():
        with tempfile.TemporaryDirectory(prefix="kvd-native-") as directory:
            made = Path(directory, "copies.so")
            named = [f'-DKVD_SOURCE="{source}"', "-o", str(made), str(SOURCE)]
            try:
                done = subprocess.run(
                    [*compiler, *FLAGS, *named],
                    capture_output=True,
                    text=True,
                    timeout=COMPILE_S,
                    check=False,
                )
                flaw = "" if done.returncode == 0 else done.stderr.strip() or "no word of why"
                if not flaw:
                    replacement = target.with_name(f".{target.name}.{os.getpid()}")
                    shutil.copyfile(made, replacement)
                    replacement.replace(target)
                    return ""
            except (OSError, subprocess.SubprocessError) as error:
                flaw = str(error)
            flaw = f"{compiler[0]} can't build copies.c, so kvd copies by numpy: {flaw}"
    return " ".join(flaw.split())


def say(flaw: str) -> None:
    """One line for who installs kvd."""
    if flaw:
        print(f"kvd: {flaw:.300}", file=sys.stderr)  # noqa: T201 - a build has no log


def is_up_to_date() -> bool:
    """Whether the library in the tree was built from its source as it is now."""
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return LIBRARY.exists() and source.encode() in LIBRARY.read_bytes()


if __name__ == "__main__" and not is_up_to_date():
    say(build(LIBRARY))
