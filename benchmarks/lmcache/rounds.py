"""Interleaved rounds: in each, every side has one spell, and who begins changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import report

THEM = "LMCache"
Spell = Callable[[], list[float]]


def in_turn(spells: Mapping[str, Spell], rounds: int) -> dict[str, list[list[float]]]:
    """What each side's spells gave, by round; one round more goes ahead as warm-up."""
    taken: dict[str, list[list[float]]] = {side: [] for side in spells}
    order = list(spells)
    for number in range(rounds + 1):
        order.append(order.pop(0))
        for side in order:
            values = spells[side]()
            if number:
                taken[side].append(values)
    return taken


def latencies(taken: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """By side p50 and p99 in ms: spreads over the rounds, and p99 of all calls; ratios to LMCache.

    A ratio is of the two p50 of one round: how many times as long LMCache takes.
    """
    middles = {side: [report.percentile(s, 50) for s in spells] for side, spells in taken.items()}
    row: dict[str, Any] = {}
    for side, spells in taken.items():
        row[side] = {
            "p50_ms": report.Spread.of(middles[side]),
            "p99_ms": report.Spread.of([report.percentile(s, 99) for s in spells]),
            "p99_of_all_ms": report.percentile([ms for spell in spells for ms in spell], 99),
            "calls": sum(len(spell) for spell in spells),
        }
        if side != THEM:
            row[side]["times_as_long"] = report.ratios(middles[THEM], middles[side])
    return row
