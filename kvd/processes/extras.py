"""How the libraries of kvd's extras are had."""

from __future__ import annotations


def install(extra: str) -> str:
    """What brings an extra's libraries. From the source: in registries the name is another's."""
    return f"in kvd's source tree, pip install ./client '.[{extra}]'"
