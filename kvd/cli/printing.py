"""How figures are shown to people: tables, sizes, times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import click

from kvd.observability.printable import printable


def show_json(value: object) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=2))


def show_lines(lines: Iterable[str]) -> None:
    """Lines on stdout, whatever a client put into its names."""
    click.echo("\n".join(map(printable, lines)))


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], otherwise: str) -> Iterator[str]:
    """Lines in columns, or what is said where there is no row."""
    if not rows:
        yield otherwise
        return
    cells = [list(heads), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
