"""Lookup times of both sides as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lmcache.lookups import CALL, CHUNKS, ENGINE, KEYS
from benchmarks.lmcache.rounds import THEM

OUTCOMES = ("hit", "miss")


def draw(rows: list[dict[str, Any]], path: Path) -> bool:
    """p50 over keys with its range, a panel an outcome; False when matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, len(OUTCOMES), figsize=(11, 4.5), sharey=True)
    for outcome, panel in zip(OUTCOMES, panels, strict=True):
        own = [row for row in rows if row["outcome"] == outcome]
        # kvd's blocks are of 16 tokens throughout: its rows beside those of the last chunk size.
        lines = [(side, CHUNKS[-1], side) for side in (ENGINE, CALL)]
        lines += [(THEM, tokens, f"{THEM}, chunks of {tokens} tokens") for tokens in CHUNKS]
        for side, tokens, label in lines:
            spreads = [row[side]["p50_ms"] for row in own if row["chunk_tokens"] == tokens]
            middles = [spread.median for spread in spreads]
            below = [spread.median - spread.low for spread in spreads]
            above = [spread.high - spread.median for spread in spreads]
            style = "--" if side == THEM else "-"
            panel.errorbar(
                KEYS, middles, [below, above], marker="o", capsize=3, linestyle=style, label=label
            )
        panel.set(title=outcome, xscale="log", yscale="log", xlabel="keys (LMCache: chunks)")
        panel.set_xticks(KEYS, [str(count) for count in KEYS])
        panel.grid(visible=True, which="major", alpha=0.3)
    panels[0].set_ylabel("ms from the call to the answer, p50")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
