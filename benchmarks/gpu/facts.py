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
MIB = 1 << 20
LARGE_NUMBER = 1 << 20  # whole numbers from here on are bytes or addresses
Document = dict[str, Any]


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
        where = f"{name}, commit {document['commit']}, {document['time']}"
        told = document["questions"][question]
        parts.append(f"{where}\n\n{_table(question, told)}")
    return "\n".join(parts)


def _table(question: str, told: dict[str, Any]) -> str:
    if "failed" in told:
        return f"The question failed: `{_cell(told['failed'])}`\n"
    answer = told["answer"]
    if question == "copies":
        return "\n".join(_copies(answer))
    if question == "products":
        answer = {
            name: {"× idle": phase["ratio"], "copies, bytes/s": _speeds(phase)}
            for name, phase in answer["phases"].items()
        }
    lines = ["| fact | figure |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(figure)} |" for name, figure in facts(answer)]
    return "\n".join(lines) + "\n"


def _speeds(phase: dict[str, Any]) -> list[float]:
    """Sums over the copies that ran at once, of the rounds that worked."""
    told = phase.get("copies_bytes_per_s", ())
    return [sum(one["ok"]) for one in told if "ok" in one]


def facts(answer: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of an answer as (its path in words, its figure)."""
    if isinstance(answer, dict) and answer.keys() == {"failed"}:
        yield name, f"refused: {answer['failed']}"
    elif isinstance(answer, dict) and answer.keys() == {"ok"}:
        yield from facts(answer["ok"] if answer["ok"] is not None else "worked", name)
    elif isinstance(answer, dict):
        for key, value in answer.items():
            yield from facts(value, f"{name}: {_words(key)}" if name else _words(key))
    elif isinstance(answer, list) and answer and isinstance(answer[0], dict):
        for number, value in enumerate(answer, start=1):
            label = value.get("step", number)
            rest = {key: told for key, told in value.items() if key != "step"}
            yield from facts(rest, f"{name} {label}".strip())
    else:
        yield name, figure_of(answer)


def figure_of(value: Any) -> str:
    """A value as people read it: samples by median and range, large whole numbers in MiB too."""
    if isinstance(value, list) and value and all(isinstance(v, float) for v in value):
        low, high = min(value), max(value)
        return f"{statistics.median(value):.4g} ({low:.4g} to {high:.4g}, {len(value)} samples)"
    if isinstance(value, list):
        return ", ".join(map(figure_of, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not known"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= LARGE_NUMBER:
        return f"{value} ({value / MIB:.0f} MiB)" if abs(value) < 1 << 42 else f"{value:#x}"
    return str(value)


def _words(key: str) -> str:
    return key.replace("_", " ")


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
