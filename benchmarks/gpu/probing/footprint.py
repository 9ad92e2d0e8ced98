"""Device memory that a process takes before it copies a byte, step by step."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.probing.remote import Remote, remotes, tried
from benchmarks.gpu.probing.scale import Scale

Step = tuple[str, str, dict[str, Any]]  # name, order, its arguments

STEPS: tuple[Step, ...] = (
    ("driver loaded", "load_driver", {}),
    ("primary context", "start", {}),
    ("one stream", "make_streams", {"count": 1}),
    ("16 more streams", "make_streams", {"count": 16}),
    ("CuPy's runtime", "import_cupy", {}),
    ("a compiled kernel", "make_kernel", {}),
    ("256 MiB of pinned memory", "pin", {"size": 256 << 20}),
)


def footprint(scale: Scale) -> dict[str, Any]:
    """What each step of a mover takes, then those of an engine with torch, seen from outside."""
    with remotes(1) as (observer,):
        found: dict[str, Any] = {"mover": _steps(observer, STEPS)}
        torch_steps: tuple[Step, ...] = (STEPS[0], STEPS[1], ("torch", "import_torch", {}))
        if scale.torch:
            found["engine"] = _steps(observer, torch_steps)
    return found


def _steps(observer: Remote, steps: tuple[Step, ...]) -> list[Any]:
    rows = []
    remote = Remote()
    try:
        for name, order, arguments in steps:
            before = observer.call("memory")
            began = time.perf_counter()
            told = tried(lambda o=order, a=arguments: remote.call(o, **a))  # type: ignore[misc]
            row = {"step": name, "seconds": time.perf_counter() - began}
            row["bytes"] = before - observer.call("memory")
            rows.append(row | ({"failed": told["failed"]} if "failed" in told else {}))
    finally:
        remote.end()
    return rows
