"""OperatorService: what an operator and `kvd status` call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvd.control.access.peers import Context, Peers
from kvd.control.access.tenants import TenantPolicy
from kvd.control.namespace import check_string
from kvd.control.namespaces import Namespaces
from kvd.control.services.status import PoolPlace, StatusReport
from kvd.core.errors import InvalidArgument
from kvd.core.keys import TenantId
from kvd.runtime.driver import Driver
from kvd.runtime.verify import Stage, Verifier
from kvd_proto.v1 import operator_pb2 as pb
from kvd_proto.v1 import operator_pb2_grpc

MAX_DRAIN_MS = 600_000
MAX_QUOTA_BYTES = 1 << 60


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
    ) -> None:
        self._driver = driver
        self._peers = peers
        self._tenants = tenants
        self._namespaces = namespaces
        self._report = report
        self._verifier = Verifier(driver.machine, driver.pool, driver.turns)
        self.place = PoolPlace("", 0)
        # Takes no more sessions, then waits for the copies; the number still running.
        self.drain: Callable[[float], Awaitable[int]] = driver.drain

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        peer = self._peers.behind(context)
        return await self._report.status(peer, self._tenants, self.place, request)

    async def ListNamespaces(
        self,
        request: pb.ListNamespacesRequest,
        context: Context,
    ) -> pb.ListNamespacesResponse:
        peer = self._peers.behind(context)
        page, more = await self._report.namespaces(peer, request.after_namespace_id)
        return pb.ListNamespacesResponse(namespaces=page, more=more)

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:
        peer = self._peers.behind(context)
        self._tenants.require_operator(peer)
        chosen = self._namespaces.visible(peer)
        if request.namespace_id:
            chosen = [self._namespaces.require(peer, request.namespace_id)]
        else:
            self._driver.tiers.all_cleared()  # of namespaces too that are forgotten
        return pb.ClearResponse(blocks_removed=await self._driver.clear(chosen))

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        self._tenants.require_operator(self._peers.behind(context))
        check_string(request.tenant, "tenant")
        known = {rule.tenant for rule in self._tenants.rules}
        known |= {t.tenant for t in self._driver.machine.statistics().tenants}
        if request.tenant not in known:
            raise InvalidArgument(f"there is no tenant {request.tenant!r}", "tenant")
        if request.quota_bytes > MAX_QUOTA_BYTES:
            raise InvalidArgument(f"quota_bytes is over {MAX_QUOTA_BYTES}", "quota_bytes")
        evicted = await self._driver.set_quota(TenantId(request.tenant), request.quota_bytes)
        return pb.SetQuotaResponse(blocks_evicted=evicted)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._tenants.require_operator(self._peers.behind(context))
        if request.deadline_ms > MAX_DRAIN_MS:
            raise InvalidArgument(
                f"deadline_ms is {request.deadline_ms}, more than {MAX_DRAIN_MS}", "deadline_ms"
            )
        return pb.DrainResponse(jobs_left=await self.drain(request.deadline_ms / 1e3))

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        self._tenants.require_operator(self._peers.behind(context))
        try:
            part = Stage(request.part)
        except ValueError:
            raise InvalidArgument(f"there is no part {request.part}", "part") from None
        look = await self._verifier.look(part, request.after, with_bytes=request.with_bytes)
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
