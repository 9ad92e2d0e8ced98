"""A world drawn from a seed: a pool that is always full, engines, tenants, tiers, and faults.

Each step has random numbers of its own (seed and step), so a step that is left out changes the
others by nothing but its effects: that is how a failing journal is shortened.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Container
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from kvd.config.tenant_rule import TenantRule
from kvd.config.tiers import TierRule
from kvd.core import events as ev
from kvd.core.actions import Action
from kvd.core.keys import TenantId
from kvd.core.machine import Machine
from kvd.core.model.state import MachineConfig
from kvd.core.policy import POLICY_NAMES
from kvd.runtime import batching
from kvd.runtime import tiers as runtime_tiers
from kvd.tiers.keeper import TierKeeper
from kvd_proto.v1 import engine_pb2 as pb
from tests.core import invariants
from tests.simulation.whole import hazards as hazards_
from tests.simulation.whole.bytes import Meanings, PoolBytes
from tests.simulation.whole.daemon import Settings, SimDaemon
from tests.simulation.whole.drawn import HASH_BYTES, Found, Model
from tests.simulation.whole.engine import RawEngine
from tests.simulation.whole.hazards import Hazards, PowerCut
from tests.simulation.whole.ledger import Ledger
from tests.simulation.whole.loop import SimLoop
from tests.simulation.whole.movers import SimMover, Surroundings, Temper
from tests.simulation.whole.tiers import SimStore, SimTiers, TierTemper

EXTENT_BYTES = 65536
CHECK_EVERY = 150  # events between two readings of every table; the ledger judges each event
SETTLE_S = 75.0
PROMISED_NS = 3_000_000_000  # as long must a class have waited before blocks under lease may go
RELEASED_S = 5.0  # after its session's end a mover is gone
SERVED_S = 30.0  # within which everybody who asks is served, once faults have stopped


class SimFailure(Exception):
    """What went wrong in a world, with its journal and the story of the block in question."""

    def __init__(self, world: World, error: BaseException) -> None:
        super().__init__(f"seed {world.seed}, step {world.step}: {error!r}")
        self.kind = type(error).__name__ + ": " + _words(str(error))
        self.step = world.step
        self.journal = list(world.journal)
        self.story = world.story(error)


def _words(text: str) -> str:
    """An error's text without its figures."""
    return "".join(c for c in text.split("\n", maxsplit=1)[0] if not c.isdigit())[:60]


@dataclass
class Journal:
    """What happened, a line a step; its digest is the run's name."""

    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def note(self, line: str) -> None:
        self.lines.append(line)
        self._digest.update(line.encode())

    def event(self, name: str, now_ns: int, orders: int) -> None:
        self._digest.update(b"%s %d %d" % (name.encode(), now_ns, orders))

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Any:
        return iter(self.lines)


class Watched(logging.Handler):
    """An error that the daemon only logs: nobody waits for what failed there."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, PowerCut) and error is not None:
            self._world.broken(error)


class World:
    """One node, from its first start to its last settling. `run` is all that happens."""

    def __init__(self, seed: int, steps: int, left_out: Container[int] = ()) -> None:
        self.seed = seed
        self.steps = steps
        self.left_out = left_out
        self.step = -1
        self.events = 0
        self.journal = Journal()
        self.error: BaseException | None = None
        self.random = Random(seed)
        self.loop = SimLoop()
        self.hazards = Hazards(self.random)
        self.meanings = Meanings()
        self.pool = PoolBytes()
        self.hazards.zeroed = self.pool.zero
        self.around = Surroundings(self.loop, self.random, Temper(), self.pool, self.meanings)
        self.engines: list[RawEngine] = []
        self.ledger = Ledger()
        self.restarts = 0
        self.jumps = 0
        self._was_short = False
        self._epoch = 0
        self._pids = itertools.count()

    # -- the whole run ------------------------------------------------------------------------

    def run(self) -> World:
        """Live, settle, and be served; SimFailure with all that is known of what went wrong."""
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-sim-", dir="/dev/shm"))
        kvd_log = logging.getLogger("kvd")
        level, watched = kvd_log.level, Watched(self)
        try:
            with ExitStack() as stack:
                stack.enter_context(self.loop)
                stack.enter_context(hazards_.in_force(self.hazards, self.loop.as_time_module()))
                kvd_log.setLevel(logging.ERROR)
                kvd_log.addHandler(watched)
                propagate, kvd_log.propagate = kvd_log.propagate, False
                stack.callback(setattr, kvd_log, "propagate", propagate)
                self._draw()
                keeper = partial(TierKeeper, launch=self.tiers.launch)
                piece = (batching, "PIECE_KEYS", self.random.choice([2, 3, batching.PIECE_KEYS]))
                keepers = (runtime_tiers, "TierKeeper", keeper)
                stack.enter_context(hazards_.replaced([keepers, piece]))
                self._live_and_settle()
        finally:
            kvd_log.removeHandler(watched)
            kvd_log.setLevel(level)
            self._close_registries()
            shutil.rmtree(self.directory)
        return self

    def _close_registries(self) -> None:
        """As the system does it for a daemon that dies in its start: nobody else has them then."""
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()).startswith(f"{self.directory}/registry"):
                    os.close(int(link.name))

    def _live_and_settle(self) -> None:
        try:
            self._start_daemon()
            self.loop.after_call = self._after_call
            for step in range(self.steps):
                self.step = step
                self.random.seed(self.seed * 1_000_003 + step)
                if step not in self.left_out:
                    self._step()
            self.step = self.steps
            self.random.seed(self.seed)
            self.settle()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise SimFailure(self, self.error or error) from error
        finally:
            self.loop.after_call = lambda: None
            self.hazards.is_dead = True
            self.daemon.kill()
            self.hazards.begin_again()

    # -- what there is ------------------------------------------------------------------------

    def _draw(self) -> None:
        random = self.random
        tenants = (
            TenantRule(TenantId("red"), frozenset({101, 102})),
            TenantRule(
                TenantId("blue"),
                frozenset({201}),
                frozenset(),
                random.choice([0, 6]) * EXTENT_BYTES,
            ),
        )
        tiers = tuple(
            TierRule(
                f"tier{n}",
                "sim:open",
                medium=random.choice(["STORAGE", "STORAGE", "REMOTE"]),
                write=random.choice(["through", "demotion", "reuse"]),
                deadline_seconds=1.0,
            )
            for n in range(random.choice([0, 0, 0, 1, 2]))
        )
        self.settings = Settings(
            directory=self.directory,
            extents=random.choice([8, 10, 14]),
            extent_bytes=EXTENT_BYTES,
            policy=random.choice(POLICY_NAMES),
            threshold=random.choice([1, 1, 1, 2]),
            checksums=random.random() < 0.3,
            tenants=tenants,
            tiers=tiers,
            lease_share=random.choice([0.1, 0.25, 0.5]),
        )
        stores = {n: SimStore(random.choice([20, 200])) for n in range(len(tiers))}
        self.tiers = SimTiers(self.around, TierTemper(), stores)
        models = [self._model(number) for number in range(random.choice([2, 3]))]
        for number in range(random.choice([3, 4, 4])):
            model = models[number % len(models)]
            self.engines.append(
                RawEngine(
                    f"engine{number}",
                    model,
                    self.loop,
                    random,
                    self.meanings,
                    self.note,
                    self._excused,
                )
            )

    def _model(self, number: int) -> Model:
        random = self.random
        shards = random.choice([1, 1, 2, 2, 3, 4])
        ranks = tuple(range(shards)) if random.random() < 0.7 else (*range(shards), 0)
        tenant, uid = random.choice([("red", 101), ("red", 102), ("blue", 201)])
        widths = random.choice([(1,), (1, 2), (2,)])
        block_bytes = tuple(random.choice([4096, 8192]) for _ in widths)
        groups = [
            pb.GroupSpec(
                kind=pb.GROUP_KIND_FULL_ATTENTION,
                tokens_per_block=16 * width,
                blocks_per_block=width,
                shard_bytes=[size] * shards,
            )
            for width, size in zip(widths, block_bytes, strict=True)
        ]
        fields = pb.NamespaceFields(
            tenant=tenant,
            model=f"model{number}",
            kv_dtype="bf16",
            hash_algorithm="sim",
            hash_bytes=HASH_BYTES,
            tokens_per_block=16,
            groups=groups,
            unshared=random.random() < 0.15,
        )
        return Model(f"model{number}", tenant, uid, fields, widths, block_bytes, shards, ranks)

    # -- the daemon's lives -------------------------------------------------------------------

    def _start_daemon(self) -> None:
        self.ledger = Ledger(clean=self.pool.is_clean)
        self.ledger.slots_per_extent = EXTENT_BYTES // 4096
        self.ledger.maps = self._is_mapped
        self.daemon = SimDaemon(
            self.settings,
            self.around,
            partial(CheckedMachine, self),  # type: ignore[arg-type]
            self.broken,
            self._launched,
            self._pids,
        )
        self.daemon.start()

    def _launched(self, mover: SimMover) -> None:
        pass

    def _is_mapped(self, row: int) -> bool:
        movers = self.daemon.movers.values()
        return any(mover.is_alive and row in mover.extents for mover in movers)

    def broken(self, error: BaseException) -> None:
        """The daemon would have ended itself, or a client with it."""
        if self.error is None and not isinstance(error, PowerCut):
            self.error = error

    def _after_call(self) -> None:
        if self.error is not None:
            raise self.error
        if self.hazards.is_dead:
            raise PowerCut

    def _restart(self) -> None:
        """The power went: the next daemon finds what was written."""
        self.restarts += 1
        self.hazards.is_dead = True  # nothing that is left of the daemon does anything
        before, was_short = self.ledger, self._was_short or self.daemon.pool.unwritten > 0
        self.daemon.kill()
        self.tiers.daemon_ends()
        self.hazards.begin_again()
        self._was_short = False
        for engine in self.engines:
            engine.lose_daemon()
        self._start_daemon()
        before.check_next(self.ledger, all_stay=not was_short)
        self.ledger.compare(self.daemon.machine, self.daemon.pool)
        self.note(f"restart, {len(self.ledger.findable)} of {len(before.findable)} blocks")

    # -- steps --------------------------------------------------------------------------------

    def note(self, line: str) -> None:
        self.journal.note(f"{self.step} {self.loop.now:.4f} {line}")

    def _step(self) -> None:
        try:
            self._do_one()
            self._pass_time()
        except PowerCut:
            self._restart()
        if self.error is not None:
            raise self.error

    def _do_one(self) -> None:
        random = self.random
        if random.random() < 0.03:
            self._mischief()
            return
        engine = random.choice(self.engines)
        if engine.daemon is not self.daemon:
            self.note(f"{engine.name} connects")
            engine.connect(self.daemon)
        else:
            self.note(f"{engine.name} acts")
            engine.act()

    def _pass_time(self) -> None:
        dice = self.random.random()
        if dice < 0.9:
            self.loop.run_for(self.random.random() * 0.01)
        elif dice < 0.995:
            self.loop.run_for(self.random.random() * 0.2)
        else:
            self.loop.run_for(self.random.choice([1.0, 3.0, 10.0, 40.0]))

    def _mischief(self) -> None:
        random = self.random
        engine = random.choice(self.engines)
        names = [name for name, weight in _MISCHIEF for _ in range(weight)]
        name = random.choice(names)
        self.note(f"{name} {engine.name}")
        getattr(self, f"_{name}")(engine)

    def _engine_dies(self, engine: RawEngine) -> None:
        engine.die()
        engine.epoch = ""  # of that start alone: who comes with it later makes it everybody's

    def _stream_breaks(self, engine: RawEngine) -> None:
        if engine.stream is not None and not engine.stream.is_cut:
            movers = list(engine.movers.values())
            self.loop.outside(RELEASED_S, self._check_released, movers, self.daemon, self.jumps)
        engine.lose_stream()

    def _check_released(self, movers: list[SimMover], daemon: SimDaemon, jumps: int) -> None:
        """The session of these is long over, whatever hung (I5)."""
        if daemon is self.daemon and jumps == self.jumps and not self.hazards.is_dead:
            late = [mover.mover for mover in movers if mover.is_alive]
            assert not late, f"movers {late} outlive their session (I5)"

    def _mover_dies(self, engine: RawEngine) -> None:
        if engine.movers:
            self.random.choice(list(engine.movers.values())).kill()

    def _tier_dies(self, _engine: RawEngine) -> None:
        for tier in list(self.tiers.running.values()):
            tier.kill("killed")

    def _power_goes(self, _engine: RawEngine) -> None:
        self.hazards.writes_left = self.random.choice([1, 1, 2, 3, 5, 9])

    def _killed(self, _engine: RawEngine) -> None:
        raise PowerCut

    def _epoch_changes(self, engine: RawEngine) -> None:
        if engine.usable and engine.stream is not None:
            self._epoch += 1
            epoch = f"{engine.name}-{self._epoch}"
            engine.session_epoch(epoch)

    def _clear(self, engine: RawEngine) -> None:
        found = self._namespace_of(engine)
        if found is not None:
            for each in self.engines:
                each.found.clear()
            self.daemon.driver.call(ev.NamespaceCleared(self.daemon.driver.next_token(), found))

    def _namespace_of(self, engine: RawEngine) -> Any:
        record = self.daemon.driver.sessions.get(engine.session) if engine.session else None
        return None if record is None else record.namespace

    def _excused(self, engine: RawEngine, found: Found) -> bool:
        """Whether a block of a lease was damaged, or its row given to who had waited for long."""
        namespace = self._namespace_of(engine)
        names = ((namespace, engine.epoch, found.account, found.group, key) for key in found.keys)
        return any(self.ledger.excused.get(name, -1) >= found.since_ns for name in names)

    def _quota(self, engine: RawEngine) -> None:
        quota = self.random.choice([0, EXTENT_BYTES * 3, EXTENT_BYTES * 6])
        tenant = TenantId(engine.model.tenant)
        for each in self.engines:
            each.found.clear()
        self.daemon.driver.call(ev.QuotaSet(self.daemon.driver.next_token(), tenant, quota))

    def _shortage(self, _engine: RawEngine) -> None:
        self._was_short = True
        self.hazards.short.add(self.random.choice(hazards_.SHORTAGES))

    def _plenty(self, _engine: RawEngine) -> None:
        self.hazards.short.clear()

    def _clock_jumps(self, _engine: RawEngine) -> None:
        self.jumps += 1
        self.loop.jump(self.random.choice([0.5, 2.0, 30.0, 100.0]))
        for each in self.engines:
            each.found.clear()

    def _bytes_rot(self, _engine: RawEngine) -> None:
        if not self.settings.checksums:
            return
        filled = [(e, o) for e, held in self.pool.extents.items() for o in held]
        if filled:
            extent, offset = self.random.choice(filled)
            content = self.pool.extents[extent][offset]
            content[self.random.randrange(len(content))] = -1

    # -- the end ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Faults stop: everybody who asks is served, then all leave and nothing stays behind."""
        self.hazards.begin_again() if not self.hazards.is_dead else self._restart()
        self.around.temper.calm()
        self.tiers.temper.calm()
        for tenant in ("red", "blue"):
            token = self.daemon.driver.next_token()
            self.daemon.driver.call(ev.QuotaSet(token, TenantId(tenant), 0))
        self._serve_all()
        for engine in self.engines:
            engine.look()
            engine.die()
        self.loop.run_for(SETTLE_S)
        self._check_rest()

    def _serve_all(self) -> None:
        """Liveness and fairness: a store and a load of everybody's end well within a bound."""
        self.loop.run_for(70.0)  # past every deadline of what was in flight
        before = {e.name: (e.stores_done, e.loads_done) for e in self.engines}
        waiting = list(self.engines)
        end = self.loop.now + SERVED_S
        while waiting and self.loop.now < end:
            for engine in self.engines:
                if engine not in waiting:
                    engine.look()
                    engine.press()
            for engine in list(waiting):
                if engine.daemon is not self.daemon:
                    engine.connect(self.daemon)
                    continue
                engine.look()
                engine.ask_plainly()
                stores, loads = before[engine.name]
                if engine.stores_done > stores and engine.loads_done > loads:
                    waiting.remove(engine)
            self.loop.run_for(0.1)
            if self.error is not None:
                raise self.error
        names = ", ".join(f"{e.name} ({e.state()})" for e in waiting)
        assert not waiting, f"not served within {SERVED_S:.0f} s: {names}"

    def _check_rest(self) -> None:
        if self.error is not None:
            raise self.error
        machine = self.daemon.machine
        found = machine.statistics()
        assert found.slots.reserved == 0, "a reserved slot was never freed"
        assert found.slots.quarantined == 0, "a quarantined slot was never freed"
        in_flight = (found.transfers, found.leases, found.followed_keys)
        assert in_flight == (0, 0, 0), "something never ended"
        assert (found.hand_offs, found.handed_off_blocks) == (0, 0), "held for ever"
        assert found.rows_retiring == 0, "a row was never taken back"
        assert not self.ledger.jobs, "a job never ended"
        assert not self.daemon.driver.fleet.running(), "a mover runs for nobody"
        assert not self.daemon.driver.sessions, "a session stays"
        assert not self.daemon.rooms.sessions.by_id, "a session stays in control"
        unshared = [n for n in machine.state.namespaces.values() if n.spec.unshared]
        assert not unshared, "a private namespace stayed"
        assert {s.epoch for s in machine.state.scopes.values()} <= {""}, "an own epoch stayed"
        invariants.check(machine)
        self.ledger.compare(machine, self.daemon.pool)

    def story(self, error: BaseException) -> list[str]:
        """What lately became of the slots and the job in question."""
        try:
            return self.daemon.machine.story(error)  # type: ignore[arg-type]
        except Exception as untold:  # noqa: BLE001 - the state is in doubt
            return [f"it can't be told: {untold!r}"]


_MISCHIEF: list[tuple[str, int]] = [
    ("engine_dies", 4),
    ("stream_breaks", 3),
    ("mover_dies", 4),
    ("tier_dies", 1),
    ("power_goes", 2),
    ("killed", 1),
    ("epoch_changes", 3),
    ("clear", 4),
    ("quota", 2),
    ("shortage", 4),
    ("plenty", 3),
    ("clock_jumps", 2),
    ("bytes_rot", 3),
]


class CheckedMachine(Machine):
    """The real machine; after every event the ledger judges, and now and then all tables."""

    def __init__(self, world: World, config: MachineConfig) -> None:
        super().__init__(config)
        self._world = world

    def handle(self, event: ev.Event, now_ns: int) -> list[Action]:
        world = self._world
        if world.hazards.is_dead:
            raise PowerCut
        longest = self._longest_wait(now_ns)
        orders = super().handle(event, now_ns)
        world.events += 1
        world.journal.event(type(event).__name__, now_ns, len(orders))
        ledger = world.ledger
        ledger.now_ns = world.loop.now_ns()
        for number, row in (*self.state.emptying.items(), *self.state.retiring.items()):
            if (
                row.emptied_ns == now_ns
                and row.leases is not None
                and number not in ledger.given_up
            ):
                assert longest >= PROMISED_NS, f"row {number} is emptied in spite of leases (I3)"
                ledger.given_up.add(number)
        ledger.observe(event, orders)
        if world.events % CHECK_EVERY == 0:
            invariants.check(self)
        return orders

    def _longest_wait(self, now_ns: int) -> int:
        """How long the claim that has waited for a row the longest has done so."""
        needy = self.state.claims.needy
        return max((now_ns - claim.since_ns for claim in needy), default=0) if needy else 0
