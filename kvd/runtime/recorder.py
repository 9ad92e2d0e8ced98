"""Recordings of what engines ask for: requests as clients tell of them, to whoever reads.

A reader has a queue of its own. What does not fit is left out, whole requests at a time, and
counted: no reader slows an engine or the daemon. Without a reader clients name no prompts, and this
costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvd.core.errors import LimitExceeded
from kvd.core.keys import NamespaceId

MAX_RECORDINGS = 4  # at once
MAX_RECORDED_WAITING = 1024  # requests that one has not read yet
MAX_RECORDED_BYTES = 8 << 20  # of those


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as it began."""

    at_ns: int
    namespace: NamespaceId
    epoch: str
    account: str
    prompt_tokens: int
    hash_bytes: int
    hashes: bytes
    is_told: bool  # its blocks are, or it has none


@dataclass(slots=True, eq=False)
class Recording:
    """What waits for one reader."""

    namespace: NamespaceId  # 0: all
    waiting: deque[RequestRecord] = field(default_factory=deque)
    waiting_bytes: int = 0
    lost: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, record: RequestRecord) -> None:
        """Queue it, or count it as lost."""
        size = len(record.hashes)
        full = len(self.waiting) >= MAX_RECORDED_WAITING
        if not record.is_told or full or self.waiting_bytes + size > MAX_RECORDED_BYTES:
            self.lost += 1
        else:
            self.waiting.append(record)
            self.waiting_bytes += size
        self.news.set()

    async def take(self, most: int) -> list[RequestRecord]:
        """The next ones, or none where some were lost; waits for either."""
        await self.news.wait()
        taken = [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]
        self.waiting_bytes -= sum(len(each.hashes) for each in taken)
        if not self.waiting:
            self.news.clear()
        return taken


class Recorder:
    """Every recording. `tell_clients` is told when the first begins and the last has ended."""

    def __init__(self, tell_clients: Callable[[bool], None]) -> None:
        self._recordings: list[Recording] = []
        self._tell_clients = tell_clients

    @property
    def is_on(self) -> bool:
        return bool(self._recordings)

    @contextmanager
    def recording(self, namespace: NamespaceId) -> Iterator[Recording]:
        """Record until the end of the block; LimitExceeded where there are too many."""
        if len(self._recordings) >= MAX_RECORDINGS:
            raise LimitExceeded(f"{MAX_RECORDINGS} recordings run already")
        made = Recording(namespace)
        self._recordings.append(made)
        if len(self._recordings) == 1:
            self._tell_clients(True)
        try:
            yield made
        finally:
            self._recordings.remove(made)
            if not self._recordings:
                self._tell_clients(False)

    def put(self, record: RequestRecord) -> None:
        """A request began."""
        for each in self._recordings:
            if each.namespace in (0, record.namespace):
                each.put(record)
