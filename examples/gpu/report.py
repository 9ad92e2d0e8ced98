"""The demo's figures: a table, JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.gpu.bars import Verdict
from examples.gpu.measure import PromptResult

HEAD = (
    "  prompt |      time to first token       |  of the load, until |       load       |"
    " alone, ideal |    last\n"
    "  tokens | recompute    kvd load    ratio |    found     loaded |     MiB    GiB/s |"
    "     the copy |   block"
)
CHECKED = "the first tokens are the same, and the loaded KV bytes equal the computed ones"


def table_of(
    results: Sequence[PromptResult], bandwidth: float, verdicts: Sequence[Verdict] = ()
) -> str:
    """Times in milliseconds. `ideal` are the load's bytes at the pinned copy's speed."""
    lines = ["", HEAD, "  " + "-" * (max(map(len, HEAD.splitlines())) - 2)]
    for each in results:
        speed = each.loaded_bytes / each.copy_s / 2**30 if each.copy_s else 0.0
        lines.append(
            f"  {each.prompt_tokens:6d} | {_ms(each.recompute_s)}   {_ms(each.load_s)}"
            f" {each.recompute_s / each.load_s:7.2f}x |"
            f" {_ms(each.found_s, 5)}  {_ms(each.loaded_s)} |"
            f" {each.loaded_bytes / 2**20:7.1f} {speed:8.1f} |"
            f" {_ms(each.ideal_copy_s, 9)} |{_ms(each.last_block_s, 5)}"
        )
    lines += ["", f"  one large copy, in the same run: {bandwidth / 2**30:.1f} GiB/s"]
    lines += [f"  {verdict.line()}" for verdict in verdicts]
    wrong = [f"{each.prompt_tokens} tokens: {why}" for each in results for why in each.failures]
    lines += [f"  FAILED: {why}" for why in wrong] or [f"  {CHECKED}"]
    return "\n".join(lines)


def _ms(seconds: float, width: int = 6) -> str:
    return f"{seconds * 1e3:{width}.1f} ms"


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def draw(path: Path, results: Sequence[PromptResult], title: str) -> bool:
    """Times over prompt lengths, both logarithmic. False where matplotlib is not there."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    tokens = [each.prompt_tokens for each in results]
    floor = [each.ideal_s for each in results]
    series = {
        "recompute": [each.recompute_s for each in results],
        "load from kvd": [each.load_s for each in results],
        "ideal: one pinned copy, and the last block": floor,
    }
    for (name, seconds), style in zip(series.items(), ("o-", "s-", "k:"), strict=True):
        axes.plot(tokens, [each * 1e3 for each in seconds], style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, ms")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
