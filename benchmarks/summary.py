"""The measured figures beside their bars, as Markdown: `python -m benchmarks.summary [FOLDER ...]`.

Reads the JSON that the benchmarks wrote, of the kinds of machine whose results are kept or of the
folders named, and prints a table for each benchmark, with a column for each machine. `--write` puts
the tables into docs/benchmarks.md. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS.parent.parent / "docs" / "benchmarks.md"
# Folders of results that are kept.
MACHINES = {
    "two-cores-amd": "AMD",
    "two-cores-intel": "Intel",
    "two-of-16-cores-intel": "Intel, 2 of 16",
}
BEGIN, END = "<!-- figures: made by `python -m benchmarks.summary --write` -->", "<!-- end -->"
POLICY_BARS = {"arc": 1.5, "s3fifo": 1.5, "turns": 1.5}
LOOKUP_BARS_MS = {
    "miss": {16: 0.02, 256: 0.05, 2048: 0.2},
    "hit": {16: 1.0, 256: 1.5, 2048: 3.0},
}


@dataclass(frozen=True)
class Line:
    """One figure; `met` is None where there is no bar. `what` is the same on every machine.

    `value` is what is held to a bar, where that is a number whose other bars may be asked for.
    """

    what: str
    figure: str
    bar: str
    met: bool | None
    value: float | None = None


@dataclass(frozen=True)
class Measured:
    """What one benchmark found on one machine."""

    machine: str
    commit: str
    load: float
    lines: dict[str, Line]  # by what they are of


def spread(value: dict[str, float], digits: int = 2) -> str:
    """Median and range of a Spread."""
    low, high = value["low"], value["high"]
    return f"{value['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def at_least(what: str, value: dict[str, float], bar: float | None) -> Line:
    if bar is None:
        return Line(what, spread(value), "", None)
    median = value["median"]
    return Line(what, _near(value, bar), f"≥ {bar}", median >= bar, median)


def _near(value: dict[str, float], bar: float) -> str:
    """A spread with so many digits that it can be told from the bar."""
    median = value["median"]
    return spread(value, 3 if round(median, 2) == bar and median != bar else 2)


def throughput(results: dict[str, Any]) -> Iterator[Line]:
    for row in results.get("steady", ()):
        engines = "one engine" if row["engines"] == 1 else "two engines"
        what = f"{row['direction']}, {row['layout']}, {engines}, × memcpy"
        yield at_least(what, row["ratio"], row["bar"])
    for row in results.get("beside", ()):
        what = f"{row['ways']}, {row['direction']}, {row['layout']}"
        yield at_least(what, row["ratio"], row["bar"])
    for row in results.get("fresh_pool", ()):
        what = f"first 256 MiB into a fresh pool, {row['layout']}, × later ones"
        yield at_least(what, row["ratio"], row["bar"])


def capacity(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["loops"]:
        bar = row["bar"]
        figure = f"{row['later_passes']:.1%}"
        share = f"{row['share_of_pool']:.0%} of the pool in a loop, hits from the second pass on"
        met = None if bar is None else row["later_passes"] >= bar
        yield Line(share, figure, "100%" if bar else "", met)


def calls(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["step_on_the_calling_thread"]:
        p50, p99 = row["p50_us"] / 1e3, row["p99_us"] / 1e3
        what = f"sending a Step of {row['blocks_stored']} stores, calling thread, ms p50 (p99)"
        yield Line(what, f"{p50:.3f} ({p99:.3f})", "≤ 0.1", p50 <= 0.1)
    for row in results["lookups"]:
        what = f"lookup of {row['keys']} keys, {row['outcome']}, ms p50: page / call / dict"
        figures = (row["page_p50_ms"], row["call_p50_ms"], row["dict_p50_ms"])
        yield Line(what, " / ".join(f"{f:.3f}" for f in figures), "", None)
        if "engine_p50_ms" in row:
            what = f"lookup of {row['keys']} keys, {row['outcome']}, as an engine sees it, ms p50"
            p50, bar = row["engine_p50_ms"], LOOKUP_BARS_MS[row["outcome"]][row["keys"]]
            figure = f"{p50:.3f} (p99 {row['engine_p99_ms']:.3f})"
            yield Line(what, figure, f"≤ {bar:g}", p50 <= bar)
    for row in results.get("beside_health", ()):
        what = f"leased lookup of {row['keys']} keys by call, × Health.Check"
        yield at_most(what, row["ratio"], row["bar"])
    fastest = min(results["round_trips"], key=lambda row: row["p50_ms"])
    slowest = max(results["round_trips"], key=lambda row: row["p50_ms"])
    what = f"round trip of a small RPC, ms p50: {fastest['rpc']} to {slowest['rpc']}"
    yield Line(what, f"{fastest['p50_ms']:.2f} to {slowest['p50_ms']:.2f}", "", None)


def small_stores(results: dict[str, Any]) -> Iterator[Line]:
    for name, what in (
        ("control", "processor of control"),
        ("mover", "processor of the mover"),
        ("wall", "time until the last has ended"),
    ):
        yield at_most(f"256 stores of a block, {what}, × one by one", results[name]["ratio"], None)
        yield at_most("the same, ms", results[name]["together_ms"], None)
    if accounts := results.get("accounts"):
        what = "256 stores of a block, processor of control, × each of an account of its own"
        yield at_most(what, accounts["control"]["ratio"], None)


def neighbour(results: dict[str, Any]) -> Iterator[Line]:
    ratio, bar = results["ratio_of_p99"], results["bar"]
    yield at_most("16-key lookup beside a big neighbour, p99 × idle p99", ratio, bar)
    if elsewhere := results.get("elsewhere_ratio_of_p99"):
        what = "the same of another daemon, which has nothing else to do"
        yield Line(what, spread(elsewhere), "", None)
    if pooled := results.get("pooled_ratio_of_p99"):
        yield Line("the same, p99 of all rounds × that of all idle ones", f"{pooled:.2f}", "", None)


def fairness(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["engines"]:
        what = f"full pool, {row['scene']}: stores accepted of '{row['engine']}'"
        figure = f"{row['accepted']} of {row['tried']}"
        yield Line(what, figure, f"≥ {row['bar']:.0%}", row["share"] >= row["bar"])


def release(results: dict[str, Any]) -> Iterator[Line]:
    bar = results["bar_seconds"]
    for victim, seconds in results["deaths"].items():
        what = f"kill -9 of {victim} until all that it held is free, s"
        met = seconds["all"]["high"] <= bar
        yield Line(what, spread(seconds["all"]), f"≤ {bar:g} each time", met)


def footprint(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["idle"]:
        name, cpu = row["process"], row["idle_cpu_percent"]
        pss = row["pss_without_pool_mib"]
        yield Line(f"idle {name}, % of a core", f"{cpu:.2f}", "< 1", cpu < 1)
        what = f"{name}, PSS without pool, MiB"
        yield Line(what, f"{pss:.0f}", f"< {row['bar_mib']:.0f}", pss < row["bar_mib"])
    for row in results["start_up"]:
        if row["pool_mib"] != "imports":
            what = f"start with a pool of {row['pool_mib']} MiB, cold, s"
            yield Line(what, spread(row["cold_s"]), "", None)


def restart(results: dict[str, Any]) -> Iterator[Line]:
    for slots, phases in results.items():
        bar = {"1000000": 2.0, "1000000 in 20000": 3.0}.get(slots)
        met = None if bar is None else phases["total"]["median"] <= bar
        count, _, scopes = slots.partition(" in ")
        named = f"{int(count):,} slots" + (f" in {int(scopes):,} scopes" if scopes else "")
        what = f"rebuild of {named}, s"
        yield Line(what, spread(phases["total"]), f"≤ {bar:g}" if bar else "", met)
        what = f"exec to first hit with {named}, s (imports are part of it)"
        yield Line(what, spread(phases["exec to first hit"]), "", None)


def copies(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["steady"]:
        movers = "one mover" if row["movers"] == 1 else "two movers"
        what = f"{row['direction']}, {row['layout']}, {movers}, × memcpy"
        yield at_least(what, row["ratio"], row["bar"])


def core_store(results: dict[str, Any]) -> Iterator[Line]:
    lru = results["lru"]
    for resident in ("10000", "1000000"):
        value = lru[resident]["store"]
        what = f"2048 keys stored with 2048 evicted, {int(resident):,} resident, ms"
        yield Line(what, spread(value), "≤ 3", value["median"] <= 3)
    ratio = lru["store, large over small"]
    yield at_most("the same, 10^6 over 10^4", ratio, 1.2)
    for what, bar in (("store", 12.0), ("leased lookup", 4.0)):
        ratio = lru[f"{what}, over a dict probe of 2048"]
        yield at_most(f"{what} of 2048 keys at 10^6, × a dict probe of as many", ratio, bar)
    base = lru["1000000"]["store, processor"]["median"]
    for policy, found in results.items():
        if policy not in {"lru", "floor"}:
            what = f"{policy}: processor time of that store at 10^6, × lru's"
            most = POLICY_BARS.get(policy)
            ratio = found.get("store, over lru's")
            # Runs of before did not take turns with lru: one figure over the other.
            times = found["1000000"]["store, processor"]["median"] / base
            shown = f"{times:.2f}" if ratio is None else spread(ratio)
            times = times if ratio is None else ratio["median"]
            met = None if most is None else times <= most
            yield Line(what, shown, "" if most is None else f"≤ {most:g}", met)
    used = lru["bytes a block"]
    yield Line("core state, bytes a block", f"{used:.0f}", "≤ 128", used <= 128)


def lmcache(results: dict[str, Any]) -> Iterator[Line]:
    """How far kvd is ahead in each row, and both sides' medians."""
    for row in results.get("lookups", ()):
        keys = "1 key" if row["keys"] == 1 else f"{row['keys']} keys"
        what = f"{row['outcome']}, {keys}, chunks of {row['chunk_tokens']}, LMCache's time"
        ours = [side for side in ("kvd, scheduler side", "kvd, call") if side in row]
        bar = None if row["keys"] == 1 else 1.0
        sides = "; ".join((*(side.removeprefix("kvd, ") for side in ours), "LMCache"))
        ahead = row[ours[0]]["times_as_long"]
        line = at_least(f"{what} × kvd's ({sides})", ahead, bar)
        millis = (f"{row[side]['p50_ms']['median']:.2f}" for side in (*ours, "LMCache"))
        yield replace(line, figure=f"{spread(ahead, 1)}: {'; '.join(millis)} ms")
    for row in results.get("copies", ()):
        for side in (side for side in row if side.startswith("LMCache")):
            what = f"{row['direction']}, 256 MiB, kvd's rate × that of {side}"
            line = at_least(what, row[side]["kvd_times_the_rate"], 1.0)
            our_rate, theirs = (row[each]["gb_s"]["median"] for each in ("kvd", side))
            yield replace(line, figure=f"{line.figure}: {our_rate:.1f} and {theirs:.1f} GB/s")
    for row in results.get("capacity", ()):
        what = f"{row['share_of_pool']:.0%} of the pool in a loop, hits from the second pass on"
        hits = (f"{side} {row[side]['later_passes']:.0%}" for side in ("kvd", "LMCache"))
        yield Line(what, "; ".join(hits), "", None)


def at_most(what: str, value: dict[str, float], bar: float | None) -> Line:
    if bar is None:
        return Line(what, spread(value), "", None)
    median = value["median"]
    return Line(what, _near(value, bar), f"≤ {bar:g}", median <= bar, median)


def scheduler_time(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["scheduler_thread"]:
        line = at_most(f"scheduler thread, {row['case']}, × vLLM's own", row["ratio"], row["bar"])
        ours, theirs = row["kvd_ms"]["median"], row["vllm_ms"]["median"]
        yield replace(line, figure=f"{line.figure}: {ours:.1f} and {theirs:.1f} ms")
    for row in results.get("scheduler_thread_on_cpu", ()):
        yield at_most(f"the same, on the processor, {row['case']}", row["ratio"], None)
    for row in results["process_cpu"]:
        yield at_most(f"process's CPU, {row['case']}, × vLLM's own", row["ratio"], row["bar"])


def first_token(results: dict[str, Any]) -> Iterator[Line]:
    for case, value in results["first_token_ms"].items():
        yield Line(f"time to the first token, {case}, ms", spread(value, 0), "", None)
    yield at_least("cold over loaded from kvd", results["cold_over_kvd"], results["cold_bar"])
    what = f"loaded from kvd over ({results['allowed']})"
    yield at_most(what, results["kvd_over_allowed"], 1.0)


def served_hits(results: dict[str, Any]) -> Iterator[Line]:
    for side, found in results["hits"].items():
        yield Line(f"tokens found the second time, {side}", spread(found, 0), "", None)
    yield at_least("found, kvd over vLLM's own", results["kvd_over_vllm"], results["bar"])
    for name, sides in results["mean_ttft_ms"].items():
        for side, value in sides.items():
            what = f"mean time to the first token, {name}, {side}, ms"
            yield Line(what, spread(value, 0), "", None)


def tier_neighbour(results: dict[str, Any]) -> Iterator[Line]:
    bar, late_s = results["bar"], results["late_s"]
    for plight, row in results["plights"].items():
        beside = f"beside a tier that is {plight}"
        most_ratio = None if plight in {"idle", "slow"} else bar  # these two work
        yield at_most(f"p99 of lookups {beside}, × without", row["lookup_p99"], most_ratio)
        yield at_most(f"stores {beside}, time × without", row["store"], most_ratio)
        yield at_most(f"loads {beside}, time × without", row["load"], most_ratio)
        yield at_most(f"control's processor time {beside}, × without", row["control_cpu"], None)
        longest, most = row["longest_search_s"], row["deadline_s"] + late_s
        what = f"longest search {beside}, s"
        yield Line(what, f"{longest:.3f}", f"≤ {most:g}", longest <= most)
        held = ", ".join(row["leaked"]) or "nothing"
        yield Line(f"held when it is back from {plight}", held, "nothing", not row["leaked"])


def tier_cold(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["rows"]:
        bar = results["bar"] if row["disk"] == "empty" else None
        what = f"cold request, {row['blocks']:,} blocks, {row['disk']} disk"
        yield at_most(f"{what}, scheduler's thread × without", row["blocked"], bar)
        yield at_most(f"{what}, ms", row["blocked_ms"], None)
        yield at_most(f"{what}, ms until it is known", row["known_ms"], None)


def tier_hit_ratio(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["rows"]:
        bar = row["write"] == "through"
        ratio, most = row["hit_ratio"], row["infinite_ratio"]
        what = f"{row['trace']}, {row['write']}: blocks found"
        met = ratio >= most if bar else None
        yield Line(what, f"{ratio:.4f}", f"≥ {most:.4f}" if bar else "", met)


READERS: dict[str, Callable[[dict[str, Any]], Iterator[Line]]] = {
    "throughput": throughput,
    "capacity": capacity,
    "calls": calls,
    "small_stores": small_stores,
    "neighbour": neighbour,
    "tier_neighbour": tier_neighbour,
    "tier_cold": tier_cold,
    "tier_hit_ratio": tier_hit_ratio,
    "fairness": fairness,
    "release": release,
    "footprint": footprint,
    "core_store": core_store,
    "restart": restart,
    "copies": copies,
    "vllm.scheduler_time": scheduler_time,
    "vllm.first_token": first_token,
    "vllm.served_hits": served_hits,
    "vllm.served_hits --sessions": served_hits,
    "vllm.served_hits --crowded": served_hits,
    "lmcache": lmcache,
}


def measured(name: str, folder: Path, machine: str) -> Measured | None:
    """What the folder has of a benchmark."""
    path = folder / f"{name.replace(' --', '.')}.json"
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    lines = {line.what: line for line in READERS[name](document["results"])}
    return Measured(machine, document["machine"]["commit"], document["machine"]["load_1m"], lines)


def tables(folders: dict[Path, str]) -> str:
    """A table for each benchmark, with where and of what commit its figures are."""
    parts = []
    for name in READERS:
        found = [measured(name, folder, machine) for folder, machine in folders.items()]
        there = [each for each in found if each is not None]
        if there:
            where = "; ".join(f"{m.machine}: commit {m.commit}, load {m.load:.1f}" for m in there)
            parts.append(f"`python -m benchmarks.{name}`. {where}.\n\n{_table(there)}")
    return "\n\n".join(parts)


def _table(found: Sequence[Measured]) -> str:
    """A row for each figure. A bar is the one that was asked for last, which may be a later one."""
    rows = list(dict.fromkeys(what for each in found for what in each.lines))
    header = ["figure", "bar", *(each.machine for each in found)]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for what in rows:
        bar = [each.lines[what].bar for each in found if what in each.lines][-1]
        cells = [_cell(each.lines.get(what), bar) for each in found]
        lines.append("| " + " | ".join([what, bar, *cells]) + " |")
    return "\n".join(lines)


def _cell(line: Line | None, bar: str) -> str:
    """The figure; in bold where it misses the bar."""
    if line is None:
        return ""
    met = line.met
    if bar != line.bar and line.value is not None:
        sign, _, wanted = bar.partition(" ")
        met = line.value <= float(wanted) if sign == "≤" else line.value >= float(wanted)
    return f"**{line.figure}**" if met is False else line.figure


def written(page: str, figures: str) -> str:
    """The page with these figures between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def kept() -> dict[Path, str]:
    """The folders whose figures docs/benchmarks.md shows."""
    return {RESULTS / folder: machine for folder, machine in MACHINES.items()}


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of results")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    asked = parser.parse_args()
    figures = tables({folder: folder.name for folder in asked.folders} or kept())
    if asked.write:
        PAGE.write_text(written(PAGE.read_text(), figures))
    else:
        print(figures)


if __name__ == "__main__":
    main()
