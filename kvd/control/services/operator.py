"""OperatorService: what an operator and `kvd status` call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvd.control import audit
from kvd.control.access.peers import Context, Peer, Peers, ends_with, on_behalf_of
from kvd.control.access.tenants import TenantPolicy
from kvd.control.namespace import check_string
from kvd.control.namespaces import Namespaces
from kvd.control.services.explain import explain
from kvd.control.services.record import write_all
from kvd.control.services.status import PoolPlace, StatusReport
from kvd.control.sessions.session import SessionContext
from kvd.core.errors import InvalidArgument, LimitExceeded
from kvd.core.keys import NamespaceId, TenantId
from kvd.runtime.driver import Driver
from kvd.runtime.threads import NoThread
from kvd.runtime.verify import Stage, Verifier
from kvd_proto.v1 import operator_pb2 as pb
from kvd_proto.v1 import operator_pb2_grpc

MAX_DRAIN_MS = 600_000
MAX_QUOTA_BYTES = 1 << 60
TENANTS_NAMED = 16  # in a line of the log


class OperatorServicer(operator_pb2_grpc.OperatorServiceServicer):
    """Serves status to everyone, of what they may see, and the rest to operators."""

    # ruff: noqa: N802 - gRPC's names

    def __init__(
        self,
        driver: Driver,
        peers: Peers,
        tenants: TenantPolicy,
        namespaces: Namespaces,
        report: StatusReport,
        common: SessionContext,
    ) -> None:
        self._driver = driver
        self._peers = peers
        self._tenants = tenants
        self._namespaces = namespaces
        self._report = report
        self._recorder = common.recorder
        self._verifier = Verifier(driver.machine, driver.pool, driver.turns)
        self.place = PoolPlace("", 0)
        # Takes no more sessions, then waits for the copies; the number still running.
        self.drain: Callable[[float], Awaitable[int]] = driver.drain
        self.undrain: Callable[[], Awaitable[bool]]  # whether it was draining

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        peer = self._peers.behind(context)
        return await self._report.status(peer, self.place, request)

    async def ListNamespaces(
        self,
        request: pb.ListNamespacesRequest,
        context: Context,
    ) -> pb.ListNamespacesResponse:
        peer = self._peers.behind(context)
        page, more = await self._report.namespaces(peer, request.after_namespace_id)
        return pb.ListNamespacesResponse(namespaces=page, more=more)

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:
        peer = self._operator(context)
        chosen = self._namespaces.visible(peer)
        if request.namespace_id:
            chosen = [self._namespaces.require(peer, request.namespace_id)]
        tenants = sorted({self._namespaces.fields(n).get("tenant", "") for n in chosen})
        cleared, removed = False, None

        def begin() -> None:
            nonlocal cleared
            cleared = True
            if not request.namespace_id:
                self._driver.tiers.all_cleared()  # of namespaces too that are forgotten

        try:
            removed = await self._driver.long_work.clear(chosen, begin)
        finally:  # they are cleared, too, where the caller does not wait for the end
            audit.note(
                "clear",
                peer.uid,
                on_behalf_of=on_behalf_of(context),
                namespace=request.namespace_id or "all",
                namespaces=len(chosen) if cleared else 0,
                tenants=tenants[:TENANTS_NAMED] if cleared else [],
                blocks_removed=removed,
            )
        return pb.ClearResponse(blocks_removed=removed)

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        peer = self._operator(context)
        check_string(request.tenant, "tenant")
        tenant = TenantId(request.tenant)
        before = self._driver.machine.quota_of(tenant)
        if before is None and all(rule.tenant != tenant for rule in self._tenants.rules):
            raise InvalidArgument(
                f"there is no tenant {request.tenant!r}: `kvd quota` lists those that there are;"
                " `tenants` in the configuration file, with a reload, makes others",
                "tenant",
            )
        if request.quota_bytes > MAX_QUOTA_BYTES:
            raise InvalidArgument(f"quota_bytes is over {MAX_QUOTA_BYTES}", "quota_bytes")
        evicted: int | None = None
        try:
            evicted = await self._driver.long_work.set_quota(tenant, request.quota_bytes)
        finally:  # it is set at once
            audit.note(
                "quota",
                peer.uid,
                on_behalf_of=on_behalf_of(context),
                tenant=request.tenant,
                quota_bytes=request.quota_bytes,
                quota_bytes_before=before or 0,
                blocks_evicted=evicted,
            )
        return pb.SetQuotaResponse(blocks_evicted=evicted)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        peer = self._operator(context)
        if request.deadline_ms > MAX_DRAIN_MS:
            raise InvalidArgument(
                f"deadline_ms is {request.deadline_ms}, more than {MAX_DRAIN_MS}", "deadline_ms"
            )
        audit.note(
            "drain", peer.uid, on_behalf_of=on_behalf_of(context), deadline_ms=request.deadline_ms
        )
        left = await self.drain(request.deadline_ms / 1e3)
        audit.note("drained", peer.uid, on_behalf_of=on_behalf_of(context), jobs_left=left)
        return pb.DrainResponse(jobs_left=left)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:  # noqa: ARG002
        peer = self._operator(context)
        was_draining = await self.undrain()
        audit.note(
            "undrain", peer.uid, on_behalf_of=on_behalf_of(context), was_draining=was_draining
        )
        return pb.UndrainResponse(was_draining=was_draining)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        peer = self._peers.behind(context)
        check_string(request.request_id, "request_id")
        return await explain(self._driver, self._namespaces, peer, request.request_id)

    async def Record(self, request: pb.RecordRequest, context: Context) -> None:
        """Write the requests of engines until the caller goes away, or its process does."""
        peer = self._operator(context)
        namespace = NamespaceId(0)
        if request.namespace_id:
            namespace = self._namespaces.require(peer, request.namespace_id)
        # By itself, and not given up: see WatchEvents.
        await context.send_initial_metadata(())
        with self._recorder.recording(namespace) as recording:
            audit.note("record", peer.uid, namespace=request.namespace_id or "all")
            with ends_with(peer):
                await write_all(
                    recording,
                    context,
                    self._driver.clock.now_ns(),
                    lambda: self._tenants.require_operator(peer),
                )

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        self._operator(context)
        try:
            part = Stage(request.part)
        except ValueError:
            raise InvalidArgument(f"there is no part {request.part}", "part") from None
        try:
            look = await self._verifier.look(part, request.after, with_bytes=request.with_bytes)
        except NoThread as error:
            raise LimitExceeded(f"no thread to read bytes in: {error}") from None
        return pb.VerifyResponse(
            findings=[
                pb.Finding(invariant=each.invariant, place=each.place, problem=each.problem)
                for each in look.findings
            ],
            more_findings=look.more_findings,
            next_part=pb.VerifyPart.Name(look.next_part),
            next_after=look.next_after,
            blocks=look.blocks,
            bytes=look.bytes,
            unsettled=look.unsettled,
        )

    def _operator(self, context: Context) -> Peer:
        """The caller, who must operate."""
        peer = self._peers.behind(context)
        self._tenants.require_operator(peer)
        return peer
