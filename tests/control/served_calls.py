"""A server of one service behind kvd's interceptor, and a client that takes as little as may be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from kvd.control.rpc import CallInterceptor
from kvd.runtime.turns import FairQueue

USER = 7  # whose all calls are
# What HTTP/2 holds for a client that doesn't read: as little as may be, and no more later.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))


class EndsOfCalls:
    """Observes how calls have ended, and why they were refused."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.reasons: list[str] = []

    def call_ended(self, _method: str, code: str, _seconds: float) -> None:
        self.ends.put_nowait(code)

    def refused(self, reason: str) -> None:
        self.reasons.append(reason)

    async def next_end(self) -> str:
        """The code that the next call ends with."""
        return await asyncio.wait_for(self.ends.get(), 10)


@contextlib.asynccontextmanager
async def served(
    path: Path, observer: Any, add_service: Callable[[grpc.aio.Server], None]
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the server, on this socket."""
    calls = CallInterceptor(observer, lambda _: None, FairQueue(), lambda _: USER, lambda _: False)
    server = grpc.aio.server(interceptors=[calls])
    add_service(server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}", SMALL_WINDOW) as channel:
            yield channel
    finally:
        await server.stop(None)
