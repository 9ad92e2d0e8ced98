"""Whether the daemon takes work, as gRPC's health protocol asks it: by probes that say no hello."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvd.control.access.peers import Context

_Answer = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Says one status for all services. Lives on one event loop.

    To say another waits for nobody: a watcher that takes no answers holds up only itself.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._status: int = _Answer.SERVING
        self._changed = asyncio.Event()  # another one after each change

    def say(self, status: int) -> None:
        """Answer with this status from now on, and tell those who watch."""
        self._status = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> _Answer:
        """The status now; NOT_FOUND for a service that is not the daemon's."""
        if request.service not in self._services:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("the daemon has no such service")
            return _Answer()
        return _Answer(status=self._status)

    async def Watch(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        """The status now and after each change, until the caller goes away."""
        is_known = request.service in self._services
        told: int | None = None
        while True:
            changed = self._changed
            status = self._status if is_known else _Answer.SERVICE_UNKNOWN
            if status != told:
                await context.write(_Answer(status=status))
                told = status
            await changed.wait()
