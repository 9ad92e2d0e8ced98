"""EngineService: the session stream, and its verbs one by one for simple clients and tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvd.control import convert
from kvd.control.access.peers import Context, Peers, Role
from kvd.control.errors import DeadlinePassed
from kvd.control.sessions.session import Request, SessionContext
from kvd.control.sessions.verbs import LiveSession
from kvd.core.errors import InvalidArgument
from kvd_proto.v1 import engine_pb2 as pb
from kvd_proto.v1 import engine_pb2_grpc

MAX_FLUSH_MS = 60_000


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves the unary verbs of an engine; each is a Step with that one part."""

    # ruff: noqa: N802 - gRPC's names

    def __init__(self, common: SessionContext, peers: Peers) -> None:
        self._common = common
        self._peers = peers

    def _live(self, context: Context, session: int) -> LiveSession:
        peer = self._peers.behind(context, Role.SCHEDULER)
        return self._common.sessions.of(peer, session)

    async def Session(self, requests: AsyncIterator[Request], context: Context) -> None:
        peer = self._peers.behind(context, Role.SCHEDULER)
        await self._common.serve(requests, context, peer)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        live = self._live(context, request.session_id)
        return pb.LookupResponse(answers=await self._common.verbs.lookup(live, request.queries))

    async def PrepareLoad(
        self, request: pb.PrepareLoadRequest, context: Context
    ) -> pb.PrepareLoadResponse:
        step = pb.Step(sequence=request.sequence, loads=[request.job])
        reply = await self._step(context, request.session_id, step)
        return pb.PrepareLoadResponse(verdict=next(iter(reply.verdicts), None))

    async def PrepareStore(
        self, request: pb.PrepareStoreRequest, context: Context
    ) -> pb.PrepareStoreResponse:
        step = pb.Step(sequence=request.sequence, stores=[request.job])
        reply = await self._step(context, request.session_id, step)
        return pb.PrepareStoreResponse(verdict=next(iter(reply.verdicts), None))

    async def CompleteLoad(
        self, request: pb.CompleteLoadRequest, context: Context
    ) -> pb.CompleteLoadResponse:
        live = self._live(context, request.session_id)
        await self._common.verbs.complete_load(live, request.sequence, request.context)
        return pb.CompleteLoadResponse()

    async def Touch(self, request: pb.TouchRequest, context: Context) -> pb.TouchResponse:
        step = pb.Step(sequence=request.sequence, touches=[request.touch])
        await self._step(context, request.session_id, step)
        return pb.TouchResponse()

    async def ReleaseLease(
        self, request: pb.ReleaseLeaseRequest, context: Context
    ) -> pb.ReleaseLeaseResponse:
        step = pb.Step(sequence=request.sequence, released_leases=request.lease_ids)
        await self._step(context, request.session_id, step)
        return pb.ReleaseLeaseResponse()

    async def EndStep(self, request: pb.EndStepRequest, context: Context) -> pb.EndStepResponse:
        step = pb.Step(
            sequence=request.sequence,
            preempted_request_ids=request.preempted_request_ids,
            finished_request_ids=request.finished_request_ids,
            end_step=True,
        )
        await self._step(context, request.session_id, step)
        return pb.EndStepResponse()

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        live = self._live(context, request.session_id)
        if not 1 <= request.deadline_ms <= MAX_FLUSH_MS:
            raise InvalidArgument(
                f"deadline_ms is {request.deadline_ms}, not 1..{MAX_FLUSH_MS}", "deadline_ms"
            )
        jobs = convert.job_ids(request.job_ids, "job_ids")
        try:
            ends = await self._common.driver.jobs.wait(live.id, jobs, request.deadline_ms / 1e3)
        except TimeoutError:
            running = self._common.driver.jobs.live(live.id)
            left = sorted(running & set(jobs) if jobs else running)
            raise DeadlinePassed(f"jobs still run: {_some(left)}", "job_ids") from None
        return pb.FlushResponse(jobs=[convert.ended_message(end) for end in ends])

    async def _step(self, context: Context, session: int, step: pb.Step) -> pb.StepReply:
        return await self._common.verbs.step(self._live(context, session), step)


def _some(numbers: Sequence[int], most: int = 32) -> str:
    shown = ", ".join(str(n) for n in numbers[:most])
    return shown + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
