"""Whether a series rises: the Mann-Kendall test, and the slope by Theil and Sen.

Neither asks for normal errors, and one odd window moves neither much. See Hirsch, Slack and Smith,
Water Resources Research 18 (1982), for both.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SIGNIFICANT = 2.576  # standard errors: 1 %, two-sided
LEAST_WINDOWS = 8


@dataclass(frozen=True)
class Trend:
    """Of one series: per hour, in the series' unit."""

    median: float
    slope_per_hour: float
    z: float

    @property
    def rises(self) -> bool:
        """Whether it rises more surely than chance would have it once in 200 runs."""
        return self.z > SIGNIFICANT


def trend(hours: Sequence[float], values: Sequence[float]) -> Trend:
    """Of at least LEAST_WINDOWS values at these times."""
    if len(values) < LEAST_WINDOWS:
        raise ValueError(f"{len(values)} windows tell nothing; it takes {LEAST_WINDOWS}")
    pairs = list(itertools.combinations(range(len(values)), 2))
    slopes = [(values[j] - values[i]) / (hours[j] - hours[i]) for i, j in pairs]
    signs = sum((slope > 0) - (slope < 0) for slope in slopes)
    n = len(values)
    ties = [values.count(value) for value in set(values)]
    variance = n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)
    z = 0.0
    if signs and variance:
        z = math.copysign(abs(signs) - 1, signs) / math.sqrt(variance / 18)
    return Trend(statistics.median(values), statistics.median(slopes), z)


def by_windows(
    seconds: Sequence[float], values: Sequence[float], windows: int
) -> tuple[list[float], list[float]]:
    """The series as so many medians at the middles, in hours, of equal stretches of time."""
    first, last = seconds[0], seconds[-1]
    width = (last - first) / windows or 1.0
    cut: list[list[float]] = [[] for _ in range(windows)]
    for at, value in zip(seconds, values, strict=True):
        cut[min(windows - 1, int((at - first) / width))].append(value)
    filled = [(place, each) for place, each in enumerate(cut) if each]
    hours = [(first + (place + 0.5) * width) / 3600 for place, _ in filled]
    return hours, [statistics.median(each) for _, each in filled]
