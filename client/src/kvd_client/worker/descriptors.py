"""Descriptors of one owner, closed once each."""

from __future__ import annotations

import contextlib
import os


def close_all(descriptors: list[int]) -> None:
    """Close them and empty the list.

    Call it again where a signal's handler raised amid it: what is not closed yet is in the list,
    and nothing else. No descriptor is closed twice: the second may be another's by then.
    """
    while descriptors:
        with contextlib.suppress(OSError):
            fd = descriptors[-1]
            del descriptors[-1]  # handlers run at calls: none between this and the next line
            os.close(fd)
