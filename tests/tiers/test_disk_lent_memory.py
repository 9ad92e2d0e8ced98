"""A disk's calls let go of what they were lent before they return, whatever its threads do."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import thread
from pathlib import Path

import pytest

from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import Outcome, TierBlock
from tests.tiers.contract import BLOCK_BYTES, content, key, soon, source, target
from tests.tiers.faulty_files import FaultyFiles
from tests.tiers.test_disk_contract import options_of

BLOCKS = 8


def marks(blocks: list[TierBlock]) -> list[weakref.ref[object]]:
    """Of the memory that blocks lie in."""
    return [weakref.ref(part.obj) for block in blocks for part in block.parts]


@pytest.mark.parametrize("by_kernel", [True, False], ids=["natively", "by Python"])
def test_a_thread_that_is_not_through_yet_holds_on_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: bool
) -> None:
    """A tier's process ends where its store keeps hold of memory: it might write there."""
    files = None if by_kernel else FaultyFiles()
    store = DiskStore(options_of(tmp_path / "disk", regions=4), files)
    run, go_on = thread._WorkItem.run, threading.Event()

    def run_and_stay(self: thread._WorkItem[None]) -> None:
        run(self)
        go_on.wait()

    monkeypatch.setattr(thread._WorkItem, "run", run_and_stay)
    try:
        blocks = [source(key(n), content(n)) for n in range(BLOCKS)]
        lent = marks(blocks)
        assert store.write(blocks, soon()) == [Outcome.DONE] * BLOCKS
        blocks = [target(key(n), BLOCK_BYTES) for n in range(BLOCKS)]
        lent += marks(blocks)
        assert store.read(blocks, soon()) == [Outcome.DONE] * BLOCKS
        del blocks
        gc.collect()
        assert not any(mark() for mark in lent)
    finally:
        go_on.set()
        store.close()
