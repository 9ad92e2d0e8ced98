"""What metrics tell of the tiers below host memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvd.core.upkeep.statistics import Statistics

# Name, help, and where in a tier's counters it stands.
_TIER_COUNTERS = (
    ("kvd_tier_hits", "Blocks sought in a tier that it held.", "hits"),
    ("kvd_tier_misses", "Blocks sought in a tier that it did not hold.", "misses"),
    ("kvd_tier_blocks_promoted", "Blocks brought up from a tier.", "promoted"),
    ("kvd_tier_bytes_promoted", "Bytes brought up from a tier.", "promoted_bytes"),
    ("kvd_tier_blocks_failed", "Blocks that a tier held and could not read.", "failed_reads"),
    (
        "kvd_tier_blocks_given_up",
        "Blocks that a tier held and that got no room in host memory in time.",
        "unpromoted",
    ),
    (
        "kvd_tier_blocks_too_slow",
        "Blocks not asked of a tier: by its pace they would come too late.",
        "too_slow",
    ),
    ("kvd_tier_blocks_refused", "Blocks not asked of a tier: its process took no more.", "refused"),
    (
        "kvd_tier_blocks_unanswered",
        "Blocks asked of a tier that it did not answer in time.",
        "unanswered",
    ),
    ("kvd_tier_blocks_written", "Blocks written to a tier.", "written"),
    ("kvd_tier_bytes_written", "Bytes written to a tier.", "written_bytes"),
    ("kvd_tier_blocks_unwritten", "Blocks that a tier could not write.", "failed_writes"),
    (
        "kvd_tier_blocks_dropped",
        "Blocks that left host memory unwritten: too much was on its way there.",
        "dropped",
    ),
)


def tier_families(now: Statistics) -> Iterator[Metric]:
    """Those of each tier; none where there is no tier."""
    if not now.tiers:
        return
    for name, meaning, field in _TIER_COUNTERS:
        counter = CounterMetricFamily(name, meaning, labels=["tier"])
        for tier in now.tiers:
            counter.add_metric([tier.name], getattr(tier.counters, field))
        yield counter
    meaning = "Blocks and calls that failed in a tier's store, by reason."
    errors = CounterMetricFamily("kvd_tier_errors", meaning, labels=["tier", "reason"])
    for tier in now.tiers:
        for reason, count in sorted(tier.errors.items()):
            errors.add_metric([tier.name, reason], count)
    yield errors
    gauges = (
        ("kvd_tier_serving", "1 while a process serves the tier.", "is_serving"),
        ("kvd_tier_bytes_down", "Bytes on their way to a tier.", "bytes_down"),
        ("kvd_tier_bytes_up", "Bytes on their way from a tier.", "bytes_up"),
        (
            "kvd_tier_answer_seconds",
            "Mean time of a tier's answer whether it holds blocks.",
            "answer_seconds",
        ),
        ("kvd_tier_read_seconds", "Mean time of a copy from a tier.", "read_seconds"),
    )
    for name, meaning, field in gauges:
        gauge = GaugeMetricFamily(name, meaning, labels=["tier"])
        for tier in now.tiers:
            gauge.add_metric([tier.name], float(getattr(tier, field)))
        yield gauge
