"""Reckons docs/scaling.md from what was measured: `python -m benchmarks.scaling [--write]`.

Takes the figures that `python -m benchmarks.cluster_index` left in benchmarks/results, and prints
what stands between the page's marks, or writes it there. A test holds the page to it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scaling.md"
FIGURES = ROOT / "benchmarks" / "results" / "two-cores-intel" / "cluster_index.json"
BEGIN = "<!-- reckoned by python -m benchmarks.scaling -->\n"
END = "<!-- end of what is reckoned -->\n"
NODES = (1, 10, 100, 1000)
# Of one node, as the page's first table has them.
BLOCKS = 512 << 30 >> 21
WRITTEN, ASKED = 1584, 2010  # a second
SWEPT_S = 1.3e-6  # for each name, when Mooncake's master is told to forget a namespace


def reckoned(figures: dict[str, Any]) -> str:
    """What stands between the marks."""
    engines = {"Mooncake, one master": "Mooncake", "Valkey, one server": "Valkey"}
    machine, of = figures["machine"], figures["results"]
    measured = [
        [
            title,
            f"{of[name]['written_a_second']:,.0f}",
            f"{of[name]['asked_a_second']:,.0f}",
            f"{of[name]['asked_in_vain_a_second']:,.0f}",
            f"{of[name]['index_bytes_a_block']:,.0f} bytes",
            f"{of[name]['wire_bytes_to_ask']:.0f} bytes",
            f"{of[name]['wire_bytes_to_write']:.0f} bytes",
        ]
        for title, name in engines.items()
    ]
    where = f"commit {machine['commit']}, an Intel machine of {machine['cores']} cores"
    return "\n".join(
        [
            f"What one server of each did here ({where}, load {machine['load_1m']:.0f};",
            "blocks of 512 bytes, so that the index is what is measured):",
            "",
            *_table(
                [
                    "",
                    "written a second",
                    "asked a second, there",
                    "not there",
                    "index, a block",
                    "network, a name asked",
                    "a write, beside its bytes",
                ],
                measured,
            ),
            "",
            "So with many nodes, each of which lends as much as it has (512 GiB), the last column",
            "being what names and answers cost the network with Mooncake, beside the blocks:",
            "",
            *_table(
                [
                    "nodes",
                    "blocks in the index",
                    "written a second",
                    "asked a second",
                    "Mooncake's index",
                    "Valkey's index, over all servers",
                    "a clear, by Mooncake",
                    "network for names, a second",
                ],
                [_of_nodes(nodes, of) for nodes in NODES],
            ),
            "",
            f"One master of Mooncake carries the writes of {_carried(of, 'Mooncake')} such nodes",
            f"here, one server of Valkey those of {_carried(of, 'Valkey')}.",
            "",
        ]
    )


def _of_nodes(nodes: int, of: dict[str, Any]) -> list[str]:
    blocks, mooncake = nodes * BLOCKS, of["Mooncake"]
    names = ASKED * mooncake["wire_bytes_to_ask"] + WRITTEN * mooncake["wire_bytes_to_write"]
    return [
        f"{nodes:,}",
        f"{blocks:,}",
        f"{nodes * WRITTEN:,}",
        f"{nodes * ASKED:,}",
        _size(blocks * mooncake["index_bytes_a_block"]),
        _size(blocks * of["Valkey"]["index_bytes_a_block"]),
        f"{blocks * SWEPT_S:,.1f} s",
        _size(nodes * names),
    ]


def _carried(of: dict[str, Any], engine: str) -> int:
    return int(of[engine]["written_a_second"] / WRITTEN)


def _size(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes / 1024:,.0f} KiB"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def written(page: str, figures: dict[str, Any]) -> str:
    """The page with these figures."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + reckoned(figures) + END + after


def main(arguments: Sequence[str] | None = None) -> None:
    """Print it, or write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/scaling.md")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="JSON of cluster_index")
    options = parser.parse_args(arguments)
    figures = json.loads(options.figures.read_text())
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), figures))
    else:
        print(reckoned(figures))


if __name__ == "__main__":
    main()
