"""Operators' work that the core does in pieces: who asked hears when the last one is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import NamespaceId, TenantId


class LongWork:
    """Begins such work, and knows by a token who waits for it. Lives on the event loop."""

    def __init__(
        self,
        knows: Callable[[NamespaceId], bool],
        call: Callable[[ev.Event], Any],
        spawn: Callable[[Coroutine[Any, Any, int]], asyncio.Task[int]],
    ) -> None:
        self._knows = knows
        self._call = call
        self._spawn = spawn
        self._last_token = 0
        self._asked: dict[int, asyncio.Future[int]] = {}  # by token
        self._clearing = asyncio.Lock()

    def next_token(self) -> int:
        """A number for long work, which is told done under it."""
        self._last_token += 1
        return self._last_token

    def tell_done(self, order: act.TellDone) -> None:
        """Work is done: whoever waits for it hears so."""
        asked = self._asked.get(order.token)
        if asked is not None and not asked.done():
            asked.set_result(order.blocks)

    async def clear(
        self, namespaces: Sequence[NamespaceId], begin: Callable[[], None] = lambda: None
    ) -> int:
        """Have nothing of these namespaces found; the number of their blocks, when all are gone.

        One call after another: what one has left to be forgotten is bounded, and so that of all.
        `begin` is called when its turn has come. A caller that gives up before that has cleared
        nothing, one that gives up later all of them.
        """
        await self._clearing.acquire()
        clearing = self._spawn(self._clear(namespaces))
        begin()
        return await asyncio.shield(clearing)

    async def _clear(self, namespaces: Sequence[NamespaceId]) -> int:
        tokens = []
        try:
            for namespace in namespaces:
                if self._knows(namespace):
                    tokens.append(self._expect())
                    self._call(ev.NamespaceCleared(tokens[-1], namespace))
                    await asyncio.sleep(0)
            return sum([await self._asked[token] for token in tokens])
        finally:
            self._clearing.release()
            for token in tokens:
                del self._asked[token]

    async def set_quota(self, tenant: TenantId, quota_bytes: int) -> int:
        """Give the tenant this quota, 0 for none; the number of blocks that went for it."""
        token = self._expect()
        try:
            self._call(ev.QuotaSet(token, tenant, quota_bytes))
            return await self._asked[token]
        finally:
            del self._asked[token]

    def _expect(self) -> int:
        """A token whose work will be told done."""
        token = self.next_token()
        self._asked[token] = asyncio.get_running_loop().create_future()
        return token
