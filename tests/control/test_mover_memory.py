"""A mover gives back what its heap has free, however many rows it is told of meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.core.keys import RowId
from kvd.linux import calls
from kvd.mover import child, frames
from kvd.mover.child import MoverLoop
from kvd.mover.frames import FrameKind

ROWS = 100
LAST = RowId(ROWS)


class Control:
    """Hears which rows are warm; with the last one the mover is to stop."""

    def __init__(self) -> None:
        self.warm: list[int] = []
        self.stop: Callable[[], None] = lambda: None

    def send(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ROW_WARM:
            self.warm.append(frames.unpack_number(body))
            if self.warm[-1] == LAST:
                self.stop()


def test_free_memory_goes_back_while_rows_come_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[int] = []
    control = Control()
    monkeypatch.setattr(child, "GIVE_BACK_S", 0.05)
    monkeypatch.setattr(calls, "give_memory_back", lambda: given_back.append(len(control.warm)))
    engine: Any = SimpleNamespace(
        warm_memory=lambda keep_going: None,
        facts=SimpleNamespace(pack=bytes),
    )
    config: Any = SimpleNamespace(gpu=None)
    silent: Any = None
    heard: Any = control
    mover = MoverLoop(config, engine, heard, silent, silent)
    control.stop = lambda: setattr(mover, "_stopping", True)
    thread = threading.Thread(target=mover._warm, daemon=True)  # and nothing beside it
    thread.start()
    for row in range(ROWS + 1):
        mover._cold.put((RowId(row), row))
        time.sleep(0.005)
    thread.join(10)
    assert not thread.is_alive()
    assert control.warm == list(range(ROWS + 1))
    assert len(given_back) >= 2
    assert any(0 < told < ROWS for told in given_back)
