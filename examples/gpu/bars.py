"""What a load is held to on a GPU: said as met or missed, and no failure of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.gpu.measure import PromptResult

BAR_TOKENS = 16_384  # shorter prompts are computed about as fast as a load is asked for
LEAST_SPEEDUP = 10.0
MOST_OF_IDEAL = 1.25


@dataclass(frozen=True)
class Verdict:
    """One figure beside its bar."""

    what: str
    value: float
    bar: str
    is_met: bool

    def line(self) -> str:
        word = "met" if self.is_met else "MISSED"
        return f"{self.what}: {self.value:.2f} x, bar {self.bar}: {word}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verdicts_of(results: Sequence[PromptResult], device_type: str) -> list[Verdict]:
    """Of the prompt that has bars; none where it was not run, or on no GPU.

    What failed meets no bar, however fast it was.
    """
    if device_type != "cuda":
        return []
    found = []
    for each in results:
        if each.prompt_tokens != BAR_TOKENS:
            continue
        speedup, of_ideal = each.recompute_s / each.load_s, each.load_s / each.ideal_s
        is_right = not each.failures
        found += [
            Verdict(
                f"{BAR_TOKENS} tokens, first token loaded faster than recomputed",
                speedup,
                f"≥ {LEAST_SPEEDUP:g}",
                is_right and speedup >= LEAST_SPEEDUP,
            ),
            Verdict(
                f"{BAR_TOKENS} tokens, first token loaded, of ideal copy and last block",
                of_ideal,
                f"≤ {MOST_OF_IDEAL:g}",
                is_right and of_ideal <= MOST_OF_IDEAL,
            ),
        ]
    return found
