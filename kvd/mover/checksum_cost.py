"""Whether movers of this machine make checksums at almost no cost; see docs/adr/0024."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvd import native

_DEVICES = Path("/dev")


def why_checksums_cost(devices: Path = _DEVICES) -> str:
    """Why it would be felt that every copy is summed up; "" where it would not.

    The native library sums up what it copies in host memory in the same pass. numpy reads the
    bytes once more, and so does a mover of a GPU.
    """
    if native.library() is None:
        return f"no native library sums up what it copies: {native.why_not()}"
    if _uses_gpus(devices):
        return "this machine has GPUs, whose movers would read every byte once more"
    return ""


def _uses_gpus(devices: Path) -> bool:
    """Whether a GPU's memory can be registered: there is one, and what movers need for it."""
    return bool(importlib.util.find_spec("cupy")) and any(devices.glob("nvidia[0-9]*"))
