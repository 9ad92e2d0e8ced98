"""Memory that messages took goes back to the system: the allocator alone would keep it.

Most of it never was a message here: what gRPC holds of those that stop half-way, of connections
and of calls that wait is freed in small parts on threads of its own, and stays with the heap.
So the daemon looks at how much it holds rather than at what it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvd.linux import calls, proc

LOOK_SECONDS = 1.0
GROWN_BYTES = 16 << 20  # more than was held at the best of times: worth while
LONGEST_PAUSE = 64  # looks between two tries where the last ones gave nothing
LOOKS_ANYHOW = 300  # after so many it is tried without need: what lies free in holes grows slowly


def own_bytes() -> int:
    """What this process holds of memory that it shares with nobody."""
    held = proc.own_use()
    return held.resident_bytes - held.shared_bytes


class MemoryReturn:
    """Gives free memory back to the system soon after it was taken.

    While as much is in use it tries again, each time after twice as long. So what a client holds
    for minutes goes back too, once the client has let it go. Now and then it tries without need.
    """

    def __init__(
        self,
        give_back: Callable[[], None] = calls.give_memory_back,
        held: Callable[[], int] = own_bytes,
    ) -> None:
        self._give_back = give_back
        self._held = held
        self._least = self._last = 0  # so little was enough; after the last try
        self._pause, self._looks = 1, 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Look from now on, until `close`; what is held now is what the daemon needs."""
        self._least = self._last = self._held()
        self._go_on()

    def _go_on(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        try:
            held = self._held()
        except OSError:  # no descriptor is left to look with, now
            self._go_on()
            return
        self._least = min(self._least, held)
        self._looks += 1
        if held > self._last + GROWN_BYTES:
            self._pause, self._looks = 1, 1
        has_grown = held > self._least + GROWN_BYTES
        if self._looks < (self._pause if has_grown else LOOKS_ANYHOW):
            self._go_on()
            return
        # On a thread: it takes milliseconds, and no lock of ours.
        try:
            task = asyncio.get_running_loop().run_in_executor(None, self._give_back)
        except RuntimeError:  # there are as many threads as there may be, now
            self._go_on()
            return
        task.add_done_callback(lambda _: self._gave_back(held, has_grown))

    def _gave_back(self, before: int, had_grown: bool) -> None:
        with contextlib.suppress(OSError):  # likewise: what was there before counts
            self._last = self._held()
        self._least = min(self._least, self._last)
        if had_grown:
            gave = before - self._last > GROWN_BYTES
            self._pause = 1 if gave else min(2 * self._pause, LONGEST_PAUSE)
        self._looks = 0
        if self._timer is not None:
            self._go_on()
