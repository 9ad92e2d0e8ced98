"""EventService: the cache's changes, in order and without gaps."""

from __future__ import annotations

import asyncio
import contextlib

from kvd.control import convert
from kvd.control.access.peers import Context, Peers, ends_with
from kvd.control.errors import DeadlinePassed
from kvd.control.namespaces import Namespaces
from kvd.core.errors import InvalidArgument
from kvd.core.keys import NamespaceId, TenantId
from kvd.core.shares import Bound, Shares
from kvd.pool.pool import INCARNATION_BYTES
from kvd.runtime.driver import Driver
from kvd.runtime.event_log import ChangeFilter, Delivery, FellBehind
from kvd_proto.v1 import events_pb2, events_pb2_grpc

MAX_WATCHERS = 256
MAX_WATCHERS_OF_A_USER = 64
WATCHERS_FOR_OPERATORS = 16
WRITE_SECONDS = 10.0  # a watcher that takes nothing for so long is ended


class EventServicer(events_pb2_grpc.EventServiceServicer):
    """Serves the event log to watchers: the events of the caller's tenants."""

    def __init__(self, driver: Driver, namespaces: Namespaces, peers: Peers) -> None:
        self._driver = driver
        self._namespaces = namespaces
        self._peers = peers
        self._watchers = Shares(
            Bound("event watchers", MAX_WATCHERS, MAX_WATCHERS_OF_A_USER, WATCHERS_FOR_OPERATORS)
        )

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

        def may_see(tenant: TenantId, namespace: NamespaceId) -> bool:
            # Asked anew of each change: a reload may take the tenant from the user.
            is_meant = request.namespace_id in (0, namespace)
            return is_meant and self._namespaces.may_see_of(peer, tenant)

        has_grown = self._namespaces.growth_of_sight(peer)
        wanted = ChangeFilter(may_see, request.with_tiers, has_grown)
        after = (request.incarnation, request.after_sequence) if request.incarnation else None
        log = self._driver.event_log
        previous = request.after_sequence
        watching = asyncio.current_task()
        assert watching is not None, "a call runs in a task"

        self._watchers.take(peer.uid, operates=self._namespaces.operates(peer))
        # Not before: a message that the caller does not take stays in gRPC, whoever gave it up.
        watching.add_done_callback(lambda _: self._watchers.give_back(peer.uid))
        # By itself, and not given up: what is takes the metadata with it, and then the call's
        # status can't be sent.
        await context.send_initial_metadata(())
        try:
            with ends_with(peer):
                async with contextlib.aclosing(log.watch(after, wanted, peer.uid)) as deliveries:
                    async for delivery in deliveries:
                        reached = delivery.sequence
                        await _deliver(context, delivery, log.incarnation, previous)
                        previous = reached
                        del delivery  # the next may be long in coming
        except FellBehind:
            raise DeadlinePassed(
                "the watcher took so long over its snapshot that it would have to begin again"
            ) from None


async def _deliver(context: Context, delivery: Delivery, incarnation: bytes, previous: int) -> None:
    if not delivery.changes and not delivery.snapshot:
        return
    for message in convert.delivery_messages(delivery, incarnation, previous):
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await context.write(message)
        except TimeoutError:
            raise DeadlinePassed(f"the watcher took no message for {WRITE_SECONDS} s") from None
