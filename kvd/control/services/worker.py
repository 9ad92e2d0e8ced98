"""WorkerService: an engine's worker registers its rank, and so gets a mover."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvd.control import convert, errors
from kvd.control.access import descriptors
from kvd.control.access.closing import close_all
from kvd.control.access.peers import Context, Peer, Peers, Role
from kvd.control.errors import MoverStartFailed
from kvd.control.later_fields import require_known
from kvd.control.registration.gpu_capacity import GpuCapacity, in_words
from kvd.control.registration.memories import RankMemory, rank_memory
from kvd.control.registration.rendezvous import check_identity
from kvd.control.sessions.session import SessionContext
from kvd.core.engines.layouts import GroupFigures, RankLayout, RankPlacement
from kvd.core.engines.meeting import EngineStart
from kvd.core.errors import Draining, InvalidArgument, UnknownRegistration
from kvd.core.keys import MoverId
from kvd.core.upkeep.session import check_ranks_engine_blocks
from kvd.mover.facts import MoverFacts
from kvd.mover.layout import FRAGMENTS_AT_ONCE, GpuConfig, check_group_count, checks_of
from kvd.mover.process import FragmentSpec, GroupMap, MoverConfig, MoverProcess, MoverStartError
from kvd.runtime.fleet import MoverOwner
from kvd.runtime.threads import to_its_end
from kvd.runtime.turns import Pace
from kvd_proto.limits import MAX_RANKS, MAX_REGIONS
from kvd_proto.v1 import companion_pb2, worker_pb2_grpc
from kvd_proto.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

MAX_FRAGMENTS_IN_ALL = 16384  # each is looked at several times, on the event loop
FRAGMENTS_A_UNIT = 4  # of a pace


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves registration: checks it, starts the mover, and adds the rank to its engine."""

    def __init__(self, common: SessionContext, peers: Peers, gpus: GpuCapacity) -> None:
        self._driver = common.driver
        self._engines = common.engines
        self._common = common
        self._peers = peers
        self._gpus = gpus

    async def RegisterRank(  # noqa: N802 - gRPC's name
        self, request: pb.RegisterRankRequest, context: Context
    ) -> pb.RegisterRankResponse:
        peer = self._peers.behind(context, Role.WORKER)
        if self._common.draining:
            raise Draining
        descriptors.require_room()
        peer.require_registration()
        check_identity(request.identity)
        check_rank(request)
        start = await self._engines.claim(peer.uid, request.identity)
        try:
            agreed = rank_layout(request, start)
            self._engines.check_place(start, peer, agreed)
            pace = Pace(self._driver.turns, peer.uid)
            fragments = await fragments_of(request, pace)
            config = self._mover_config(
                request, agreed, rank_memory(request, peer), start, fragments
            )
            for _ in checks_of(config):
                await pace.spend(FRAGMENTS_AT_ONCE // FRAGMENTS_A_UNIT)
            # Else its scheduler, where that is yet to come, would be refused for the rank's sake.
            check_ranks_engine_blocks([group.num_blocks for group in request.groups])
            start = await self._claim_place(request, peer)
            mover = await self._start(config, peer)
            start = await self._seat(request, peer, agreed, mover)
            self._note(request, peer, mover.facts)
        finally:
            self._engines.forget_if_empty(start)

        # This task ends when the answer was sent. A callback of the call would be held in a circle
        # with it, until Python's next whole collection.
        answering = asyncio.current_task()
        assert answering is not None
        answering.add_done_callback(partial(self._answered, mover.mover, context))
        return pb.RegisterRankResponse(
            registration_id=mover.mover,
            mover_pid=mover.pid,
            transport=mover.facts.transport,
            gpu_context_bytes=mover.facts.gpu.context_bytes if mover.facts.gpu else 0,
        )

    def _answered(self, mover: MoverId, call: Context, answering: asyncio.Task[Any]) -> None:
        failed = answering.cancelled() or answering.exception() is not None
        if not failed and not call.cancelled():
            self._engines.answered(mover)

    async def UnregisterRank(  # noqa: N802 - gRPC's name
        self, request: pb.UnregisterRankRequest, context: Context
    ) -> pb.UnregisterRankResponse:
        peer = self._peers.behind(context, Role.WORKER)
        mover = self._engines.registered(peer, request.registration_id)
        await self._driver.end_rank(mover, "its worker unregistered")
        taken = peer.take_device_memories()
        try:
            await to_its_end(close_all, taken)
        except RuntimeError:  # there are as many threads as there may be: then at once
            close_all(taken)
        return pb.UnregisterRankResponse()

    async def MarkReady(  # noqa: N802 - gRPC's name
        self, request: pb.MarkReadyRequest, context: Context
    ) -> pb.MarkReadyResponse:
        peer = self._peers.behind(context, Role.WORKER)
        jobs = convert.job_ids(request.job_ids, "job_ids")
        registered = self._engines.registered(peer, request.registration_id)
        self._driver.fleet.process_of(registered).mark_ready(*jobs)
        return pb.MarkReadyResponse()

    # -- steps of a registration ------------------------------------------------------------

    def _mover_config(
        self,
        request: pb.RegisterRankRequest,
        agreed: RankLayout,
        memory: RankMemory,
        start: EngineStart,
        fragments: Sequence[tuple[FragmentSpec, ...]],
    ) -> MoverConfig:
        groups = tuple(
            GroupMap(
                num_blocks=group.num_blocks,
                blocks_per_block=figures.blocks_per_block,
                part_bytes=figures.blocks_per_block * figures.engine_block_bytes,
                fragments=mine,
            )
            for group, figures, mine in zip(request.groups, agreed.groups, fragments, strict=True)
        )
        return MoverConfig(
            mover=self._driver.allocate_mover_id(),
            regions=memory.regions,
            groups=groups,
            extents=self._driver.pool.extent_files,
            checksums=self._driver.pool.payload_checksums,
            gpu=self._gpu_config(request, memory.gpu_uuid, start),
        )

    def _gpu_config(
        self, request: pb.RegisterRankRequest, uuid: str, start: EngineStart
    ) -> GpuConfig | None:
        if not uuid:
            return None
        earlier = start.ranks.get(request.rank)  # whose mover ends before this one begins
        gpu = (
            self._driver.fleet.process_of(earlier.mover).facts.gpu if earlier is not None else None
        )
        returning = gpu.context_bytes if gpu is not None and gpu.uuid == uuid else 0
        return self._gpus.config(uuid, request.gpu_memory, returning)

    def _note(self, request: pb.RegisterRankRequest, peer: Peer, facts: MoverFacts) -> None:
        if facts.gpu is not None:
            self._gpus.measured(facts.gpu)
        log.info(
            "engine %r rank %d: %s",
            request.identity.engine_id,
            request.rank,
            in_words(facts),
            extra={
                "user": peer.uid,
                "engine": request.identity.engine_id,
                "rank": request.rank,
            },
        )

    async def _start(self, config: MoverConfig, peer: Peer) -> MoverProcess:
        owner = MoverOwner(peer.uid, peer.token)
        try:
            # It may have to wait for its turn, and the worker may take a memory back meanwhile.
            return await self._driver.fleet.start(
                config, owner, partial(require_kept, config, peer)
            )
        except MoverStartError as error:
            log.warning("no mover for a rank: %s", error, extra={"user": owner.uid})
            raise MoverStartFailed(str(error)) from error

    async def _seat(
        self,
        request: pb.RegisterRankRequest,
        peer: Peer,
        before: RankLayout,
        mover: MoverProcess,
    ) -> EngineStart:
        """Hand the channel over and join the engine; the mover ends where that fails.

        What was checked may have changed while the process started, so it is checked again.
        """
        try:
            start = await self._claim_place(request, peer)
            agreed = rank_layout(request, start)
            if agreed.groups != before.groups:
                raise MoverStartFailed("the scheduler came with another block size; register again")
            if peer.ended:
                raise UnknownRegistration("the worker ended meanwhile")
            channel = companion_pb2.RankChannel(registration_id=mover.mover)
            peer.send(
                companion_pb2.CompanionResponse(rank_channel=channel),
                (mover.ring_fd, mover.board_fd, mover.event_fd, mover.pidfd),
            )
            self._engines.seat(start, peer, agreed, mover.mover)
        except BaseException:
            await self._driver.end_rank(mover.mover, "its registration failed")
            raise
        return start

    async def _claim_place(self, request: pb.RegisterRankRequest, peer: Peer) -> EngineStart:
        """The engine's start with this rank's place empty; nothing runs in between."""
        while True:
            start = await self._engines.claim(peer.uid, request.identity)
            self._engines.check_place(start, peer, rank_layout(request, start))
            if not await self._engines.vacate(start, request.rank):
                return start


async def fragments_of(
    request: pb.RegisterRankRequest, pace: Pace
) -> list[tuple[FragmentSpec, ...]]:
    """Those of each group, read a few at a time."""
    found = []
    for number, group in enumerate(request.groups):
        require_known(group, f"groups[{number}]")  # else bytes may lie elsewhere than we think
        await pace.spend(len(group.fragments) // FRAGMENTS_A_UNIT)
        mine: list[FragmentSpec] = []
        for start in range(0, len(group.fragments), FRAGMENTS_AT_ONCE):
            some = group.fragments[start : start + FRAGMENTS_AT_ONCE]
            mine += [FragmentSpec(f.memory, f.base, f.stride, f.bytes) for f in some]
            await pace.spend(len(some) // FRAGMENTS_A_UNIT)
        found.append(tuple(mine))
    return found


def require_kept(config: MoverConfig, peer: Peer) -> None:
    """Raise InvalidArgument where the worker took a memory back meanwhile; UnknownRegistration
    where it ended.

    The number of a closed descriptor may be that of somebody else's file by now, and a handle of
    CUDA's that of no memory.
    """
    if peer.ended:
        raise UnknownRegistration("the worker ended meanwhile")
    held = {memory.fd for memory in peer.memories.values()}
    fds = [region.fd for region in config.regions]
    for number, fd in enumerate(fds):
        if fd >= 0 and fd not in held:
            raise InvalidArgument(
                f"memories[{number}] was taken back during the registration", f"memories[{number}]"
            )


def check_rank(request: pb.RegisterRankRequest) -> None:
    """Raise InvalidArgument unless it is a rank, and says no more than can be looked at."""
    if not 1 <= request.world_size <= MAX_RANKS or request.rank >= request.world_size:
        raise InvalidArgument(
            f"rank {request.rank} of world_size {request.world_size}: not a rank of 1..{MAX_RANKS}",
            "rank",
            errors.RANK_COUNT,
        )
    if request.shard >= request.world_size:
        raise InvalidArgument(
            f"shard {request.shard} of world_size {request.world_size}", "shard", errors.RANK_COUNT
        )
    check_group_count(len(request.groups))
    convert.check_count(len(request.memories), MAX_REGIONS, "memories", least=1)
    fragments = sum(len(group.fragments) for group in request.groups)
    convert.check_count(fragments, MAX_FRAGMENTS_IN_ALL, "groups.fragments")
    for number, group in enumerate(request.groups):
        where = f"groups[{number}]"
        if group.group != number:
            raise InvalidArgument(f"{where} is group {group.group}", f"{where}.group")
    for number, memory in enumerate(request.memories):
        require_known(memory, f"memories[{number}]")


def rank_layout(request: pb.RegisterRankRequest, start: EngineStart) -> RankLayout:
    """What the rank says, with the blocks' size from the session where it doesn't say."""
    known = start.session.spec.groups if start.session is not None else ()
    figures = []
    guessed = False
    for number, group in enumerate(request.groups):
        blocks = group.blocks_per_block
        if not blocks and number < len(known):
            blocks = known[number].blocks_per_block
        elif not blocks:
            blocks, guessed = 1, True
        figures.append(GroupFigures(sum(f.bytes for f in group.fragments), blocks))
    placement = RankPlacement(request.rank, request.shard, request.writer)
    return RankLayout(request.world_size, placement, tuple(figures), guessed)
