"""Lists of numbers as the kernel writes them, of processors and of memory nodes."""

from __future__ import annotations


def numbers_of(text: str) -> frozenset[int]:
    """What the kernel writes as "0-3,8": ValueError for anything else."""
    numbers: set[int] = set()
    for stretch in filter(None, text.strip().split(",")):
        first, _, last = stretch.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
