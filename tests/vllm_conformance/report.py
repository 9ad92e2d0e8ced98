"""What vLLM's tests say of kvd: counts by file, and why each failing test can't apply."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REASONS = Path(__file__).with_name("expected.toml")


@dataclass(slots=True)
class Verdict:
    """A run beside the list. Sound when no test fails unlisted and none is listed in vain."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    excused: dict[str, list[str]] = field(default_factory=dict)  # by reason
    unlisted: dict[str, str] = field(default_factory=dict)  # test -> what it said
    passes_now: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.unlisted and not self.passes_now


def reasons(mode: str) -> dict[str, str]:
    """Why a test can't apply, by its id without parameters or with."""
    listed: dict[str, str] = {}
    for entry in tomllib.loads(REASONS.read_text())["reason"]:
        if mode in entry["modes"]:
            text = " ".join(entry["text"].split())
            listed.update({f"{entry['file']}::{test}": text for test in entry["tests"]})
    return listed


def judge(tests: dict[str, dict[str, str]], listed: dict[str, str]) -> Verdict:
    """Compare what came of the tests with the list."""
    verdict = Verdict()
    for test, result in tests.items():
        counts = verdict.counts.setdefault(file_of(test), Counter())
        counts[result["outcome"]] += 1
        reason = listed.get(test) or listed.get(test.partition("[")[0])
        if result["outcome"] == "failed" and reason:
            verdict.excused.setdefault(reason, []).append(test)
        elif result["outcome"] == "failed":
            verdict.unlisted[test] = result["message"]
        elif reason:
            verdict.passes_now.append(test)
    return verdict


def file_of(test: str) -> str:
    return test.partition("::")[0].rpartition("/")[2]


def lines(verdict: Verdict, figures: dict[str, Any]) -> list[str]:
    """The verdict for people."""
    said = [f"{'file':28} {'passed':>7} {'failed':>7} {'skipped':>8}"]
    total: Counter[str] = Counter()
    for file, counts in verdict.counts.items():
        total += counts
        said.append(_row(file, counts))
    said.append(_row("in all", total))
    said.append(
        f"{figures['managers']} of vLLM's managers were kvd's daemon, by {figures['calls']} calls"
    )
    for reason, tests in verdict.excused.items():
        said += ["", f"can't apply: {reason}"]
        said += [f"  {file_of(test)}::{test.partition('::')[2]}" for test in tests]
    for test, message in verdict.unlisted.items():
        said += ["", f"FAILED, and no reason is listed: {test}", f"  {message}"]
    if verdict.passes_now:
        said += ["", "these pass, though they are listed as failing:"]
        said += [f"  {test}" for test in verdict.passes_now]
    return said


def _row(name: str, counts: Counter[str]) -> str:
    return f"{name:28} {counts['passed']:7} {counts['failed']:7} {counts['skipped']:8}"
