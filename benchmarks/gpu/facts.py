"""Fills the tables of docs/gpu-facts.md from what probes wrote: `python3 -m benchmarks.gpu.facts`.

Reads benchmarks/results/*/gpu-probe.json and writes between the page's marks; whatever else
stands there is people's. No figure is typed by hand. With --check it writes nothing, and exits
with 1 where the page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.places import RESULTS, ROOT

PAGE = ROOT / "docs" / "gpu-facts.md"
MARKED = re.compile(r"(<!-- facts: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = (
    "Not measured yet: no GPU machine has run the probe. "
    "`python3 -m benchmarks.gpu.probe {}` on one fills this in.\n"
)
Document = dict[str, Any]
Facts = dict[str, str]

# What a leaf's name says of its figure.
ADDRESSES = re.compile(r"\brange (?:in|of) ")  # and the bytes from there on
SIZES = re.compile(r"\bbytes\b|\bcame back\b|\blimit$")
TIMES = re.compile(r"\b(?:seconds|seconds to open|after s|close|register|queued copies)$")
FLAGS = re.compile(r"\b(?:is managed|legacy ipc capable)$")
# Whole numbers that answer none of the page's questions.
DROPPED = re.compile(
    r"(?:^|: )(?:address|memory type|device pointer|buffer id|device|range start|range bytes"
    r"|mapped|free|used by nvml)$"
)
SAME_BYTES = re.compile(r"([0-9a-f]{2})\1+$")  # what was read, in hexadecimal
REFUSAL = re.compile(r"\w+: CUDA_ERROR_(\w+) \(\d+\)")
SIZE_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# Answers of the same form for several things: these are the columns of one table.
COLUMNS = {
    "host_memory": ("tmpfs", "tmpfs huge=always", "hugetlbfs"),
    "kinds": ("malloc", "physical, exportable", "physical", "managed", "pool"),
}


def probes(results: Path) -> list[Document]:
    """What every probed device answered, by the device's name."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*/gpu-probe.json"))]
    return sorted(found, key=lambda document: str(document["device"]["name"]))


def render(page: str, documents: Sequence[Document]) -> str:
    """The page with what stands between its marks made anew."""

    def fill(match: re.Match[str]) -> str:
        return match[1] + tables(match[2], documents) + match[3]

    return MARKED.sub(fill, page)


def tables(question: str, documents: Sequence[Document]) -> str:
    """Markdown of one question: a table for each device, or that none was probed."""
    asked = [document for document in documents if question in document["questions"]]
    if not asked:
        return NOT_MEASURED.format(question)
    parts = []
    for document in asked:
        driver = (document.get("machine", {}).get("nvidia_smi") or {}).get("driver_version", "")
        name = document["device"]["name"] + (f", driver {driver}" if driver else "")
        told = document["questions"][question]
        made = {"commit": document["commit"], "time": document["time"]} | told
        where = f"{name}, commit {made['commit']}, {made['time']}"
        parts.append(f"{where}\n\n{_table(question, told)}")
    return "\n".join(parts)


def _table(question: str, told: dict[str, Any]) -> str:
    if "failed" in told:
        return f"The question failed: `{_cell(told['failed'])}`\n"
    answer = told["answer"]
    if question == "copies":
        return "\n".join(_copies(answer))
    if question == "products":
        answer = {name: _product(phase) for name, phase in answer["phases"].items()}
    columns = {name: answer[name] for name in COLUMNS.get(question, ()) if name in answer}
    rest = {name: told for name, told in answer.items() if name not in columns}
    tables = [_beside(columns)] if columns else []
    tables += [_listed(dict(facts(rest)))] if rest else []
    return "\n".join(tables)


def _product(phase: dict[str, Any]) -> dict[str, list[float]]:
    """The copies' speeds: sums over those that ran at once, of the rounds that worked."""
    told = phase.get("copies_bytes_per_s", ())
    speeds = [sum(one["ok"]) / 1e9 for one in told if "ok" in one]
    return {"× idle": phase["ratio"]} | ({"copies, GB/s": speeds} if speeds else {})


def _listed(told: Facts) -> str:
    lines = ["| fact | figure |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(figure)} |" for name, figure in told.items()]
    return "\n".join(lines) + "\n"


def _beside(columns: dict[str, Any]) -> str:
    """A row for each fact, a column for each thing that it was asked of."""
    told = [dict(facts(answer)) for answer in columns.values()]
    lines = ["| fact | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(name for column in told for name in column):
        figures = [REFUSAL.sub(r"\1", _cell(column.get(name, ""))) for column in told]
        lines.append(f"| {_cell(name or 'all of it')} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def facts(answer: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of an answer that tells something, as (its path in words, its figure).

    A list of answers without steps is one trial repeated: its figures come together.
    """
    if isinstance(answer, dict) and answer.keys() == {"failed"}:
        yield name, "refused: " + str(answer["failed"]).removeprefix("Failed: ")
    elif isinstance(answer, dict) and answer.keys() == {"ok"}:
        yield from facts(answer["ok"] if answer["ok"] is not None else "worked", name)
    elif isinstance(answer, dict):
        for key, value in answer.items():
            yield from facts(value, f"{name}: {_words(key)}" if name else _words(key))
    elif isinstance(answer, list) and answer and isinstance(answer[0], dict):
        if "step" not in answer[0]:
            yield from facts(_together(answer), name)
            return
        for value in answer:
            rest = {key: told for key, told in value.items() if key != "step"}
            yield from facts(rest, f"{name} {value['step']}".strip())
    elif not (type(answer) is int and DROPPED.search(name)):
        told = name.removesuffix(" s") if TIMES.search(name) else name
        yield told, figure_of(answer, name)


def _together(trials: list[Any]) -> Any:
    """One answer of several: a dict of what they have in common, a list of their figures.

    Figures that are all the same are one; trials that ended in different ways stay apart.
    """
    first = trials[0]
    if all(trial == first for trial in trials):
        return first
    if all(isinstance(trial, dict) and trial.keys() == first.keys() for trial in trials):
        return {key: _together([trial[key] for trial in trials]) for key in first}
    if any(isinstance(trial, dict) for trial in trials):
        return {f"trial {number}": trial for number, trial in enumerate(trials, start=1)}
    return trials


def figure_of(value: Any, name: str = "") -> str:
    """A value as people read it; the name says what it is of."""
    if isinstance(value, list) and len(value) == 2 and ADDRESSES.search(name):
        return f"{value[0]:#x}, {_scaled([value[1]], SIZE_UNITS)}"
    if isinstance(value, list):
        if value and all(isinstance(one, float) for one in value):
            return _number(value, name)
        return ", ".join(figure_of(one, name) for one in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not known"}[value]
    if isinstance(value, int) and FLAGS.search(name):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number([value], name)
    same = SAME_BYTES.match(str(value))
    return f"yes, 0x{same[1]} throughout" if same else str(value)


def _number(samples: Sequence[float], name: str) -> str:
    """One figure, or the median and the range of several."""
    if TIMES.search(name):
        return _scaled(samples, TIME_UNITS)
    if SIZES.search(name):
        return _scaled(samples, SIZE_UNITS)
    return _scaled(samples, ())


def _scaled(samples: Sequence[float], units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit of which there is a whole one."""
    middle = statistics.median(samples)
    scale, unit = next(((size, f" {word}") for size, word in units if middle >= size), (1, ""))

    def short(figure: float) -> str:
        return str(figure) if isinstance(figure, int) and scale == 1 else f"{figure / scale:.4g}"

    told = short(middle) + unit
    if len(samples) == 1:
        return told
    return f"{told} ({short(min(samples))} to {short(max(samples))}, {len(samples)} samples)"


def _words(key: str) -> str:
    words = key.replace("_", " ").replace(" gib", " GiB")
    return re.sub(r" gb s$", ", GB/s", words)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _copies(answer: dict[str, Any]) -> Iterator[str]:
    """GB/s by fragment and direction, a column for each way; alone, then beside the engine."""
    for state in ("idle", "busy"):
        rows = answer.get(state)
        if not rows:
            continue
        ways = list(dict.fromkeys(_way(row) for row in rows))
        yield f"GB/s, medians, device {state}:\n"
        yield "| fragment | direction | " + " | ".join(ways) + " |"
        yield "|---" * (len(ways) + 2) + "|"
        cases = list(dict.fromkeys((row["fragment"], row["is_store"]) for row in rows))
        for fragment, is_store in cases:
            same = {
                _way(row): _speed(row)
                for row in rows
                if (row["fragment"], row["is_store"]) == (fragment, is_store)
            }
            cells = [same.get(way, "") for way in ways]
            direction = "store" if is_store else "load"
            yield f"| {fragment >> 10} KiB | {direction} | " + " | ".join(cells) + " |"
        yield ""


def _way(row: dict[str, Any]) -> str:
    more = {"batch": f" of {row.get('most')}", "kernel": f", {row.get('blocks')} blocks"}
    return str(row["way"]) + more.get(row["way"], "")


def _speed(row: dict[str, Any]) -> str:
    if "failed" in row:
        return _cell(str(row["failed"]))
    if row.get("moved_right") is False:
        return "wrong bytes"
    return f"{row['total'] / statistics.median(row['wall_s']) / 1e9:.1f}"


def main() -> int:
    """Write the page, or with --check compare it."""
    parser = argparse.ArgumentParser(description="Tables of docs/gpu-facts.md from probes.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    options = parser.parse_args()
    page = PAGE.read_text()
    rendered = render(page, probes(RESULTS))
    if rendered == page:
        print(f"{PAGE} is as the results say")
        return 0
    if options.check:
        print(f"{PAGE} is not as the results say: python3 -m benchmarks.gpu.facts", file=sys.stderr)
        return 1
    PAGE.write_text(rendered)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
