"""Work in a thread that is not left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Given = TypeVar("Given")


async def to_its_end(work: Callable[[Given], None], given: Given) -> None:
    """Do it in a thread; who is cancelled meanwhile waits until it is done all the same.

    A thread can't be stopped, and what it works on may be another's once nobody waits for it.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work, given))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
