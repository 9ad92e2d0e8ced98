"""A store whose blocks outlive its process: one file, written anew after each call."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

from kvd.tiers.store import Outcome, TierBlock, TierError, TierOptions
from tests.tiers.memory_store import MemoryStore


class LastingStore(MemoryStore):
    """Keeps its blocks in the file `path`; deletes none as long as there is a file `stubborn`."""

    def __init__(self, options: TierOptions) -> None:
        of_its_own = ("path", "stubborn")
        super().__init__({k: value for k, value in options.items() if k not in of_its_own})
        self.concurrency = 1
        self._path = Path(str(options["path"]))
        self._stubborn = Path(str(options.get("stubborn", "/nowhere")))
        if self._path.exists():
            self._blocks, self._bytes = pickle.loads(self._path.read_bytes())

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        outcomes = super().write(blocks, deadline)
        self._save()
        return outcomes

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        if self._stubborn.exists():
            raise TierError("it deletes nothing now")
        super().delete_scopes(scopes, deadline)
        self._save()

    def _save(self) -> None:
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(pickle.dumps((self._blocks, self._bytes)))
        fresh.rename(self._path)
