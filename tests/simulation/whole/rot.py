"""Damage to the pool's tables between two daemons: words that change where they lie.

What a checksum covers must not be believed any more, and nothing else may be lost with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvd.pool.config import RECORD_BYTES, ROW_HEADER_BYTES
from tests.simulation.whole.ledger import Ledger, Lost

CHANCE = 0.3  # of a restart
_SUMMED = (1, 2, 3, 8, 9)  # words of a record: scope, stamp, checksum, key
_HEADER = (1, 2, 3, 4, 5)  # of a row's header, but for the one that says it is granted


def damage(directory: Path, before: Ledger, random: Random) -> Lost:
    """Change words of some records and of a row's header; what can't be read back for that."""
    lost = Lost()
    if random.random() >= CHANCE:
        return lost
    records, rows = sorted(before.records), sorted(before.rows)
    if records:
        table = _Words(directory / "slots.table", RECORD_BYTES)
        for slot in random.sample(records, min(len(records), random.randrange(4))):
            table.spoil(slot, random.choice(_SUMMED), random)
            lost.slots.add(slot)
        table.write()
    if rows and random.random() < 0.5:
        table = _Words(directory / "rows.table", ROW_HEADER_BYTES)
        row = before.rows[random.choice(rows)]
        if all(table.words[extent, 0] == 1 for extent in row.extents):
            table.spoil(random.choice(row.extents), random.choice(_HEADER), random)
            lost.rows.add(row.row)
            lost.slots.update(range(row.first_slot, row.first_slot + row.slots))
        table.write()
    return lost


@dataclass
class _Words:
    """A table's file, as words by record."""

    path: Path
    record_bytes: int
    words: Any = field(init=False)

    def __post_init__(self) -> None:
        found = np.fromfile(self.path, dtype=np.uint64)
        self.words = found.reshape(-1, self.record_bytes // 8)

    def spoil(self, record: int, word: int, random: Random) -> None:
        self.words[record, word] ^= np.uint64(1 << random.randrange(64))

    def write(self) -> None:
        self.words.tofile(self.path)
