"""Names that clients gave, on their way to a terminal or into a log.

A name may have any character: one that moves the cursor, colours what follows, or begins a line
that looks like ours.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line; what is no printable character stands as its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same of each line."""
    return "\n".join(map(printable, text.split("\n")))
