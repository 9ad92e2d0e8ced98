"""A device that runs behind its launches, as a GPU does, for ranks whose KV is host memory.

What it "runs" is a function that writes that memory late: when a rank waits for the end of what was
launched.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from tests.vllm.rank_rig import PATIENCE_S


class LateDevice:
    """Runs what was launched, in order, and nothing before `let_run`."""

    def __init__(self) -> None:
        self._launched: deque[Callable[[], None]] = deque()
        self._may_run = threading.Event()
        self._lock = threading.Lock()

    def launch(self, kernel: Callable[[], None]) -> None:
        self._launched.append(kernel)

    def let_run(self) -> None:
        self._may_run.set()

    def hold(self) -> None:
        """Nothing that is launched from now on runs before the next `let_run`."""
        self._may_run.clear()

    def end(self, _device: torch.device) -> Callable[[], None]:
        """What waits for all that was launched by now."""
        mark = threading.Event()
        self.launch(mark.set)

        def wait() -> None:
            assert self._may_run.wait(PATIENCE_S)
            with self._lock:
                while not mark.is_set():
                    self._launched.popleft()()

        return wait
