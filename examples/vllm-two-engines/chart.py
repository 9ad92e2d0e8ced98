"""The chart of times to the first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLD, WARM = "#8a8f98", "#2f6fb2"


def draw(stages: Sequence[dict[str, Any]], model: str, path: Path) -> str:
    """Draw the stages as bars of the median, with a dot for each prompt; what to say of it."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no chart: matplotlib is not installed (`.ci/venv bench`)"
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2))
    places = range(len(stages))
    medians = [stage["median_ms"] for stage in stages]
    colours = [WARM if stage["is_warm"] else COLD for stage in stages]
    axes.barh(places, medians, color=colours, height=0.6)
    for place, stage in enumerate(stages):
        dots = [answer["first_token_s"] * 1e3 for answer in stage["answers"]]
        axes.plot(dots, [place] * len(dots), "o", color="black", markersize=3, alpha=0.6)
        label = f"{stage['median_ms']:.0f} ms"
        axes.annotate(label, (max(dots), place), (8, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [stage["name"] for stage in stages])
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, ms: median, and each prompt")
    tokens = round(stages[0]["answers"][0]["prompt_tokens"], -1)
    axes.set_title(f"Two vLLM servers on one kvd: {model}, prompts of {tokens} tokens, CPU")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return f"chart: {path}"
