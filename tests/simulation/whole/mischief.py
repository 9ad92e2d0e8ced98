"""What befalls a world's processes, daemon and machine, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.keys import TenantId
from tests.simulation.whole import hazards, watchers, worker_life
from tests.simulation.whole.bytes import ROTTEN
from tests.simulation.whole.hazards import PowerCut
from tests.simulation.whole.loop import BUSY_S
from tests.simulation.whole.movers import SimMover

if TYPE_CHECKING:
    from kvd.core.model.size_class import Row
    from tests.simulation.whole.daemon import SimDaemon
    from tests.simulation.whole.ranks import Engine
    from tests.simulation.whole.world import World

RELEASED_S = 2.5  # after its session's end a mover is gone, whatever hangs
WORKER_GONE_S = 0.5  # after its worker's
SOON_S = 0.01
AWAY_S = 0.7  # before a worker that died comes again
INTERRUPTED = 0.2  # of the rows that are emptied, by the end of their engine
MOST_ROTTEN = 9  # blocks whose bytes rot at once


def do_one(world: World) -> None:
    """To an engine, or to all."""
    engine = world.random.choice(world.engines)
    what = world.random.choice(_CHOICES if world.clients == 0 else _CHOICES_BESIDE_CLIENTS)
    world.note(f"{what.__name__} {engine.name}")
    what(world, engine)


def interrupt(world: World, row: Row) -> None:
    """A row is emptied a few blocks at a time: sometimes its engine dies between two of them."""
    owners = [e for e in world.engines if world.namespace_of(e) == row.size_class.namespace]
    if not owners or world.step == world.steps:
        return  # in the end faults have stopped
    if world.random.random() < INTERRUPTED:
        world.loop.outside(world.random.random() * BUSY_S, _die_half_way, world, owners[0])


def _die_half_way(world: World, engine: Engine) -> None:
    world.note(f"engine_dies {engine.name}, half-way")
    engine_dies(world, engine)


# -- engines --------------------------------------------------------------------------------------


def engine_dies(_world: World, engine: Engine) -> None:
    engine.die()
    engine.epoch = ""  # of that start alone: who comes with it later makes it everybody's


def stream_breaks(world: World, engine: Engine) -> None:
    if engine.stream is not None and not engine.stream.is_cut:
        _store_first(world, engine)
        watch_release(world, list(engine.movers.values()), RELEASED_S)
    engine.lose_stream()


def _store_first(world: World, engine: Engine) -> None:
    """So that it happens while a copy runs, mostly."""
    if engine.usable and world.random.random() < 0.7:
        with suppress(KvdError):
            engine.store()


def worker_dies(world: World, engine: Engine) -> None:
    """One rank's process; the scheduler and the other ranks live."""
    if not engine.has_mortal_ranks:
        engine_dies(world, engine)
        return
    rank = world.random.randrange(len(engine.model.ranks))
    mover = engine.movers.get(rank)
    if mover is not None:
        watch_release(world, [mover], WORKER_GONE_S)
    worker_life.die(engine, rank)
    engine.away[rank] = world.loop.now + world.random.choice([0.0, AWAY_S])


def worker_unregisters(world: World, engine: Engine) -> None:
    """One rank takes its memory back, and comes again."""
    if engine.movers and engine.has_mortal_ranks:
        worker_life.unregister(world, engine, world.random.choice(list(engine.movers)))


def watch_release(world: World, movers: list[SimMover], within_s: float) -> None:
    """These are gone soon, whatever hangs (I5)."""
    daemon, jumps = world.daemon, world.loop.jumps
    if world.loop.is_stalled:
        return

    def check() -> None:
        if daemon is world.daemon and jumps == world.loop.jumps and not world.hazards.is_dead:
            late = [mover.mover for mover in movers if mover.is_alive]
            assert not late, f"movers {late} outlive their session or worker (I5)"

    world.loop.outside(within_s, check)


def epoch_changes(world: World, engine: Engine) -> None:
    # It overtakes nothing: a client says it in the stream of its steps.
    if engine.usable and engine.stream is not None and engine.stream.is_idle:
        world.epoch += 1
        engine.session_epoch(f"{engine.name}-{world.epoch}")


# -- processes of the daemon ----------------------------------------------------------------------


def mover_dies(world: World, engine: Engine) -> None:
    if engine.movers:
        world.random.choice(list(engine.movers.values())).kill()


def tier_dies(world: World, _engine: Engine) -> None:
    for tier in list(world.tiers.running.values()):
        tier.kill("killed")


def power_goes(world: World, _engine: Engine) -> None:
    world.hazards.writes_left = world.random.choice([1, 1, 2, 3, 5, 9])


def killed(_world: World, _engine: Engine) -> None:
    raise PowerCut


# -- operators ------------------------------------------------------------------------------------


def clear(world: World, engine: Engine) -> None:
    _store_first(world, engine)
    namespace, daemon = world.namespace_of(engine), world.daemon
    if world.random.random() < 0.5:
        world.around.after_store = lambda: _clear(world, namespace, daemon)
    else:
        delay = world.random.random() * SOON_S
        world.loop.outside(delay, _clear, world, namespace, daemon)


def _clear(world: World, namespace: Any, daemon: SimDaemon) -> None:
    if daemon is not world.daemon or world.hazards.is_dead or not daemon.machine.knows(namespace):
        return
    for each in world.engines:
        each.found.clear()
    _call(world, ev.NamespaceCleared(daemon.driver.long_work.next_token(), namespace))


def quota(world: World, engine: Engine) -> None:
    most = world.random.choice(
        [0, world.settings.extent_bytes * 3, world.settings.extent_bytes * 6]
    )
    for each in world.engines:
        each.found.clear()
    token = world.daemon.driver.long_work.next_token()
    _call(world, ev.QuotaSet(token, TenantId(engine.model.tenant), most))


def _call(world: World, event: Any) -> None:
    try:
        world.daemon.driver.call(event)
    except KvdError as error:
        world.note(f"refused {error.reason}")


def rights_change(world: World, _engine: Engine) -> None:
    watchers.rights_change(world)


# -- the machine ----------------------------------------------------------------------------------


def shortage(world: World, _engine: Engine) -> None:
    world.hazards.short.add(world.random.choice(hazards.SHORTAGES))


def plenty(world: World, _engine: Engine) -> None:
    world.hazards.short.clear()


def clock_jumps(world: World, _engine: Engine) -> None:
    world.jumped_s = world.loop.now
    world.loop.jump(world.random.choice([0.5, 2.0, 30.0, 100.0]))
    for each in world.engines:
        each.found.clear()


def daemon_stalls(world: World, _engine: Engine) -> None:
    """Only a client that waits for answers minds; the others ask without waiting."""
    world.loop.stall(world.random.choice([0.02, 0.3, 1.5, 6.0]))
    for each in world.engines:
        each.found.clear()


def bytes_rot(world: World, _engine: Engine) -> None:
    if not world.settings.checksums:
        return
    random, ledger = world.random, world.ledger
    readable = sorted(ledger.records)
    for slot in random.sample(readable, min(len(readable), random.randrange(MOST_ROTTEN))):
        row = ledger.row_of(slot)
        shard = random.randrange(len(row.extents))
        offset = (slot - row.first_slot) * row.part_bytes[shard]
        content = world.pool.extents[row.extents[shard]][offset]
        content[random.randrange(len(content))] = ROTTEN


_WEIGHTS: list[tuple[Callable[[Any, Any], None], int]] = [
    (engine_dies, 4),
    (stream_breaks, 3),
    (worker_dies, 2),
    (worker_unregisters, 2),
    (mover_dies, 4),
    (tier_dies, 1),
    (power_goes, 2),
    (killed, 1),
    (epoch_changes, 3),
    (clear, 6),
    (quota, 2),
    (rights_change, 6),
    (shortage, 4),
    (plenty, 3),
    (clock_jumps, 2),
    (bytes_rot, 5),
]
_CHOICES = [what for what, weight in _WEIGHTS for _ in range(weight)]
_CHOICES_BESIDE_CLIENTS = [*_CHOICES, *[daemon_stalls] * 6]
