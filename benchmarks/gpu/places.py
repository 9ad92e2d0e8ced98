"""Whether there is a device, and where a device's results lie."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cuda import Cuda, Failed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
VLLM_WHEELS = ROOT / ".whl-vllm"  # see vllm_wheels.py
SHARED_MEMORY = Path("/dev/shm")
# The largest at once: the mover's extents and a pool of twice as much, with a quarter left.
NEEDED_BYTES = 8 << 30
MOUNTS = Path("/proc/mounts")


def no_device() -> str | None:
    """Why there is no GPU to use here, in one line; None where there is one. Makes no context."""
    try:
        return None if Cuda().devices() else "the driver knows of no device"
    except Failed as error:
        return str(error)


def has_vllm() -> bool:
    """Whether vLLM was brought along for this machine."""
    return any(VLLM_WHEELS.glob("*.whl"))


def unpack(wheels: Sequence[Path], target: str) -> bool:
    """Unpack wheels, and nothing that they need, into a folder; whether that went well."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", target]
    return subprocess.run([*pip, *map(str, wheels)], check=False).returncode == 0


def flaw_of_shared_memory(
    folder: Path = SHARED_MEMORY, needed: int = NEEDED_BYTES, mounts: Path = MOUNTS
) -> str | None:
    """Why probe, tests and copies will not find what they need in /dev/shm, in one line; None
    where they will. A driver pins no pages of a disk's files, and a full tmpfs ends its users."""
    if not folder.is_dir():
        return f"there is no {folder}: mount -t tmpfs none {folder}"
    on_it = [line.split() for line in mounts.read_text().splitlines() if f" {folder} " in line]
    if not on_it or on_it[-1][2] != "tmpfs":
        return f"{folder} is no tmpfs, whose pages can be pinned: mount -t tmpfs none {folder}"
    free = shutil.disk_usage(folder).free
    if free < needed:
        return (
            f"{folder} has room for {free >> 20} MiB, and {needed >> 20} MiB are needed: "
            f"mount -o remount,size={needed >> 30}g {folder}"
        )
    return None


def folder_of(device_name: str) -> Path:
    """Where results of that device lie: benchmarks/results/<its name in lower case>."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return RESULTS / (slug or "unknown-device")


def commit() -> str:
    """The checkout's commit, or KVD_COMMIT where the files came without git; else `unknown`."""
    if told := os.environ.get("KVD_COMMIT"):
        return told
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def write(document: dict[str, Any], device_name: str, name: str, output: Path | None) -> Path:
    """Write a result as JSON to `output`, or to the device's folder; and a copy of it to the
    folder that KVD_GPU_RESULTS names, if it names one."""
    target = output or folder_of(device_name) / f"{name}.json"
    text = json.dumps(document, indent=1) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    if elsewhere := os.environ.get("KVD_GPU_RESULTS"):
        folder = Path(elsewhere)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(text)
    return target
