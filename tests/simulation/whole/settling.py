"""A world's end: faults stop, everybody who asks is served, all leave, and nothing stays behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.core import events as ev
from kvd.core.keys import TenantId
from kvd.runtime.verify import Stage, Verifier
from tests.core import invariants
from tests.simulation.whole import watchers

if TYPE_CHECKING:
    from tests.simulation.whole.ranks import Engine, Wish
    from tests.simulation.whole.world import World

DEADLINES_S = 66.0  # past every deadline of what was in flight
PRESSED_S = 4.0  # so long the quick ones have the pool for themselves
SETTLE_S = 75.0
SERVED_S = 30.0  # within which everybody who asks is served, once faults have stopped
TURN_S = 0.02
TURNS_A_PRESS = 6  # what was stored is asked for before all of its group is stored over
VERIFIED_S = 20.0


def settle(world: World) -> None:
    """Faults stop."""
    if world.hazards.is_dead:
        world.restart()
    else:
        world.hazards.begin_again()
    world.around.temper.calm()
    world.tiers.temper.calm()
    for tenant in ("red", "blue"):
        token = world.daemon.driver.long_work.next_token()
        world.daemon.driver.call(ev.QuotaSet(token, TenantId(tenant), 0))
    _serve_all(world)
    _have_watchers(world)
    for engine in world.engines:
        engine.look()
        engine.leave()
        engine.die()
    world.loop.run_for(SETTLE_S)
    _have_watchers(world)
    world.loop.run_for(watchers.TOLD_S)
    _check_rest(world)


def _have_watchers(world: World) -> None:
    for watcher in world.watchers:
        watcher.settle()


# -- everybody is served --------------------------------------------------------------------------


def _serve_all(world: World) -> None:
    """Liveness and fairness: some fill the pool and store on and on, then the others come.

    A store and a load of everybody's, in each group, end well within a bound.
    """
    world.loop.run_for(DEADLINES_S)
    order = world.random.sample(world.engines, len(world.engines))
    quick = order[: world.random.randrange(len(order))]
    _run_until(world, PRESSED_S, lambda: _take_turns(world, quick, []))
    wishes = {e.name: e.wish() for e in world.engines}
    waiting = [e for e in world.engines if e not in quick] + quick

    def everybody() -> bool:
        _take_turns(world, quick, [(e, wishes[e.name]) for e in waiting])
        for engine in list(waiting):
            if wishes[engine.name].is_served:
                waiting.remove(engine)
                quick.append(engine)
        return not waiting

    _run_until(world, SERVED_S, everybody)
    names = ", ".join(f"{e.name} ({wishes[e.name].told()})" for e in waiting)
    assert not waiting, f"not served within {SERVED_S:.0f} s: {names}"


def _run_until(world: World, seconds: float, turn: Any) -> None:
    end = world.loop.now + seconds
    while world.loop.now < end and not turn():
        world.loop.run_for(TURN_S)
        if world.error is not None:
            raise world.error


def _take_turns(world: World, quick: list[Engine], asking: list[tuple[Engine, Wish]]) -> bool:
    presses = int(world.loop.now / TURN_S) % TURNS_A_PRESS == 0
    for engine in quick if presses else ():
        if _is_there(world, engine):
            engine.press()
    for engine, wish in asking:
        if _is_there(world, engine):
            wish.ask()
    return False


def _is_there(world: World, engine: Engine) -> bool:
    engine.is_plain = True
    if engine.daemon is world.daemon:
        engine.look()
    if engine.daemon is not world.daemon or not engine.usable:
        engine.connect(world.daemon)
        return False
    return True


# -- nothing stays behind -------------------------------------------------------------------------


def _check_rest(world: World) -> None:
    if world.error is not None:
        raise world.error
    machine, daemon = world.daemon.machine, world.daemon
    found = machine.statistics()
    assert found.slots.reserved == 0, "a reserved slot was never freed"
    assert found.slots.quarantined == 0, "a quarantined slot was never freed"
    in_flight = (found.transfers, found.leases, found.followed_keys)
    assert in_flight == (0, 0, 0), "something never ended"
    assert (found.hand_offs, found.handed_off_blocks) == (0, 0), "held for ever"
    assert found.rows_retiring == 0, "a row was never taken back"
    assert not world.ledger.jobs, "a job never ended"
    assert not daemon.driver.fleet.running(), "a mover runs for nobody"
    assert not daemon.driver.sessions, "a session stays"
    assert not daemon.common.sessions.by_id, "a session stays in control"
    unshared = [n for n in machine.state.namespaces.values() if n.spec.unshared]
    assert not unshared, "a private namespace stayed"
    assert {s.epoch for s in machine.state.scopes.values()} <= {""}, "an own epoch stayed"
    invariants.check(machine)
    world.ledger.compare(machine, daemon.pool)
    for watcher in world.watchers:
        watcher.check_rest()
    _verify(world)


def _verify(world: World) -> None:
    """`kvd verify` finds nothing."""
    daemon = world.daemon
    verifier = Verifier(daemon.machine, daemon.pool, daemon.driver.turns)
    for stage in (Stage.ACCOUNTS, Stage.BLOCKS, Stage.EXTENTS, Stage.REGISTRY):
        task = world.loop.create_task(verifier.look(stage, 0, with_bytes=False))
        world.loop.run_until(world.loop.now + VERIFIED_S, task.done)
        found = task.result().findings
        assert not found, f"kvd verify finds {found[0]}"
