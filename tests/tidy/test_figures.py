"""docs/benchmarks.md shows the figures that were measured, and says which miss their bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import summary


def test_the_page_shows_what_was_measured() -> None:
    page = summary.PAGE.read_text()
    shown = summary.written(page, summary.tables(summary.kept()))
    assert page == shown, "python -m benchmarks.summary --write"


def test_each_folder_has_results_of_its_own_kind_of_machine_alone() -> None:
    for folder, machine in summary.kept().items():
        kind = machine.partition(",")[0]
        for path in folder.glob("*.json"):
            processor = json.loads(path.read_text())["machine"]["processor"]
            assert processor.startswith(kind), f"{path.name} is of {processor}"


def test_a_figure_that_misses_its_bar_stands_out(tmp_path: Path) -> None:
    keep(tmp_path / "one", "throughput", {"steady": [row_of("store", 0.91), row_of("load", 0.89)]})
    table = summary.tables({tmp_path / "one": "One"})
    assert "| store, whole, one engine, × memcpy | ≥ 0.9 | 0.91 (0.50 to 1.00) |" in table
    assert "| load, whole, one engine, × memcpy | ≥ 0.9 | **0.89 (0.50 to 1.00)** |" in table


def test_a_figure_just_below_its_bar_does_not_look_as_if_it_met_it(tmp_path: Path) -> None:
    keep(tmp_path / "one", "throughput", {"steady": [row_of("store", 0.8976)]})
    assert "| **0.898 (0.500 to 1.000)** |" in summary.tables({tmp_path / "one": "One"})


def test_machines_stand_beside_each_other_under_the_bar_of_the_last(tmp_path: Path) -> None:
    keep(tmp_path / "one", "throughput", {"steady": [row_of("store", 0.85, bar=0.8)]})
    keep(tmp_path / "two", "throughput", {"steady": [row_of("store", 0.95)]})
    table = summary.tables({tmp_path / "one": "One", tmp_path / "two": "Two"})
    assert "| figure | bar | One | Two |" in table
    assert "| ≥ 0.9 | **0.85 (0.50 to 1.00)** | 0.95 (0.50 to 1.00) |" in table


def test_what_one_machine_did_not_measure_is_left_empty(tmp_path: Path) -> None:
    keep(tmp_path / "one", "throughput", {"steady": [row_of("store", 0.95)]})
    keep(tmp_path / "two", "throughput", {"steady": [row_of("load", 0.95)]})
    table = summary.tables({tmp_path / "one": "One", tmp_path / "two": "Two"})
    assert "| store, whole, one engine, × memcpy | ≥ 0.9 | 0.95 (0.50 to 1.00) |  |" in table
    assert "| load, whole, one engine, × memcpy | ≥ 0.9 |  | 0.95 (0.50 to 1.00) |" in table


def row_of(direction: str, median: float, bar: float = 0.9) -> dict[str, Any]:
    ratio = {"median": median, "low": 0.5, "high": 1.0}
    return {"engines": 1, "layout": "whole", "direction": direction, "ratio": ratio, "bar": bar}


def keep(folder: Path, name: str, results: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    document = {"machine": {"commit": "abc", "load_1m": 0.5}, "results": results}
    (folder / f"{name}.json").write_text(json.dumps(document))
