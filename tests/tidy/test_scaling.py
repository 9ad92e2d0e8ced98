"""docs/scaling.md says what was measured, and nothing else."""

from __future__ import annotations

import json

from benchmarks import scaling


def test_the_page_says_what_was_measured() -> None:
    figures = json.loads(scaling.FIGURES.read_text())
    page = scaling.PAGE.read_text()
    assert page == scaling.written(page, figures), "python -m benchmarks.scaling --write"
    assert scaling.reckoned(figures) in page


def test_other_figures_are_another_page() -> None:
    figures = json.loads(scaling.FIGURES.read_text())
    figures["results"]["Mooncake"]["written_a_second"] /= 2
    page = scaling.PAGE.read_text()
    assert scaling.written(page, figures) != page
