"""The facts that the GPU design stands on: `python3 -m benchmarks.gpu.probe [QUESTION ...]`.

Needs the standard library, numpy and the driver; CuPy or torch for what asks of them. Nothing of
kvd is in it, so that its answers don't depend on what they are to judge. Each question is asked in
processes of its own, which are ended after it; one that fails or hangs costs only its answer.
Answers come with their raw samples, as JSON. The card's settings are only read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import places
from benchmarks.gpu.probing import device_memory, host_memory, nvml, sharing, speed
from benchmarks.gpu.probing.remote import Refused, remotes
from benchmarks.gpu.probing.scale import TINY, Scale

# In the order of what the design would miss most, should the time run out.
QUESTIONS: dict[str, Callable[[Scale], dict[str, Any]]] = {
    "handles": sharing.handles,
    "namespaces": sharing.namespaces,
    "footprint": device_memory.footprint,
    "copies": speed.copies,
    "products": speed.products,
    "deaths": device_memory.deaths,
    "host_memory": host_memory.host_memory,
    "wakes": speed.wakes,
    "locked_memory": host_memory.locked_memory,
    "kinds": sharing.kinds,
}
BROKEN = (Refused, TimeoutError, OSError, LookupError, ValueError, TypeError, AssertionError)
PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "cuda-bindings", "nvidia-ml-py")
KERNEL_FILES = (
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/proc/sys/vm/nr_hugepages",
    "/proc/version",
)


def surroundings() -> dict[str, Any]:
    """The machine around the device, as far as answers may hang on it."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    files = {path: Path(path).read_text().strip() for path in KERNEL_FILES if Path(path).exists()}
    return {
        "nvidia_smi": nvml.query(nvml.FACTS),
        "packages": versions,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "user": os.getuid(),
        "files": files,
    }


def ask(names: list[str], scale: Scale, limit_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each question with its answer; those that the time does not reach are said to be left out."""
    began = time.monotonic()
    for name in names:
        since = time.monotonic()
        if since - began > limit_s:
            yield name, {"failed": "not asked: the probe's time was up"}
            continue
        try:
            told: dict[str, Any] = {"answer": QUESTIONS[name](scale)}
        except BROKEN as error:
            told = {"failed": f"{type(error).__name__}: {error}"}
        yield name, told | {"seconds": time.monotonic() - since} | stamp()


def stamp() -> dict[str, str]:
    """When an answer is of, and of what commit."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"time": now, "commit": places.commit()}


def answered_before(document: dict[str, Any], target: Path) -> dict[str, Any]:
    """What a file there has of answers of the same device, driver and sizes."""
    try:
        kept = json.loads(target.read_text())
        if _subject(kept) != _subject(document):
            return {}
        of_all = {name: kept[name] for name in ("time", "commit")}
        return {name: of_all | told for name, told in kept["questions"].items()}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _subject(document: dict[str, Any]) -> str:
    """What must be the same for answers of two runs to lie in one file."""
    driver = (document["machine"]["nvidia_smi"] or {}).get("driver_version")
    return json.dumps([document["device"]["name"], driver, document["scale"]])


def main() -> int:
    """Ask, print what could be answered, write the JSON; 1 without a device or on a failure."""
    parser = argparse.ArgumentParser(description="Facts of a GPU machine, as JSON.")
    asked = ", ".join(QUESTIONS) + "; the other answers of the file stay"
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=asked)
    parser.add_argument("--output", type=Path, help="JSON file (default: by the device's name)")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds to begin questions in")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the probe itself")
    options = parser.parse_args()
    names = options.questions or list(QUESTIONS)
    if unknown := set(names) - set(QUESTIONS):
        parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {list(QUESTIONS)}")
    if (reason := places.no_device()) is not None:
        print(f"no GPU to probe: {reason}", file=sys.stderr)
        return 1
    try:
        with remotes(1) as (observer,):
            device = observer.call("device")
    except BROKEN as error:
        print(f"the GPU can't be used: {error}", file=sys.stderr)
        return 1
    scale = TINY if options.tiny else Scale().fitted(device["free_bytes"])
    print(f"{device['name']}, {device['uuid']}", flush=True)
    answers: dict[str, Any] = {}
    document = {
        "probe": 1,
        **stamp(),
        "device": device,
        "machine": surroundings(),
        "scale": scale.__dict__,
        "questions": answers,
    }
    if options.questions:
        target = options.output or places.folder_of(device["name"]) / "gpu-probe.json"
        answers |= answered_before(document, target)
    for name, told in ask(names, scale, options.limit):
        answers[name] = told
        seconds = f" ({told['seconds']:.1f} s)" if "seconds" in told else ""
        print(f"  {name}: {told.get('failed', 'answered')}{seconds}", flush=True)
        # After each: what ends the probe early takes no answer with it.
        target = places.write(document, device["name"], "gpu-probe", options.output)
    print(f"written to {target}")
    return 1 if any("failed" in answers[name] for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
