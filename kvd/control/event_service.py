"""EventService: the cache's changes, in order and without gaps."""

from __future__ import annotations

import asyncio
import contextlib

from kvd.control import convert
from kvd.control.errors import DeadlinePassed
from kvd.control.namespaces import Namespaces
from kvd.control.peers import Context, Peers
from kvd.core.errors import InvalidArgument, LimitExceeded
from kvd.driver import Driver
from kvd.event_log import Change, Delivery
from kvd_proto.v1 import events_pb2, events_pb2_grpc

MAX_WATCHERS = 256
INCARNATION_BYTES = 16
SNAPSHOT_WRITE_SECONDS = 10.0  # a snapshot is large, and others wait for theirs


class EventServicer(events_pb2_grpc.EventServiceServicer):
    """Streams the event log of the caller's tenants."""

    def __init__(self, driver: Driver, namespaces: Namespaces, peers: Peers) -> None:
        self._driver = driver
        self._namespaces = namespaces
        self._peers = peers
        self._watchers = 0

    async def WatchEvents(  # noqa: N802 - gRPC's name
        self, request: events_pb2.WatchEventsRequest, context: Context
    ) -> None:
        """Write changes until the caller goes away, or its process does."""
        peer = self._peers.behind(context)
        if len(request.incarnation) not in (0, INCARNATION_BYTES):
            raise InvalidArgument(
                f"incarnation has {len(request.incarnation)} bytes, not {INCARNATION_BYTES}",
                "incarnation",
            )
        if request.namespace_id:
            self._namespaces.require(peer, request.namespace_id)
        if self._watchers >= MAX_WATCHERS:
            raise LimitExceeded(f"more than {MAX_WATCHERS} watchers")

        def wanted(change: Change) -> bool:
            if request.namespace_id:
                return change.namespace == request.namespace_id
            return self._namespaces.may_see_of(peer, change.tenant)

        after = (request.incarnation, request.after_sequence) if request.incarnation else None
        log = self._driver.event_log
        previous = request.after_sequence
        watching = asyncio.current_task()
        assert watching is not None, "a call runs in a task"

        def gone() -> None:
            watching.cancel()

        self._watchers += 1
        peer.on_end(gone)
        try:
            async with contextlib.aclosing(log.watch(after, wanted)) as deliveries:
                async for delivery in deliveries:
                    reached = delivery.sequence
                    await _deliver(context, delivery, log.incarnation, previous)
                    previous = reached
                    del delivery  # the next may be long in coming, and a snapshot is large
        finally:
            peer.forget(gone)
            self._watchers -= 1


async def _deliver(context: Context, delivery: Delivery, incarnation: bytes, previous: int) -> None:
    if not delivery.changes and not delivery.snapshot:
        return
    patience_s = SNAPSHOT_WRITE_SECONDS if delivery.snapshot else None
    for message in convert.delivery_messages(delivery, incarnation, previous):
        try:
            async with asyncio.timeout(patience_s):
                await context.write(message)
        except TimeoutError:
            raise DeadlinePassed(
                f"the watcher took no part of its snapshot for {patience_s} s"
            ) from None
