"""What every benchmark shares: the machine's description, interleaved pairs, and the output.

A ratio is the median over interleaved pairs: each pair runs both sides back to back, the order
alternating, so that a noisy neighbour hits both.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import places
from kvd import native


@dataclass(frozen=True)
class Spread:
    """Median and range of some measurements, in the unit that the name tells."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}..{self.high:.3g})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the values lie (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


def machine() -> dict[str, Any]:
    """Where and of what commit a figure comes; `cores` are those that may be used."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "commit": places.commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "native": library.level if (library := native.library()) else native.why_not(),
        "load_1m": os.getloadavg()[0],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def interleaved(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> tuple[list[float], list[float]]:
    """Run both sides `pairs` times back to back, alternating which goes first."""
    left: list[float] = []
    right: list[float] = []
    for number in range(pairs):
        if number % 2:
            right.append(theirs())
            left.append(ours())
        else:
            left.append(ours())
            right.append(theirs())
    return left, right


def ratios(left: Sequence[float], right: Sequence[float]) -> Spread:
    """Spread of left/right over the pairs."""
    return Spread.of([a / b for a, b in zip(left, right, strict=True)])


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell."""
    cells = [[str(c) for c in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def write(name: str, results: dict[str, Any], output: Path | None) -> None:
    """Write results with the machine's description as JSON: to a file, or to results/."""
    target = output or Path(__file__).parent / "results" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": name, "machine": machine(), "results": results}
    target.write_text(json.dumps(document, indent=1, default=_plain) + "\n")
    print(f"written to {target}")


def _plain(value: object) -> Any:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} can't be written as JSON")
