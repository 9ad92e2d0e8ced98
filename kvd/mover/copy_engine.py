"""The seam for copying: between the pool and host shared memory, or a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd import native
from kvd.core.events import JobKind
from kvd.mover.facts import MoverFacts
from kvd.mover.layout import LocatedPart

KeepGoing = Callable[[], bool]


class StillWanted:
    """A KeepGoing that the native library can ask as well, by words in memory."""

    def __init__(self, asked: KeepGoing, watches: native.Watches) -> None:
        self._asked = asked
        self.watches = watches

    def __call__(self) -> bool:
        return self._asked()


class CopyStopped(Exception):
    """The copy was told to stop between two ranges; some bytes were written."""


class DeviceLost(Exception):
    """Nothing is known of copies under way on the GPU any more, so this process must end."""


class CopyEngine(Protocol):
    """Moves blocks between one rank's memory and its shard's extents.

    `copy` runs in `copies_at_once` threads per direction, all at once; the warm calls in a thread
    of their own; opening and closing in the main thread. An extent is closed only when no call
    uses it. Where the rank's memory is a GPU's, every call may raise DeviceLost.
    """

    copies_at_once: int

    @property
    def facts(self) -> MoverFacts:
        """How it copies, as of now; any thread."""

    def open_extent(self, extent: int) -> npt.NDArray[np.uint8]:
        """Make an extent's slots reachable, at once: the bytes that copies read and write.

        OSError when its file can't be had.
        """

    def close_extent(self, extent: int) -> None:
        """Let go of an open extent: nothing of it stays mapped. Its bytes were let go of."""

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        """Do ahead of time what would slow the first copies into the extent."""

    def warm_memory(self, keep_going: KeepGoing) -> None:
        """Likewise for the engine's memory. Never makes the engine's memory grow."""

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        """Copy the part's blocks and return the bytes that were not null.

        Null engine blocks: a load leaves them alone, a store writes zeros to their places.
        The part has passed `flaw_of_part`, its extents are open. Looks at keep_going between
        ranges and raises CopyStopped; with several copies at once also before the first, once it
        has its turn: until then it touches nothing, extents neither. Whatever it raises, no copy
        of this call is under way afterwards, except with DeviceLost.
        """

    def close(self) -> None:
        """Let go of everything."""
