"""One rank's process on its own: it dies, or takes its memory back and comes again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvd.core.errors import KvdError
from kvd_proto.v1 import worker_pb2
from tests.simulation.whole.bytes import RankBytes
from tests.simulation.whole.daemon import Call

if TYPE_CHECKING:
    from tests.simulation.whole.ranks import Engine
    from tests.simulation.whole.world import World

WITHDRAWN_S = 0.5  # after its process's end nothing is copied into a memory
UNREGISTERED_S = 3.0  # an answer takes no longer: no mover outlives a kill by more than moments


def withdraw_soon(engine: Engine, memory: RankBytes) -> None:
    """Its process has ended: nobody reads what a late copy leaves there, and soon none comes."""
    loop, daemon, jumps = engine.loop, engine.daemon, engine.loop.jumps

    def withdraw() -> None:
        late_s = loop.stalled_until + WITHDRAWN_S - loop.now
        if late_s > 0:  # nobody could end its mover meanwhile
            loop.outside(late_s, withdraw)
            return
        memory.is_withdrawn = daemon is engine.daemon and jumps == loop.jumps

    loop.outside(WITHDRAWN_S, withdraw)


def die(engine: Engine, rank: int) -> None:
    """The process ends; its scheduler hears of it, and gives up what the rank had to do."""
    call = engine.registering.pop(rank, None)
    if call is not None:
        call.is_lost = True
    engine.movers.pop(rank, None)
    withdraw_soon(engine, _other_memory(engine, rank))
    peer, engine.workers[rank] = engine.workers[rank], None
    if peer is not None and engine.daemon is not None and not engine.daemon.is_gone:
        peer.end()


def _other_memory(engine: Engine, rank: int) -> RankBytes:
    """The rank's jobs have failed, and it begins with other memory; what it had until now."""
    before = engine.memory[rank]
    engine.memory[rank] = engine.new_memory()
    engine.rank_has_failed(rank)
    return before


def unregister(world: World, engine: Engine, rank: int) -> None:
    """I4: once that is answered nothing is copied into the rank's memory."""
    daemon, jumps, peer = world.daemon, world.loop.jumps, engine.workers[rank]
    if peer is None or engine.daemon is not daemon:
        return
    mover = engine.movers.pop(rank)
    memory = _other_memory(engine, rank)
    request = worker_pb2.UnregisterRankRequest(registration_id=mover.mover)
    call: Any = Call(peer)
    task = daemon.loop.create_task(daemon.workers.UnregisterRank(request, call))

    def answered(done: asyncio.Task[Any]) -> None:
        if done.cancelled() or daemon.is_gone:
            return
        error = done.exception()
        if error is None:
            memory.is_withdrawn = True
            assert not mover.is_alive, "a rank is unregistered, and its mover lives (I4)"
        elif not isinstance(error, KvdError):
            daemon.broken(error)

    def check() -> None:
        if daemon is world.daemon and jumps == world.loop.jumps and not world.hazards.is_dead:
            assert task.done(), "a rank is not unregistered in time"

    task.add_done_callback(answered)
    if not world.loop.is_stalled:
        world.loop.outside(UNREGISTERED_S, check)
