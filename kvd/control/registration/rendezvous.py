"""Where an engine's scheduler and ranks meet, in any order, on (uid, engine id, boot nonce).

One start of an engine holds its id as long as its scheduler lives (before there is one, as long
as any of its workers does). A second live start is refused; one that follows a dead start waits
until the dead one's movers have ended, so that no late copy of theirs is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvd.control.access.peers import Peer
from kvd.control.access.shares import Bound, Shares
from kvd.control.errors import OldEngineEnding, RankTaken
from kvd.control.namespace import check_string
from kvd.core.errors import (
    EngineAlreadyLives,
    InvalidArgument,
    LayoutMismatch,
    UnknownRegistration,
)
from kvd.core.keys import MoverId
from kvd.core.spec import NamespaceSpec
from kvd.mover.process import MoverProcess
from kvd.runtime.driver import Driver
from kvd.runtime.fleet import RankPlacement
from kvd_proto.v1 import engine_pb2

log = logging.getLogger(__name__)

BOOT_NONCE_BYTES = 16
MAX_ENGINES = 1024
MAX_ENGINES_OF_A_USER = 512
OLD_MOVERS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What a rank says of one group: bytes of one engine block, and blocks in a kvd block."""

    engine_block_bytes: int
    blocks_per_block: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What a rank says of its memory's layout, and what must agree with the scheduler."""

    world_size: int
    placement: RankPlacement
    groups: tuple[GroupFigures, ...]
    # The rank came first and did not say how many engine blocks make a block: 1 was assumed.
    blocks_guessed: bool = False


@dataclass(slots=True, eq=False)
class Rank:
    """A registered rank and its running mover. `answered`: its worker knows of it."""

    peer: Peer
    layout: RankLayout
    mover: MoverProcess
    answered: bool = False


class MeetingSession(Protocol):
    """The scheduler's side of the meeting, as a session shows it."""

    @property
    def peer(self) -> Peer: ...

    @property
    def spec(self) -> NamespaceSpec: ...

    @property
    def world_size(self) -> int: ...

    def attach(self, placement: RankPlacement, mover: MoverProcess) -> None:
        """Make the mover serve this session."""

    def ranks_ready(self) -> None:
        """Every rank is attached."""

    def end(self, reason: str) -> None:
        """Close the session and leave the engine."""


@dataclass(slots=True, eq=False)
class EngineStart:
    """One start of one engine: its scheduler's session and its ranks, as far as they have come."""

    uid: int
    engine_id: str
    nonce: bytes
    session: MeetingSession | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)
    movers: set[MoverId] = field(default_factory=set)  # every mover that may still run

    def holder(self) -> Peer | None:
        """The live process that holds the engine id."""
        if self.session is not None:
            return self.session.peer if self.session.peer.alive else None
        return next((rank.peer for rank in self.ranks.values() if rank.peer.alive), None)


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


def check_layout(layout: RankLayout, spec: NamespaceSpec, world_size: int) -> None:
    """Raise LayoutMismatch, naming rank, group and both figures, unless they agree."""
    rank = layout.placement.rank
    if layout.world_size != world_size:
        raise LayoutMismatch(
            f"rank {rank} says world_size {layout.world_size}, the scheduler says {world_size}",
            "world_size",
        )
    if len(layout.groups) != len(spec.groups):
        raise LayoutMismatch(
            f"rank {rank} has {len(layout.groups)} groups, the namespace has {len(spec.groups)}",
            "groups",
        )
    for number, (said, group) in enumerate(zip(layout.groups, spec.groups, strict=True)):
        shard = layout.placement.shard
        if shard >= len(group.shard_bytes):
            raise LayoutMismatch(
                f"rank {rank} holds shard {shard}, group {number} has {len(group.shard_bytes)}",
                "shard",
            )
        if said.engine_block_bytes != group.shard_bytes[shard]:
            raise LayoutMismatch(
                f"rank {rank}, group {number}: the fragments of an engine block add up to"
                f" {said.engine_block_bytes} bytes, the scheduler says"
                f" {group.shard_bytes[shard]} for shard {shard}",
                f"groups[{number}].fragments",
            )
        if said.blocks_per_block != group.blocks_per_block and not layout.blocks_guessed:
            raise LayoutMismatch(
                f"rank {rank}, group {number}: {said.blocks_per_block} engine blocks per block,"
                f" the scheduler says {group.blocks_per_block}",
                f"groups[{number}].blocks_per_block",
            )


def guessed_wrong(layout: RankLayout, spec: NamespaceSpec) -> bool:
    """True when what was assumed of the blocks' size is not what the scheduler says."""
    pairs = zip(layout.groups, spec.groups, strict=True)
    return any(said.blocks_per_block != group.blocks_per_block for said, group in pairs)


def check_writers(ranks: Sequence[RankLayout], shards: int) -> None:
    """Raise LayoutMismatch unless each shard has exactly one writing rank."""
    for shard in range(shards):
        writers = [
            r.placement.rank for r in ranks if r.placement.writer and r.placement.shard == shard
        ]
        if len(writers) != 1:
            raise LayoutMismatch(
                f"shard {shard} has {len(writers)} writing ranks {writers}, not 1", "writer"
            )


class Rendezvous:
    """Where schedulers and ranks meet: every engine start with a session, a rank or a mover."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._starts: dict[tuple[int, str], EngineStart] = {}
        self._shares = Shares(
            Bound("engines", MAX_ENGINES, MAX_ENGINES_OF_A_USER, field="identity.engine_id")
        )
        self._ranks: dict[MoverId, tuple[EngineStart, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- meeting ----------------------------------------------------------------------------

    async def claim(self, uid: int, identity: engine_pb2.EngineIdentity) -> EngineStart:
        """The record of this start, once no earlier start of the engine has a mover left.

        Raises EngineAlreadyLives where a live process holds the id, OldEngineEnding where the
        movers of a dead one don't end in time.
        """
        check_identity(identity)
        key = (uid, identity.engine_id)
        while True:
            start = self._starts.get(key)
            if start is None:
                self._shares.take(uid)
                start = EngineStart(uid, identity.engine_id, identity.boot_nonce)
                self._starts[key] = start
            if start.nonce == identity.boot_nonce:
                return start
            holder = start.holder()
            if holder is not None:
                raise EngineAlreadyLives(
                    f"engine id {identity.engine_id!r} is held by the live process {holder.pid}"
                    f" ({holder.program}); end it or choose another id",
                    "identity.engine_id",
                )
            await self._end_movers(start, "its engine started anew")
            self._forget(start)

    async def _end_movers(self, start: EngineStart, reason: str) -> None:
        ending = [self._driver.end_rank(mover, reason) for mover in list(start.movers)]
        try:
            async with asyncio.timeout(OLD_MOVERS_SECONDS):
                await asyncio.gather(*ending)
        except TimeoutError:
            raise OldEngineEnding(
                f"movers of an earlier start of {start.engine_id!r} still run; ask again",
                "identity.engine_id",
            ) from None

    def join(self, start: EngineStart, session: MeetingSession) -> None:
        """The scheduler is there: attach the ranks that came before it.

        A rank for which the blocks' size had to be guessed, wrongly, is ended; its worker
        registers again, and by then the size is known.
        """
        start.session = session
        for number, rank in sorted(start.ranks.items()):
            if guessed_wrong(rank.layout, session.spec):
                self._drop(start, number)
                self._end_rank_soon(rank.mover.mover, "its blocks have another size")
            else:
                session.attach(rank.layout.placement, rank.mover)
        self._announce_ready(start)

    def check_ranks(self, start: EngineStart, spec: NamespaceSpec, world_size: int) -> None:
        """Refuse a scheduler that disagrees with a rank that came before it."""
        layouts = [rank.layout for rank in start.ranks.values()]
        for layout in layouts:
            check_layout(layout, spec, world_size)
        if len(layouts) == world_size:
            check_writers(layouts, len(spec.groups[0].shard_bytes))

    def check_scheduler(self, start: EngineStart, peer: Peer) -> None:
        """Refuse a second live scheduler of one start; end the session of an earlier stream."""
        session = start.session
        if session is None:
            return
        if session.peer.alive and session.peer is not peer and session.peer.pid != peer.pid:
            raise EngineAlreadyLives(
                f"the live process {session.peer.pid} is the scheduler of this engine start",
                "identity.boot_nonce",
            )
        session.end("a newer session of the same scheduler came")

    def leave(self, start: EngineStart, session: MeetingSession) -> None:
        """The session is over, and its ranks must register again.

        The core ends the movers that serve it; one that it refused, or has yet to attach, ends now.
        """
        if start.session is session:
            start.session = None
            for number in list(start.ranks):
                self._drop(start, number)
            for mover in start.movers - self._driver.fleet.attached.keys():
                self._end_rank_soon(mover, "its session has ended")
        self.forget_if_empty(start)

    # -- ranks ------------------------------------------------------------------------------

    def check_place(self, start: EngineStart, peer: Peer, layout: RankLayout) -> None:
        """Refuse a rank that is taken or that disagrees with the session, if it is there."""
        old = start.ranks.get(layout.placement.rank)
        if old is not None and old.peer is not peer and old.peer.alive:
            raise RankTaken(
                f"rank {layout.placement.rank} is registered by the live process {old.peer.pid}",
                "rank",
            )
        if start.session is not None:
            check_layout(layout, start.session.spec, start.session.world_size)
            others = [r.layout for n, r in start.ranks.items() if n != layout.placement.rank]
            if len(others) + 1 == start.session.world_size:
                shards = len(start.session.spec.groups[0].shard_bytes)
                check_writers([*others, layout], shards)

    async def vacate(self, start: EngineStart, number: int) -> None:
        """End the mover of an earlier registration of this rank, if there is one."""
        old = start.ranks.get(number)
        if old is not None:
            await self.end_rank(old.mover.mover, "its rank registered again")

    def seat(self, start: EngineStart, rank: Rank) -> None:
        """The rank's mover runs: from now on it belongs to the engine's start.

        Its scheduler hears that the ranks are ready only after `answered`.
        """
        number = rank.layout.placement.rank
        mover = rank.mover.mover
        start.ranks[number] = rank
        start.movers.add(mover)
        self._ranks[mover] = (start, number)
        rank.peer.registrations.add(mover)
        rank.peer.on_end(lambda: self._end_rank_soon(mover, "its worker process is gone"))
        if start.session is not None:
            start.session.attach(rank.layout.placement, rank.mover)

    def answered(self, mover: MoverId) -> None:
        """The worker of this rank was sent its channel and the answer to its registration.

        Told before that, a scheduler could name jobs to a worker that has no mover yet.
        """
        seat = self._ranks.get(mover)
        rank = seat[0].ranks.get(seat[1]) if seat else None
        if seat is not None and rank is not None and rank.mover.mover == mover:
            rank.answered = True
            self._announce_ready(seat[0])

    async def end_rank(self, mover: MoverId, reason: str) -> None:
        """Returns when the mover is gone; at once if it is already."""
        await self._driver.end_rank(mover, reason)

    def registered(self, peer: Peer, registration: int) -> MoverId:
        """The peer's own registration, ended or not; UnknownRegistration for any other."""
        if registration not in peer.registrations:
            raise UnknownRegistration(
                f"the caller has no registration {registration}", "registration_id"
            )
        return MoverId(registration)

    def worker_pid(self, mover: MoverId) -> int:
        """The process whose memory the mover maps; 0 where it can't be seen."""
        seat = self._ranks.get(mover)
        rank = seat[0].ranks.get(seat[1]) if seat else None
        return rank.peer.pid if rank is not None else 0

    def _announce_ready(self, start: EngineStart) -> None:
        session = start.session
        if session is None or set(start.ranks) != set(range(session.world_size)):
            return
        if all(rank.answered for rank in start.ranks.values()):
            session.ranks_ready()

    def _end_rank_soon(self, mover: MoverId, reason: str) -> None:
        if mover in self._ranks:
            self._spawn(self.end_rank(mover, reason))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def mover_gone(self, mover: MoverId) -> None:
        """With the last mover of a start that has no session its record goes."""
        if mover not in self._ranks:
            return  # it ended before it had a place
        start, number = self._ranks.pop(mover)
        start.movers.discard(mover)
        rank = start.ranks.get(number)
        if rank is not None and rank.mover.mover == mover:
            self._drop(start, number)
        self.forget_if_empty(start)

    def _drop(self, start: EngineStart, number: int) -> None:
        del start.ranks[number]
        whose = {"user": start.uid}
        log.info("engine %r: rank %d is gone", start.engine_id, number, extra=whose)

    def forget_if_empty(self, start: EngineStart) -> None:
        """Keep no record of a start that has neither session nor mover."""
        if start.session is None and not start.movers:
            self._forget(start)

    def _forget(self, start: EngineStart) -> None:
        key = (start.uid, start.engine_id)
        if self._starts.get(key) is start:
            del self._starts[key]
            self._shares.give_back(start.uid)
