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
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from kvd.config.tenant_rule import TenantRule
from kvd.config.tiers import TierRule
from kvd.core.keys import TenantId
from kvd.core.policy import POLICY_NAMES
from kvd.pool.config import PoolError
from kvd.runtime import tiers as runtime_tiers
from kvd.tiers.keeper import TierKeeper
from kvd_proto.v1 import engine_pb2 as pb
from tests.simulation.whole import batch_engine, client, mischief, pieces, rot, watchers
from tests.simulation.whole import hazards as hazards_
from tests.simulation.whole.batch_engine import BatchEngine
from tests.simulation.whole.bytes import Meanings, PoolBytes
from tests.simulation.whole.client import ClientEngine
from tests.simulation.whole.client_link import Links
from tests.simulation.whole.client_threads import Threads
from tests.simulation.whole.daemon import Settings, SimDaemon
from tests.simulation.whole.drawn import HASH_BYTES, Found, Model
from tests.simulation.whole.engine import RawEngine
from tests.simulation.whole.hazards import Hazards, PowerCut
from tests.simulation.whole.ledger import Ledger
from tests.simulation.whole.loop import SimLoop
from tests.simulation.whole.movers import SimMover, Surroundings, Temper
from tests.simulation.whole.ranks import Engine
from tests.simulation.whole.settling import settle
from tests.simulation.whole.tiers import SimStore, SimTiers, TierTemper
from tests.simulation.whole.watched import CheckedMachine
from tests.simulation.whole.watchers import Watcher

EXTENT_BYTES = 65536
WATCHERS = 2
# Of eight worlds in a row the sixth has clients, and the fourth one that asks in batches.
CLIENTS_IN, BATCHES_IN, CLIENTS_EVERY = 5, 3, 8
_TIERS = (0, 1, 2, 0)  # of worlds by seed: eight in a row have one of each kind


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
    """An error that daemon or client only log: nobody waits for what failed there."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, PowerCut) and error is not None:
            self._world.broken(error)


@contextmanager
def _log_watched(name: str, level: int, watched: Watched) -> Iterator[None]:
    """Within, what is logged there from that level on comes to `watched` alone."""
    log = logging.getLogger(name)
    before, propagates = log.level, log.propagate
    log.setLevel(level)
    log.propagate = False
    log.addHandler(watched)
    try:
        yield
    finally:
        log.removeHandler(watched)
        log.propagate = propagates
        log.setLevel(before)


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
        self.around = Surroundings(
            self.loop,
            self.random,
            Temper(hang=(0.01, 0.05)[seed % 3 % 2]),
            self.pool,
            self.meanings,
        )
        self.engines: list[Engine] = []
        self.watchers: list[Watcher] = []
        self.clients = 0  # of them
        self.ledger = Ledger()
        self.restarts = 0
        self.jumped_s = -1000.0
        self.epoch = 0
        self._pids = itertools.count()
        self.threads = Threads(self.loop, self.pass_time)
        self.around.news = self.threads.news
        self.links = Links(self.threads)

    # -- the whole run ------------------------------------------------------------------------

    def run(self) -> World:
        """Live, settle, and be served; SimFailure with all that is known of what went wrong."""
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-sim-", dir="/dev/shm"))
        try:
            with ExitStack() as stack:
                stack.enter_context(self.loop)
                stack.enter_context(hazards_.in_force(self.hazards, self.loop.as_time_module()))
                watched = Watched(self)
                stack.enter_context(_log_watched("kvd", logging.ERROR, watched))
                # The client warns of an error that nobody expects, and goes on.
                stack.enter_context(_log_watched("kvd_client", logging.WARNING, watched))
                stack.enter_context(client.in_force(self.threads, self.links, Random(self.seed)))
                stack.enter_context(batch_engine.in_force(self.threads))
                stack.callback(self.threads.end_all)
                self._draw()
                keeper = partial(TierKeeper, launch=self.tiers.launch)
                keepers = (runtime_tiers, "TierKeeper", keeper)
                bounds = [*pieces.drawn(self.random), *watchers.drawn(self.random)]
                bounds.append(pieces.pause(self.random))
                stack.enter_context(hazards_.replaced([keepers, *bounds]))
                busy = self.random.choice([0.0, 0.05, 0.3, 0.6])
                self.loop.is_busy = lambda: self.random.random() < busy
                self._live_and_settle()
        finally:
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
            settle(self)
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
            for n in range(_TIERS[self.seed // 2 % len(_TIERS)])
        )
        self.settings = Settings(
            directory=self.directory,
            extents=random.choice([8, 10, 14]),
            extent_bytes=EXTENT_BYTES,
            policy=random.choice(POLICY_NAMES),
            threshold=random.choice([1, 1, 1, 2]),
            checksums=bool(self.seed % 2),
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
                    is_eager=random.random() < 0.5,
                )
            )

        self.watchers = [Watcher(self, number) for number in range(WATCHERS)]
        if self.seed % CLIENTS_EVERY == CLIENTS_IN:
            self.clients = 1 + self.seed // CLIENTS_EVERY % 2
            self.engines += [self._client(number, ClientEngine) for number in range(self.clients)]
        elif self.seed % CLIENTS_EVERY == BATCHES_IN:
            self.clients = 1 + self.seed // CLIENTS_EVERY % 2
            self.engines += [self._client(number, BatchEngine) for number in range(self.clients)]

    def _client(self, number: int, kind: type[ClientEngine]) -> ClientEngine:
        """Two of a world have one model, so that they meet in its blocks."""
        groups = client.MODELS[self.seed // 16 % len(client.MODELS)]
        return kind(
            f"client{number}",
            client.model_of("served", "red", 101, groups),
            self.loop,
            self.random,
            self.meanings,
            self.note,
            groups=groups,
            options=client.OPTIONS[self.seed // 80 % len(client.OPTIONS)],
            behind_s=client.BEHIND_S[self.seed // 16 % len(client.BEHIND_S)],
            threads=self.threads,
            links=self.links,
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
            unshared=random.random() < 0.25,
        )
        return Model(f"model{number}", tenant, uid, fields, widths, block_bytes, shards, ranks)

    # -- the daemon's lives -------------------------------------------------------------------

    def _start_daemon(self) -> None:
        self.ledger = Ledger(clean=self.pool.is_clean)
        self.ledger.slots_per_extent = EXTENT_BYTES // 4096
        self.ledger.extents = self.settings.extents
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

    def _start_again(self) -> None:
        """The next daemon starts: now and then the power goes meanwhile, or something is short."""
        dice = self.random.random()
        if dice < 0.2:
            self.hazards.writes_left = self.random.choice([1, 2, 3, 5, 9, 20])
        elif dice < 0.4:
            self.hazards.short.add(self.random.choice(hazards_.SHORTAGES))
        try:
            self._start_daemon()
        except (PowerCut, PoolError, OSError) as error:
            self.note(f"a start fails: {error!r}")
            self.daemon.kill()
            self.hazards.begin_again()
            self._start_daemon()

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

    def restart(self) -> None:
        """The power went: the next daemon finds what was written."""
        self.restarts += 1
        self.hazards.is_dead = True  # nothing that is left of the daemon does anything
        before, unwritten = self.ledger, self.daemon.pool.unwritten
        self.daemon.kill()
        self.tiers.daemon_ends()
        self.hazards.begin_again()
        for engine in self.engines:
            engine.lose_daemon()
        for watcher in self.watchers:
            watcher.lose_daemon()
        lost = rot.damage(self.directory, before, self.random)
        self._start_again()
        before.check_next(self.ledger, all_noted=not unwritten, lost=lost)
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
            self.restart()
        if self.error is not None:
            raise self.error

    def _do_one(self) -> None:
        random = self.random
        if random.random() < 0.03:
            self._mischief()
            return
        if random.random() < 0.03:
            random.choice(self.watchers).act()
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

    def pass_time(self, seconds: float, ready: Callable[[], bool]) -> None:
        """An engine waits: what befalls the daemon meanwhile is no exception of the engine's."""
        end = self.loop.now + seconds
        while self.loop.now < end and not ready():
            try:
                self.loop.run_until(end, ready)
            except PowerCut:
                self.restart()

    def _mischief(self) -> None:
        mischief.do_one(self)

    def namespace_of(self, engine: Engine) -> Any:
        """Of the engine's session; None without one."""
        record = self.daemon.driver.sessions.get(engine.session) if engine.session else None
        return None if record is None else record.namespace

    def _excused(self, engine: RawEngine, found: Found) -> bool:
        """Whether a block of a lease was damaged, or its row given to who had waited for long."""
        namespace = self.namespace_of(engine)
        names = ((namespace, engine.epoch, found.account, found.group, key) for key in found.keys)
        return any(self.ledger.excused.get(name, -1) >= found.since_ns for name in names)

    def story(self, error: BaseException) -> list[str]:
        """What lately became of the slots and the job in question."""
        try:
            return self.daemon.machine.story(error)  # type: ignore[arg-type]
        except Exception as untold:  # noqa: BLE001 - the state is in doubt
            return [f"it can't be told: {untold!r}"]
