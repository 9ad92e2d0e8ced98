"""The bars of the GPU copies, and what a run's samples make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import Spread

KIB = 1 << 10
MIB = 1 << 20
OF_LARGE = {2 * MIB: 0.95, 32 * KIB: 0.8, 8 * KIB: 0.5}  # × one large pinned copy, or two at once
BOTH_BAR_FRAGMENT = 2 * MIB  # both directions at once have a bar at this size only
OF_IN_PROCESS = 0.97
SLOWDOWN = {"store": 1.02, "store+load": 1.03}
OVERHEAD_US = 300.0
DAEMON = ("daemon", "daemon, told before")  # from the step on, and from submission on
OURS = ("mover", *DAEMON)
_UNJUDGED = {
    "from_step_s": "step sent to completion seen",
    "copy_engine_s": "the mover's own copy",
}
MOST_WORDS = 60  # characters of a reason in the table; the JSON has it whole


@dataclass(frozen=True)
class Verdict:
    """One figure beside its bar; `met` is None where there is no bar, or no figure."""

    what: str
    figure: Spread | None
    bar: str
    met: bool | None
    why: str = ""

    def line(self) -> tuple[str, str, str, str]:
        """As a row of the printed table."""
        word = {None: "", True: "met", False: "MISSED"}[self.met]
        measured = str(self.figure) if self.figure else f"not measured: {self.why[:MOST_WORDS]}"
        return self.what, measured, self.bar, word

    def plain(self) -> dict[str, Any]:
        """As JSON can say it."""
        return asdict(self)


def at_least(what: str, figure: Spread, bar: float | None) -> Verdict:
    if bar is None:
        return Verdict(what, figure, "", None)
    return Verdict(what, figure, f"≥ {bar:g}", figure.median >= bar)


def at_most(what: str, figure: Spread, bar: float | None) -> Verdict:
    if bar is None:
        return Verdict(what, figure, "", None)
    return Verdict(what, figure, f"≤ {bar:g}", figure.median <= bar)


def named(fragment: int) -> str:
    """A size as people say it."""
    return f"{fragment // MIB} MiB" if fragment >= MIB else f"{fragment // KIB} KiB"


def of_races(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Of each race: every contender against the large copy, ours against the batch without IPC.

    A row has fragment, kinds, seconds by contender, and `failed` for those that could not run.
    """
    found = []
    for row in rows:
        case = f"{'+'.join(row['kinds'])}, {named(row['fragment'])}"
        if row["busy"]:
            case += ", engine busy"
        large = row["seconds"].get("large", ())
        for contender, seconds in row["seconds"].items():
            if contender != "large" and large:
                figure = _ratio(large, seconds)
                bar = _bar(row, contender)
                found.append(at_least(f"{contender}, {case}, × large pinned copy", figure, bar))
        if {"mover", "batch"} <= set(row["seconds"]):
            figure = _ratio(row["seconds"]["batch"], row["seconds"]["mover"])
            bar = None if row["busy"] else OF_IN_PROCESS
            found.append(at_least(f"mover, {case}, × a batch in the engine's process", figure, bar))
        for contender, why in row["failed"].items():
            asked = _bar(row, contender)
            words = "" if asked is None else f"≥ {asked:g}"
            found.append(Verdict(f"{contender}, {case}", None, words, None, why))
    return found


def _bar(row: dict[str, Any], contender: str) -> float | None:
    if contender not in OURS or row["busy"]:
        return None
    if len(row["kinds"]) == 2 and row["fragment"] != BOTH_BAR_FRAGMENT:
        return None
    return OF_LARGE.get(row["fragment"])


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> Spread:
    """Their seconds over ours, round by round: how fast ours is."""
    return Spread.of([a / b for a, b in zip(theirs, ours, strict=True)])


def of_slowdown(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Of the engine's products beside the mover's copies. A row has fragment and phases."""
    found = []
    for row in rows:
        size = named(row["fragment"])
        for kinds, bar in SLOWDOWN.items():
            what = f"engine's products beside a full-rate {kinds}, {size}, × idle"
            ratios = row.get("phases", {}).get(kinds, {}).get("ratio", ())
            at_size = bar if row["fragment"] == BOTH_BAR_FRAGMENT else None
            if ratios:
                found.append(at_most(what, Spread.of(ratios), at_size))
            else:
                why = row.get("failed", "no batch of products fell into a phase")
                words = "" if at_size is None else f"≤ {bar:g}"
                found.append(Verdict(what, None, words, None, why))
    return found


def of_overhead(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Of one block's job: µs from its submission, and from the step that it is of, to its end
    being seen, less the copy itself; beside them the copy, and what the mover's engine takes."""
    found = []
    for row in rows:
        one = f"{row['kind']} of one block, µs"
        what = f"submit to completion seen, beyond the copy, {one}"
        if "failed" in row:
            found.append(Verdict(what, None, f"≤ {OVERHEAD_US:g}", None, row["failed"]))
            continue
        copy = Spread.of(row["plain_copy_s"]).median
        beyond = {
            name: Spread.of([(seconds - copy) * 1e6 for seconds in row[name]])
            for name in ("seconds", "from_step_s", "copy_engine_s")
            if name in row
        }
        found.append(at_most(what, beyond["seconds"], OVERHEAD_US))
        for name, words in _UNJUDGED.items():
            if name in beyond:
                found.append(at_most(f"{words}, beyond the copy, {one}", beyond[name], None))
        copies = Spread.of([seconds * 1e6 for seconds in row["plain_copy_s"]])
        found.append(at_most(f"one cudaMemcpyAsync and its end, {one}", copies, None))
    return found
