"""A process that the engine forks has nothing of the engine's at the daemon.

It would have copies of sessions, rings and boards, and none of the threads. A job that it began
would bear the number of one of its parent's, and end when that does: nothing was copied for it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

FORKED = "this process was forked from the engine's: it needs connections of its own"


class LeftToParent(Protocol):
    """What belongs to the process that made it."""

    def leave_to_parent(self) -> None:
        """Have nothing any more, and say so. In the child, in which no other thread runs."""


_made: weakref.WeakSet[LeftToParent] = weakref.WeakSet()


def keep_from_children(each: LeftToParent) -> None:
    """From now on a forked process leaves it to its parent."""
    _made.add(each)


def _leave_all() -> None:
    for each in list(_made):
        each.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
