"""The miss-ratio curve: how near it comes to replays, and what it costs.

Each trace is replayed through the daemon's core with a pool of a tenth of its distinct blocks
(policy lru). Its estimate for half and twice that pool stands beside replays with such pools. The
cost is the processor time inside the sample, as a share of that of the core; `told_ratio` has it as
a share of the control process's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.hit_ratio import MADE_UP, made_up_trace
from kvd.cli.replay.command import capacity_of, replay
from kvd.cli.replay.device import StoreRule
from kvd.cli.replay.engine import ReplayEngine
from kvd.cli.replay.trace import TraceRequest, read_trace
from kvd.core.model.reuse import ReuseSample

SCALES = (0.5, 2.0)
FRACTION = 0.1
BAR_POINTS = 2.0


class Timed:
    """Stands in for a method, and adds its processor time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*given, **named)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def sample_seconds(requests: Sequence[TraceRequest], blocks: int) -> float:
    """Processor time that the sample takes of these requests."""
    return _replayed(requests, blocks)[0]


def _replayed(
    requests: Sequence[TraceRequest], blocks: int
) -> tuple[float, float, dict[float, float]]:
    """Seconds of the sample and of the core, and the estimates."""
    timed = Timed()
    methods = {name: getattr(ReuseSample, name) for name in ("use", "evicted")}
    for name, method in methods.items():
        setattr(ReuseSample, name, timed.around(method))
    try:
        engine = ReplayEngine("lru", blocks, StoreRule())
        began = time.thread_time()
        for each in requests:
            engine.serve(each)
        whole = time.thread_time() - began
    finally:
        for name, method in methods.items():
            setattr(ReuseSample, name, method)
    curve = engine.curve()
    assert curve is not None, "nothing was used"
    return timed.seconds, whole, dict(curve.points)


def measure(requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """What is estimated and what is found, by scale; and the cost."""
    blocks = capacity_of(requests, FRACTION)
    spent, whole, estimated = _replayed(requests, blocks)
    found = {
        scale: replay(requests, "lru", max(1, round(scale * blocks))).hit_ratio for scale in SCALES
    }
    return {
        "pool_blocks": blocks,
        "share_of_core": spent / whole,
        "estimated": {str(scale): estimated[scale] for scale in SCALES},
        "replayed": {str(scale): found[scale] for scale in SCALES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    named = {path.name.split(".")[0]: read_trace(path) for path in options.traces}
    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    for name, requests in (named or {MADE_UP: made_up_trace()}).items():
        found = results[name] = measure(requests[: options.requests])
        for scale in map(str, SCALES):
            estimated, replayed = found["estimated"][scale], found["replayed"][scale]
            points = 100 * abs(estimated - replayed)
            cells = (f"{estimated:.1%}", f"{replayed:.1%}", f"{points:.1f}")
            rows.append([name, f"{scale} x", *cells, f"{found['share_of_core']:.1%}"])
    header = ["trace", "pool", "estimated", "replayed", f"points apart (bar {BAR_POINTS:g})"]
    print(report.table([*header, "of the core's time"], rows))
    report.write("reuse_curve", results, options.output)


if __name__ == "__main__":
    main()
