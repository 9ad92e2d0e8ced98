"""A store whose blocks outlive its process: in one file, to which each write appends its own."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

from kvd.tiers.store import Outcome, TierBlock, TierError, TierOptions
from tests.tiers.memory_store import Medium, MemoryStore


class LastingStore(MemoryStore):
    """Keeps its blocks in the file `path`; deletes none as long as there is a file `stubborn`."""

    def __init__(self, options: TierOptions) -> None:
        self._path = Path(str(options["path"]))
        self._stubborn = Path(str(options.get("stubborn", "/nowhere")))
        own = ("path", "stubborn")
        others = {name: value for name, value in options.items() if name not in own}
        super().__init__(others, self._kept())
        self.concurrency = 1

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        new = [block.key for block in blocks if block.key not in self._blocks]
        outcomes = super().write(blocks, deadline)
        with self._path.open("ab") as file:
            kept = [(key, self._blocks[key]) for key in new if key in self._blocks]
            file.write(pickle.dumps(kept))
        return outcomes

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        if self._stubborn.exists():
            raise TierError("it deletes nothing now")
        super().delete_scopes(scopes, deadline)
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(pickle.dumps(list(self._blocks.items())))
        fresh.rename(self._path)

    def _kept(self) -> Medium:
        """What was written. The end of a write during which the process was killed is cut off."""
        medium, end = Medium(), 0
        self._path.touch()
        with self._path.open("r+b") as file:
            try:
                while True:
                    medium.update(pickle.load(file))
                    end = file.tell()
            except (EOFError, pickle.UnpicklingError):
                file.truncate(end)
        return medium
