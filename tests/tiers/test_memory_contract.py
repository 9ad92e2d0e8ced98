"""The store that tests of the tier's process use keeps what every store promises."""

from __future__ import annotations

import pytest

from tests.tiers.contract import BLOCK_BYTES, ROOM_BLOCKS, Opened, TierStoreContract
from tests.tiers.memory_store import Medium, MemoryStore


class TestMemory(TierStoreContract):
    @pytest.fixture
    def opened(self) -> Opened:
        medium = Medium()
        return lambda: MemoryStore({}, medium)

    @pytest.fixture
    def small(self) -> Opened:
        return lambda: MemoryStore({"capacity_bytes": ROOM_BLOCKS * BLOCK_BYTES})
