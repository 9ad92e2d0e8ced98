"""Where an engine's scheduler and ranks meet: asks `kvd.core.engines`, and carries its orders out.

What is decided there is synchronous. Waiting for movers to end, and asking the system which
processes live, is done here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Protocol, assert_never

from kvd.control.access.peers import Peer
from kvd.control.errors import OldEngineEnding
from kvd.control.namespace import check_string
from kvd.core.engines import meeting
from kvd.core.engines.layouts import RankLayout
from kvd.core.engines.meeting import ClientProcess, EngineStart, Meeting, SchedulerSide
from kvd.core.errors import InvalidArgument, UnknownRegistration
from kvd.core.keys import MoverId, SessionId
from kvd.core.spec import NamespaceSpec
from kvd.runtime.driver import Driver
from kvd_proto.v1 import engine_pb2

log = logging.getLogger(__name__)

BOOT_NONCE_BYTES = 16
OLD_MOVERS_SECONDS = 5.0
LOOK_AGAIN_SECONDS = 0.005


class MeetingSession(Protocol):
    """What a session does where the meeting asks for it."""

    def ranks_ready(self) -> None:
        """Every rank is attached."""

    def end(self, reason: str) -> None:
        """Close the session and leave the engine."""


def check_identity(identity: engine_pb2.EngineIdentity) -> None:
    """Raise InvalidArgument unless id and nonce have their lengths."""
    if not identity.engine_id:
        raise InvalidArgument("identity.engine_id is required", "identity.engine_id")
    check_string(identity.engine_id, "identity.engine_id")
    if len(identity.boot_nonce) != BOOT_NONCE_BYTES:
        raise InvalidArgument(
            f"identity.boot_nonce has {len(identity.boot_nonce)} bytes, not {BOOT_NONCE_BYTES}",
            "identity.boot_nonce",
        )


def process_of(peer: Peer) -> ClientProcess:
    """The peer, as the core knows it."""
    return ClientProcess(peer.token, peer.pid, peer.program, peer.process_number)


class Rendezvous:
    """Between peers, sessions and movers here and the decisions in the core."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._meeting = Meeting()
        self._peers: dict[str, Peer] = {}  # of sessions and ranks, by token, until they end
        self._sessions: dict[SessionId, MeetingSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- meeting ----------------------------------------------------------------------------

    async def claim(self, uid: int, identity: engine_pb2.EngineIdentity) -> EngineStart:
        """The record of this start, once no earlier start of the engine has a mover left.

        Raises EngineAlreadyLives where a live process holds the id, OldEngineEnding where the
        movers of a dead one don't end in time.
        """
        check_identity(identity)
        while True:
            known = self._meeting.starts.get((uid, identity.engine_id))
            is_other = known is not None and known.nonce != identity.boot_nonce
            living = self._living(known if is_other else None)
            found = self._meeting.claim(uid, identity.engine_id, identity.boot_nonce, living)
            if isinstance(found, EngineStart):
                return found
            whose = f"movers of an earlier start of {identity.engine_id!r}"
            await self._end_all(found, whose, "identity.engine_id")

    def forget_if_empty(self, start: EngineStart) -> None:
        """Keep no record of a start that has neither session nor mover: this one's, or a later one
        that was made while its caller waited and others let go of this one's.
        """
        self._meeting.release(self._meeting.starts.get(start.name, start))

    def check_scheduler(self, start: EngineStart, peer: Peer) -> None:
        """Refuse a second live scheduler of one start; end the session of an earlier stream."""
        living = self._living(start)
        self._carry_out(self._meeting.check_scheduler(start, process_of(peer), living))

    def check_ranks(self, start: EngineStart, spec: NamespaceSpec, world_size: int) -> None:
        """Refuse a scheduler that disagrees with a rank that came before it."""
        self._meeting.check_ranks(start, spec, world_size)

    def join(
        self, start: EngineStart, peer: Peer, side: SchedulerSide, session: MeetingSession
    ) -> None:
        """The scheduler is there: attach the ranks that came before it."""
        self._sessions[side.session] = session
        self._know(peer)
        self._carry_out(self._meeting.join(start, side))

    def leave(self, start: EngineStart, session: SessionId) -> None:
        """The session is over, and its ranks must register again."""
        self._carry_out(self._meeting.leave(start, session))
        self._sessions.pop(session, None)

    # -- ranks ------------------------------------------------------------------------------

    def check_place(self, start: EngineStart, peer: Peer, layout: RankLayout) -> None:
        """Refuse a rank that is taken or that disagrees with the session, if it is there."""
        self._meeting.check_place(start, process_of(peer), layout, self._living(start))

    async def vacate(self, start: EngineStart, rank: int) -> bool:
        """End the movers of earlier registrations of this rank, and see all that they copied ended.

        False where there was nothing to wait for. Raises OldEngineEnding where it takes too long.
        """
        found = self._meeting.occupants(start, rank)
        whose = f"movers of an earlier registration of {start.engine_id!r}, rank {rank},"
        await self._end_all(found, whose, "rank")
        return await self._see_copies_ended(start) or bool(found)

    async def _see_copies_ended(self, start: EngineStart) -> bool:
        """Whether there was something to wait for."""
        deadline = asyncio.get_running_loop().time() + OLD_MOVERS_SECONDS
        waited = False
        while (side := start.session) and self._driver.has_ends_to_come(side.session):
            waited = True
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
            if asyncio.get_running_loop().time() > deadline:
                what = f"copies of former movers of {start.engine_id!r}"
                raise OldEngineEnding(f"{what} are still being ended; ask again", "rank")
        return waited

    def seat(self, start: EngineStart, peer: Peer, layout: RankLayout, mover: MoverId) -> None:
        """The rank's mover runs: from now on it belongs to the engine's start."""
        self._driver.fleet.process_of(mover)  # else nobody would hear of its end
        orders = self._meeting.seat(start, mover, process_of(peer), layout)
        self._know(peer)
        peer.registrations.add(mover)
        peer.on_end(lambda: self._carry_out(self._meeting.worker_ended(mover)))
        self._carry_out(orders)

    def answered(self, mover: MoverId) -> None:
        """The worker of this rank was sent its channel and the answer to its registration."""
        self._carry_out(self._meeting.answered(mover))

    def mover_gone(self, mover: MoverId) -> None:
        """The mover's process has ended."""
        self._carry_out(self._meeting.mover_gone(mover))

    def registered(self, peer: Peer, registration: int) -> MoverId:
        """The peer's own registration, ended or not; UnknownRegistration for any other."""
        if registration not in peer.registrations:
            raise UnknownRegistration(
                f"the caller has no registration {registration}", "registration_id"
            )
        return MoverId(registration)

    def worker_pid(self, mover: MoverId) -> int:
        """The process whose memory the mover maps; 0 where it can't be seen."""
        registration = self._meeting.registrations.get(mover)
        return 0 if registration is None else registration.process.pid

    # -- who lives --------------------------------------------------------------------------

    def _know(self, peer: Peer) -> None:
        if peer.token not in self._peers:
            self._peers[peer.token] = peer
            peer.on_end(lambda: self._forget_peer(peer))

    def _forget_peer(self, peer: Peer) -> None:
        self._peers.pop(peer.token, None)

    def _living(self, start: EngineStart | None) -> frozenset[str]:
        """Tokens of the start's processes that live."""
        tokens = {process.token for process in start.processes()} if start is not None else set()
        known = ((token, self._peers.get(token)) for token in tokens)
        return frozenset(token for token, peer in known if peer is not None and peer.alive)

    # -- orders -----------------------------------------------------------------------------

    def _carry_out(self, orders: Iterable[meeting.MeetingOrder]) -> None:
        for order in orders:
            match order:
                case meeting.AttachRank():
                    process = self._driver.fleet.process_of(order.mover)
                    self._driver.attach_rank(order.session, order.placement, process)
                case meeting.TellRanksReady():
                    self._sessions[order.session].ranks_ready()
                case meeting.EndSession():
                    self._sessions[order.session].end(order.reason)
                case meeting.EndRank():
                    self._end_soon(order.mover, order.reason)
                case meeting.EndUnattached():
                    if order.mover not in self._driver.fleet.attached:
                        self._end_soon(order.mover, order.reason)
                case meeting.NoteRankGone():
                    log.info(
                        "engine %r: rank %d is gone",
                        order.engine_id,
                        order.rank,
                        extra={
                            "user": order.uid,
                            "engine": order.engine_id,
                            "rank": order.rank,
                        },
                    )
                case _:
                    assert_never(order)

    async def _end_all(self, orders: Sequence[meeting.EndRank], whose: str, field: str) -> None:
        ending = [self._driver.end_rank(order.mover, order.reason) for order in orders]
        try:
            async with asyncio.timeout(OLD_MOVERS_SECONDS):
                await asyncio.gather(*ending)
        except TimeoutError:
            raise OldEngineEnding(f"{whose} still run; ask again", field) from None

    def _end_soon(self, mover: MoverId, reason: str) -> None:
        self._spawn(self._driver.end_rank(mover, reason))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
