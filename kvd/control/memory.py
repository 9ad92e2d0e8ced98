"""Memory that large messages took goes back to the system: the allocator alone would keep it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

NOTED_BYTES = 4 << 20  # of messages, after which it is worth while
PAUSE_SECONDS = 1.0  # from the last look; what is still in use then stays


def trim() -> None:
    """Give every free page of the allocator back (malloc_trim(3)); nothing without glibc."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


class MemoryReturn:
    """Counts the bytes of large messages, and has free memory given back some time after them."""

    def __init__(self, give_back: Callable[[], None] = trim) -> None:
        self._give_back = give_back
        self._noted = 0
        self._waiting = False
        self._task: asyncio.Future[None] | None = None

    def note(self, size: int) -> None:
        """A message of so many bytes came."""
        self._noted += size
        if self._noted >= NOTED_BYTES and not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._begin)

    def _begin(self) -> None:
        self._waiting = False
        self._noted = 0
        # On a thread: it takes milliseconds, and no lock of ours.
        with contextlib.suppress(RuntimeError):  # without a thread: after the next large messages
            self._task = asyncio.get_running_loop().run_in_executor(None, self._give_back)
