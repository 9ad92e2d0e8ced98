"""A store as slow as a test says: the file that the option `pause` names has the seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvd.tiers.store import Outcome, TierBlock, TierKey, TierOptions
from tests.tiers.memory_store import MemoryStore


class SlowStore(MemoryStore):
    """Answers after its deadline, too."""

    def __init__(self, options: TierOptions) -> None:
        super().__init__({name: value for name, value in options.items() if name != "pause"})
        self._pause = Path(str(options["pause"]))

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        time.sleep(float(self._pause.read_text()))
        return super().exists(keys, deadline + 60)

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        time.sleep(float(self._pause.read_text()))
        return super().read(blocks, deadline + 60)
