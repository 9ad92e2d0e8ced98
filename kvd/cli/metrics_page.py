"""The page of metrics, made from the metrics themselves.

`python -m kvd.cli.metrics_page` writes docs/metrics.md; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import kvd
from kvd.core.keys import TenantId
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.reuse import SCALES, ReuseCurve
from kvd.core.model.tiers import TierCounters
from kvd.core.upkeep.statistics import Statistics, TierFigures
from kvd.observability.metrics import Metrics
from kvd.runtime.told_lookups import ToldLookups

PAGE = "metrics.md"
_EXTENT = 1 << 22


@dataclass(frozen=True, slots=True)
class Described:
    """One metric as Prometheus has it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def described() -> list[Described]:
    """Every metric that a daemon with tiers shows, by name."""
    metrics = Metrics(kvd.__version__)
    machine = Machine(MachineConfig(extents=4, extent_bytes=_EXTENT, tag_secret=bytes(16)))
    metrics.watch(lambda: _with_all(machine.statistics()))
    metrics.watch_ranks(lambda: ())
    told = ToldLookups(lambda _: True)
    told.add_unserved(TenantId("default"), 1.0)
    metrics.watch_lookups(told)
    metrics.watch_registry(lambda: 0)
    metrics.watch_sockets(lambda: None)
    metrics.tell_checksums(are_kept=True)
    machine.state.counters.hinted["retain", "followed"] = 1
    metrics.call_ended("Status", "OK", 0.001)
    metrics.refused("REASON")
    return sorted(_read(metrics), key=lambda each: each.name)


def _with_all(now: Statistics) -> Statistics:
    tier = TierFigures("disk", True, 0, 0, 0.0, 0.0, TierCounters(), {"TIMEOUT": 0})
    curve = ReuseCurve(tuple((scale, 0.5) for scale in SCALES), 1, 1.0)
    return replace(now, tiers=(tier,), curve=curve)


def _read(metrics: Metrics) -> Iterator[Described]:
    for family in metrics.registry.collect():
        labels: set[str] = set(getattr(family, "_labelnames", ()))
        for sample in family.samples:
            labels |= sample.labels.keys() - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        yield Described(name, family.type, tuple(sorted(labels)), family.documentation)


def page() -> str:
    """The page, in Markdown."""
    lines = [
        "# Metrics",
        "",
        "`python -m kvd.cli.metrics_page` makes this page from the code. They are at `/metrics` of",
        "`http_address` and `http_port`, in Prometheus's text format. How many values the labels",
        "`tenant`, `namespace` and `rank` may have is in [limits.md](limits.md).",
        "",
        "Alerts are in `deploy/prometheus/kvd-alerts.yaml`; [runbook.md](runbook.md) says what to",
        "do.",
        "A dashboard for Grafana is in `deploy/grafana/kvd.json`.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.meaning} |"
        for each in described()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(kvd.__file__).resolve().parents[1] / "docs" / PAGE).write_text(page())
