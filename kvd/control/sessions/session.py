"""The Session stream: an engine's scheduler, from its first message to its end.

Requests are handled one after the other, in the order they came. Answers and news go out
through an outbox, so that neither the driver nor another session ever waits for this client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvd.control import audit, convert
from kvd.control.access import descriptors
from kvd.control.access.peers import Context, Peer
from kvd.control.access.tenants import TenantPolicy
from kvd.control.errors import MALFORMED_MESSAGE, RANK_COUNT, UNKNOWN_MESSAGE
from kvd.control.namespace import check_string, namespace_spec
from kvd.control.registration.engine_exits import EngineExitWatcher
from kvd.control.registration.rendezvous import Rendezvous, check_identity, process_of
from kvd.control.sessions.outbox import QUIET, Outbox
from kvd.control.sessions.verbs import LiveSession, Sessions, Verbs
from kvd.control.sessions.wire import UnreadableRequest
from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks.extent_fit import wasted_share
from kvd.core.engines.meeting import EngineStart, SchedulerSide
from kvd.core.errors import Draining, InvalidArgument, KvdError, LimitExceeded
from kvd.core.model.state import MAX_SESSIONS
from kvd.core.spec import NamespaceSpec
from kvd.runtime.driver import Driver
from kvd.runtime.recorder import Recorder
from kvd.runtime.told_lookups import ToldLookups
from kvd.runtime.turns import UNITS_AT_ONCE, EndsInTurn, Pace
from kvd_proto.limits import MAX_RANKS
from kvd_proto.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

PROMPTS = "prompts"  # the capability of a client that can name whole prompts
# Optional behaviours of this daemon; a session gets those that its client names too.
CAPABILITIES = ("request-level-store", "epochs", "events", QUIET, PROMPTS)
MAX_CAPABILITIES = 64
CLOSE_FLUSH_SECONDS = 2.0
CLOSED = "its scheduler closed it"  # the one end after which nobody comes back
Request = pb.SessionRequest | UnreadableRequest
# By which number a message's refusal names it.
_NUMBERS = {"step": "sequence", "lookup": "call_id", "reset_cache": "sequence"}
WARM_SECONDS = 1.0  # longest wait for rows to be made fast before a session is called ready


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What the daemon tells each session of its settings."""

    lease_ttl_ms: int
    store_threshold: int
    sessions_per_user: int = MAX_SESSIONS


class SchedulerSession:
    """One open session: the driver's sink, the engine's side of the meeting."""

    live: LiveSession  # from when the core has accepted it: before that there is no news

    def __init__(self, start: EngineStart, common: SessionContext, outbox: Outbox) -> None:
        self.outbox = outbox
        self._start = start
        self._common = common
        self.knows_prompts = False
        self._telling: asyncio.Future[None] | None = None
        self.on_end = asyncio.Event()

    # -- news -------------------------------------------------------------------------------

    def job_ended(self, order: act.EndJob) -> None:
        self.outbox.put_ended(convert.ended_message(order))

    def rank_lost(self, rank: int, reason: str) -> None:
        self._stop_telling()
        lost = pb.RankLost(rank=rank, reason=reason)
        self.outbox.put(pb.SessionResponse(rank_lost=lost))

    def _stop_telling(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    def tell_recording(self, *, is_on: bool) -> None:
        """Whether the client shall name whole prompts, if it can."""
        if self.knows_prompts:
            recording = pb.Recording(prompts=is_on)
            self.outbox.put(pb.SessionResponse(recording=recording))

    def ranks_ready(self) -> None:
        self._telling = asyncio.ensure_future(self._tell_ready())

    async def _tell_ready(self) -> None:
        """Say so once the first copies would be as fast as later ones."""
        await self._common.driver.fleet.warm(self.live.id, WARM_SECONDS)
        self.outbox.put(pb.SessionResponse(ranks_ready=pb.RanksReady()))

    def end(self, reason: str) -> None:
        """Free all that the session held. Once."""
        if self.on_end.is_set():
            return
        self.on_end.set()
        gone = reason == CLOSED
        self._stop_telling()
        log.info(
            "session %d of engine %r ends: %s",
            self.live.id,
            self.live.engine_id,
            reason,
            extra=self.live.in_log,
        )
        self._common.sessions.by_id.pop(self.live.id, None)
        self._common.driver.close_session(self.live.id, gone=gone)
        if not gone:
            self._common.departures.watch(self.live.id, self.live.peer)
        self._common.engines.leave(self._start, self.live.id)

    # -- requests ---------------------------------------------------------------------------

    async def handle_all(self, requests: AsyncIterator[Request]) -> str:
        """Handle requests until the stream ends; returns why it did.

        No request ends it: what can't be read, breaks a rule or meets a defect is refused.
        """
        async for request in requests:
            closes = await self._handle_one(request)
            del request  # the next may be long in coming
            if closes:
                return CLOSED
        return "its stream ended"

    async def _handle_one(self, request: Request) -> bool:
        """Whether it is the last."""
        if isinstance(request, UnreadableRequest):
            await self._refuse_unreadable(request)
            return False
        kind = request.WhichOneof("kind")
        if kind == "close":
            await self._flush()
            return True
        try:
            await self._handle(kind, request)
        except AssertionError:
            raise  # a broken invariant: the daemon ends
        except Exception:
            log.exception("session %d: a %s failed", self.live.id, kind, extra=self.live.in_log)
            number = getattr(getattr(request, kind or "", None), _NUMBERS.get(kind or "", ""), 0)
            error = KvdError("the daemon failed; its log says how")
            self._refuse_message(kind or "", number, error)
        return False

    async def _refuse_unreadable(self, request: UnreadableRequest) -> None:
        error = request.error
        if request.kind in _NUMBERS and request.kind != "lookup":
            try:
                await self._common.verbs.refuse(self.live, request.number, error)
            except KvdError as refused:  # it may be an old number's, or a gap
                error = refused
        self._refuse_message(request.kind, request.number, error)

    def _refuse_message(self, kind: str, number: int, error: KvdError) -> None:
        if kind == "lookup":
            self._refuse_lookup(number, error)
        else:
            self._refuse(number, error)

    async def _handle(self, kind: str | None, request: pb.SessionRequest) -> None:
        began = time.perf_counter()
        match kind:
            case "step":
                await self._step(request.step)
            case "lookup":
                await self._lookup(request.lookup)
            case "reset_cache":
                await self._reset(request.reset_cache)
            case _:
                self._refuse(0, _out_of_place(kind, request))
                return
        self._common.time_message(kind, time.perf_counter() - began)

    async def _step(self, step: pb.Step) -> None:
        self.outbox.hold_ended()
        try:
            reply = await self._common.verbs.step(self.live, step)
        except KvdError as error:
            self._refuse(step.sequence, error)
        else:
            self.outbox.put_reply(reply)
        finally:
            self.outbox.release_ended()

    async def _lookup(self, call: pb.LookupCall) -> None:
        try:
            answers = await self._common.verbs.lookup(self.live, call.queries)
        except KvdError as error:
            self._refuse_lookup(call.call_id, error)
        else:
            reply = pb.LookupReply(call_id=call.call_id, answers=answers)
            self.outbox.put(pb.SessionResponse(lookup=reply))
            await asyncio.sleep(0)  # it leaves before we look for the next message

    def _refuse_lookup(self, call_id: int, error: KvdError) -> None:
        self._common.count_refusal(error.reason)
        reply = pb.LookupReply(call_id=call_id, reason=error.reason, message=str(error))
        self.outbox.put(pb.SessionResponse(lookup=reply))

    async def _reset(self, reset: pb.ResetCache) -> None:
        try:
            epoch = await self._common.verbs.reset_cache(self.live, reset)
        except KvdError as error:
            self._refuse(reset.sequence, error)
        else:
            self.outbox.put(pb.SessionResponse(epoch=epoch))

    def _refuse(self, sequence: int, error: KvdError) -> None:
        self._common.count_refusal(error.reason)
        refused = pb.StepRefused(sequence=sequence, reason=error.reason, message=str(error))
        self.outbox.put(pb.SessionResponse(refused=refused))

    async def _flush(self) -> None:
        try:
            await self._common.driver.jobs.wait(self.live.id, [], CLOSE_FLUSH_SECONDS)
        except (TimeoutError, LimitExceeded):
            log.warning("session %d closes while copies run", self.live.id, extra=self.live.in_log)


def _out_of_place(kind: str | None, request: pb.SessionRequest) -> InvalidArgument:
    if kind is None and request.ByteSize():  # it has a field that we don't know
        return InvalidArgument(
            "this daemon has no such message: the client is of a later release",
            "kind",
            UNKNOWN_MESSAGE,
        )
    return InvalidArgument(f"{kind or 'an empty message'} can't come here", "kind")


class SessionContext:
    """What all sessions share: the parts of the daemon and the rules by which they are opened."""

    def __init__(
        self, driver: Driver, engines: Rendezvous, tenants: TenantPolicy, terms: SessionTerms
    ) -> None:
        self.driver = driver
        self.engines = engines
        self.tenants = tenants
        self.terms = terms
        self.sessions = Sessions()
        self.told_lookups = ToldLookups(driver.machine.knows, driver.machine.knows_tenant)
        self.recorder = Recorder(self._tell_recording)
        self.verbs = Verbs(driver, self.told_lookups, self.recorder)
        self.ends = EndsInTurn(driver.turns)
        self.departures = EngineExitWatcher(driver)
        self.draining = False
        # Of what is answered inside a stream: a refusal's reason, and how long a message took.
        self.count_refusal: Callable[[str], None] = lambda _reason: None
        self.time_message: Callable[[str, float], None] = lambda _kind, _seconds: None

    async def end_other_tenants(self, pace: Pace) -> None:
        """End the sessions whose users have lost their tenant, one after the other.

        Each takes some tenths of a millisecond, and there may be a thousand.
        """
        lost = [
            live
            for live in self.sessions.by_id.values()
            if not self.tenants.belongs(live.peer, live.spec.tenant)
        ]
        for live in lost:
            await pace.spend(UNITS_AT_ONCE)
            if live.id not in self.sessions.by_id:
                continue  # it ended by itself
            sink = self.driver.sessions[live.id].sink
            assert isinstance(sink, SchedulerSession), "it is ours"
            sink.end(f"uid {live.peer.uid} is tenant {live.spec.tenant} no more")
            audit.note("reload", None, session_ended=live.id)

    def _tell_recording(self, is_on: bool) -> None:
        for record in self.driver.sessions.values():
            if isinstance(record.sink, SchedulerSession):
                record.sink.tell_recording(is_on=is_on)

    async def serve(self, requests: AsyncIterator[Request], context: Context, peer: Peer) -> None:
        """The whole life of one stream. Its end, however it comes, frees the session."""
        first = await anext(requests, None)
        if isinstance(first, UnreadableRequest):
            raise first.error
        if first is None or first.WhichOneof("kind") != "open":
            raise InvalidArgument(
                "the first message of a session is open", "open", MALFORMED_MESSAGE
            )
        session = await self._open(first.open, peer)
        del first
        gone = partial(session.end, "its scheduler is gone")
        peer.on_end(gone)
        why = "its stream broke"
        tasks: list[asyncio.Future[Any]] = []
        try:
            # On their own, and before any answer: were a stream to end while its first answer
            # still takes them along, grpcio would send them again with the status, and fail.
            await context.send_initial_metadata(())
            tasks += [
                asyncio.ensure_future(session.handle_all(requests)),
                asyncio.ensure_future(session.outbox.write_all(context)),
                asyncio.ensure_future(session.on_end.wait()),
                asyncio.ensure_future(session.outbox.overflowed.wait()),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                why = str(tasks[0].result())
            elif tasks[3].done():
                why = "its client reads too slowly"
        finally:
            self.ends.put(peer.uid, partial(self._end, session, gone, why))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await session.on_end.wait()

    def _end(self, session: SchedulerSession, gone: Callable[[], None], why: str) -> None:
        session.live.peer.forget(gone)
        session.end(why)

    async def _open(self, message: pb.OpenSession, peer: Peer) -> SchedulerSession:
        """Open, or raise with nothing changed."""
        engine_id = message.identity.engine_id
        self._require_room(peer, engine_id)
        descriptors.require_room()
        check_open(message)
        check_identity(message.identity)
        tenant = self.tenants.tenant_of(peer, message.namespace.tenant)
        engine = _name_of_start(message.identity, peer)
        spec, fields = namespace_spec(message.namespace, tenant, private_to=engine)
        start = await self.engines.claim(peer.uid, message.identity)
        try:
            self.engines.check_scheduler(start, peer)
            start = await self.engines.claim(peer.uid, message.identity)
            self.engines.check_ranks(start, spec, message.world_size)
            # It may have waited for an earlier start's movers. Others came meanwhile, or a reload.
            self._require_room(peer, engine_id)
            self.tenants.tenant_of(peer, tenant)
            return self._admit(message, peer, start, spec, fields)
        finally:
            self.engines.forget_if_empty(start)

    def _require_room(self, peer: Peer, engine_id: str) -> None:
        """Refuse a session that the daemon, or its user, may not have now.

        One of the same engine is not counted: this one takes its place, or is refused for its sake.
        """
        if self.draining:
            raise Draining
        mine = (peer.uid, engine_id)
        users = [
            live.peer.uid
            for live in self.sessions.by_id.values()
            if (live.peer.uid, live.engine_id) != mine
        ]
        if len(users) >= MAX_SESSIONS:
            raise LimitExceeded(f"more than {MAX_SESSIONS} sessions")
        most = self.terms.sessions_per_user
        if users.count(peer.uid) >= most:
            raise LimitExceeded(
                f"uid {peer.uid} has {most} sessions, as many as one user may"
                " (sessions_per_user): end some"
            )

    def _admit(
        self,
        message: pb.OpenSession,
        peer: Peer,
        start: EngineStart,
        spec: NamespaceSpec,
        fields: dict[str, str],
    ) -> SchedulerSession:
        """The session of a start of an engine whose ranks suit it."""
        number = self.driver.allocate_session_id()
        session = SchedulerSession(start, self, Outbox(quiet=QUIET in message.capabilities))
        accepted = self.driver.open_session(
            ev.SessionOpened(
                number,
                spec,
                message.epoch,
                message.world_size,
                message.own_epoch,
                _name_of_start(message.identity, peer),
                self.tenants.payer(peer.uid, spec.tenant),
            ),
            fields,
            session,
            peer.uid,
        )
        live = session.live = self.sessions.by_id[number] = LiveSession(
            number, accepted.namespace, spec, peer, message.identity.engine_id, message.world_size
        )
        session.outbox.put(pb.SessionResponse(opened=self._opened(message, accepted, live)))
        session.knows_prompts = PROMPTS in message.capabilities
        if self.recorder.is_on:
            session.tell_recording(is_on=True)
        try:
            side = SchedulerSide(number, process_of(peer), spec, message.world_size)
            self.engines.join(start, peer, side, session)
            self.told_lookups.add_unserved(spec.tenant, message.unserved_seconds)
        except BaseException:
            session.end("its ranks could not be attached")
            raise
        log.info(
            "session %d: engine %r, namespace %d; its blocks leave %s of their extents unused",
            number,
            live.engine_id,
            live.namespace,
            self._wasted(spec),
            extra=live.in_log,
        )
        return session

    def _wasted(self, spec: NamespaceSpec) -> str:
        """The share of each group's extents that is lost, as the log says it."""
        extent_bytes = self.driver.pool.extent_bytes
        return ", ".join(f"{wasted_share(g, extent_bytes):.1%}" for g in spec.groups)

    def _opened(
        self, message: pb.OpenSession, accepted: act.SessionAccepted, live: LiveSession
    ) -> pb.SessionOpened:
        return pb.SessionOpened(
            session_id=live.id,
            namespace_fingerprint=live.spec.fingerprint,
            namespace_id=accepted.namespace,
            epoch=convert.epoch_message(accepted.epoch),
            capabilities=[c for c in message.capabilities if c in CAPABILITIES],
            lease_ttl_ms=self.terms.lease_ttl_ms,
            store_threshold=self.terms.store_threshold,
            isolated=self.tenants.isolated(live.peer.uid),
        )


def _name_of_start(identity: pb.EngineIdentity, peer: Peer) -> str:
    """What is of use to this start of the engine alone goes by it. No other user can name it."""
    return f"{peer.uid}/{identity.engine_id}/{identity.boot_nonce.hex()}"


def check_open(message: pb.OpenSession) -> None:
    """Raise InvalidArgument unless figures and names of an OpenSession are possible."""
    if not 1 <= message.world_size <= MAX_RANKS:
        raise InvalidArgument(
            f"world_size is {message.world_size}, not 1..{MAX_RANKS}",
            "world_size",
            RANK_COUNT,
        )
    convert.check_count(len(message.capabilities), MAX_CAPABILITIES, "capabilities")
    convert.epoch_name(message.epoch)
    # Before it is looked for: a refusal quotes it, and to quote some MiB holds up all others.
    check_string(message.namespace.tenant, "namespace.tenant")
