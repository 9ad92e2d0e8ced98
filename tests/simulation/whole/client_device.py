"""An engine's device: its memory, and whether it has computed what it was told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

from tests.simulation.whole.bytes import RankBytes
from tests.simulation.whole.client_threads import Threads

STEPS_AHEAD = 2  # of its device's, an engine is at most


class Device:
    """The rank's memory, with a label for each token. It computes at once."""

    def __init__(self, memory: RankBytes) -> None:
        self._memory = memory

    def write(self, group: int, block: int, offset: int, label: object) -> None:
        held = self._memory.read(group, block)
        self._memory.write(
            group, block, {**(held if isinstance(held, dict) else {}), offset: label}
        )

    def holds(self, group: int, block: int, offset: int, label: object) -> bool:
        held = self._memory.read(group, block)
        return isinstance(held, dict) and held.get(offset) == label

    def computed(self) -> Callable[[], None] | None:
        """What waits until all that it was told so far is computed; None: it is."""
        return None

    def end(self) -> None:
        """Its process has ended."""


class LateDevice(Device):
    """It computes in the order in which it was told, and later: a GPU behind its launches.

    So the model reads its history late, too: what is wrong with it ends the world then. An engine
    waits for what it launched a while ago: the device is never further behind than STEPS_AHEAD.
    """

    def __init__(self, memory: RankBytes, threads: Threads, behind_s: float, drawn: Random) -> None:
        super().__init__(memory)
        self._threads, self._behind_s, self._drawn = threads, behind_s, drawn
        self._told: deque[Callable[[], None]] = deque()
        self._counted = self._done = 0  # of all that it was ever told
        self._is_over = False
        self._free_s = 0.0  # when it has computed all that was launched

    def write(self, group: int, block: int, offset: int, label: object) -> None:
        self.launch(partial(super().write, group, block, offset, label))

    def holds(self, group: int, block: int, offset: int, label: object) -> bool:
        self.launch(partial(self._check, group, block, offset, label))
        return True

    def _check(self, group: int, block: int, offset: int, label: object) -> None:
        assert super().holds(group, block, offset, label), (
            f"the model reads what is not its own: block {block} of group {group}, {offset}"
        )

    def launch(self, what: Callable[[], None]) -> None:
        """Have it do this after all that it was told before."""
        if not self._is_over:
            self._told.append(what)
            self._counted += 1

    def computed(self) -> Callable[[], None]:
        has_come = self.begin()

        def wait() -> None:
            self._threads.wait_until(has_come, None)

        return wait

    def begin(self) -> Callable[[], bool]:
        """Let it begin with all that it was told so far; whether that is done."""
        loop, mark = self._threads.loop, self._counted
        took_s = self._drawn.random() * self._behind_s
        furthest_s = loop.now + STEPS_AHEAD * self._behind_s
        self._free_s = min(furthest_s, max(self._free_s, loop.now) + took_s)
        loop.outside(self._free_s - loop.now, self._compute, mark)
        return lambda: self._done >= mark

    def _compute(self, mark: int) -> None:
        while self._told and self._done < mark:
            self._done += 1
            self._told.popleft()()
        self._threads.news()

    def end(self) -> None:
        """The step that its engine dies in goes on here, and computes nothing more."""
        self._is_over = True
        self._told.clear()
