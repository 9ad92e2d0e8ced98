"""An engine over the real client: its scheduler side, its connection and its worker side.

Its blocks are handled as carelessly as `PagedEngine` handles them, over a daemon that is killed,
stalled and cut off. Modelled are sockets, gRPC, descriptors, and a registration's ring and board.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from kvd.core.keys import SessionId
from kvd_client import (
    EngineIdentity,
    Group,
    GroupKind,
    NamespaceFields,
    RequestParams,
    SchedulerConnection,
    SchedulerOptions,
    StepPlan,
    StoreMode,
    Worker,
    WorkerReport,
    backoff,
    connection,
)
from kvd_client.draft import StepDraft
from kvd_client.worker import jobs as worker_jobs
from kvd_client.worker import registrar
from kvd_client.worker import worker as worker_module
from kvd_proto.layout import NULL_ENGINE_BLOCK
from tests.client.paged_engine import BLOCKS, PagedEngine, Tokens
from tests.simulation.whole.bytes import RankBytes
from tests.simulation.whole.client_device import Device, LateDevice
from tests.simulation.whole.client_link import Links
from tests.simulation.whole.client_ranks import take_memory
from tests.simulation.whole.client_threads import Queue, Threads
from tests.simulation.whole.daemon import Stream
from tests.simulation.whole.drawn import HASH_BYTES, Model, hash_of
from tests.simulation.whole.hazards import replaced
from tests.simulation.whole.loop import SimLoop
from tests.simulation.whole.movers import SimMover
from tests.simulation.whole.ranks import Engine, Wish

STEP_S = 0.002
BYTES = 4096  # of an engine block of each group
LONGEST_STEP_S = 15.0  # whatever the daemon does: flushes of stores, then of loads
DEFERRED_S = 30.0  # a request is computed then, at the latest
LOADING_S = 60.0  # a load has ended then, at the latest
HANDED_OFF = 0.1  # of the requests: whole in the daemon when they end, and held there
RESET_AMID_A_LOAD = 0.01  # of the steps
MOVED = 0.003  # of the steps: its KV is taken away, and comes elsewhere
MOVED_FROM_A_STOPPED = 0.1  # the same while the daemon stands still
PATIENCE_S = (0.002, 0.05, 5.0)  # with which it asks for it
MOVED_S = 20.0  # until a daemon that stands still has let it go
BEHIND_S = (0.0, 0.004, 0.05)  # that a device may need for a step, at most
LAST_FREED = 0.7  # of the blocks that are taken
COUNTED_S = 2.0  # at most, of the time between two steps: clocks jump, and engines stand
DRAINED_S = 100.0
FULL = Group(tokens_per_block=4, shard_bytes=(BYTES,))
WIDE = Group(tokens_per_block=8, shard_bytes=(BYTES,), blocks_per_block=2)
WINDOW = replace(FULL, kind=GroupKind.SLIDING_WINDOW, sliding_window_tokens=7)
DRAFTER = replace(FULL, drafter=True)
MODELS = [(FULL,), (WIDE,), (FULL, WINDOW), (WIDE, WINDOW), (FULL, DRAFTER)]
OPTIONS = [
    SchedulerOptions(),
    SchedulerOptions(store_mode=StoreMode.LAZY),
    SchedulerOptions(retention_tokens=16, share_loads=False),
    SchedulerOptions(trusts_page=True),
]


class WatchedConnection(SchedulerConnection):
    """Tells the rank's memory which loads it waits for."""

    memory: RankBytes

    def send_step(self, step: StepDraft) -> bool:
        for job in step.loads:
            for run in job.runs:
                waits = self.memory.loading[run.group]
                blocks = [int(block) for block in run.engine_blocks]
                waits.update((b, job.job_id) for b in blocks if b != NULL_ENGINE_BLOCK)
        return super().send_step(step)


@dataclass
class ClientSide:
    """The client as `PagedEngine` meets it."""

    loop: SimLoop
    connection: WatchedConnection
    worker: Worker
    make_device: Callable[[RankBytes], Device]

    def take(self, memory: RankBytes) -> Device:
        """Have its KV there from now on."""
        self.memory = self.connection.memory = memory
        self.device = self.make_device(memory)
        return self.device

    def clock(self) -> float:
        return self.loop.now

    def start_step(self, plan: StepPlan) -> None:
        self.worker.start_step(plan, self.device.computed())

    def finish_step(self, plan: StepPlan) -> WorkerReport:
        self.worker.finish_step(plan, self.device.computed())
        report = self.worker.get_finished()
        ended = {job.job_id for job in report.ended}
        for waits in self.memory.loading:
            for block in [block for block, job in waits.items() if job in ended]:
                del waits[block]
        return report


class Waits:
    """How long each has waited, as far as the engine looked."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._seen: dict[str, tuple[float, float]] = {}  # when last, and how long until then

    def note(self, name: str, now: float) -> None:
        """It waits still. AssertionError where that is for too long."""
        last, waited = self._seen.get(name, (now, 0.0))
        waited += min(now - last, COUNTED_S)
        self._seen[name] = now, waited
        assert waited < self._most_s, f"{name} waits for {waited:.0f} s"

    def keep(self, names: set[str]) -> None:
        """Only these wait."""
        self._seen = {name: each for name, each in self._seen.items() if name in names}


class CarelessEngine(PagedEngine):
    """One life of the engine's processes. Its KV depends on its epoch, too: a reset changes it."""

    def __init__(self, side: ClientSide, options: SchedulerOptions, seed: int) -> None:
        super().__init__(side, options, seed, speculates=seed % 2 == 1)
        self.seed, self.version = seed, ""
        self.arrives = True
        self.loaded: set[str] = set()
        self.stored = 0  # blocks
        self._deferred, self._loading = Waits(DEFERRED_S), Waits(LOADING_S)
        common = random.Random(7)  # engines of one model have prompts in common
        self.bases = [[common.randrange(3) for _ in range(40)] for _ in range(2)]

    def label(self, group: Group, tokens: list[int], at: int) -> Tokens:
        return (hash_of(self.version), *super().label(group, tokens, at))

    def turn(self) -> None:
        """One step; what it has waited for too long is an AssertionError."""
        began = self.side.clock()
        if self.arrives and len(self.sequences) < 5 and self.source.random() < 0.4:
            self._arrive()
        loads = any(each.loading for each in self.sequences.values())
        if self.arrives and loads and self.source.random() < RESET_AMID_A_LOAD:
            self.reset(f"{self.version}+{self.seed}")
        self.take_step()
        took = self.side.clock() - began
        assert took < LONGEST_STEP_S, f"a step takes {took:.1f} s (I6)"

    def _parameters(self) -> RequestParams | None:
        if self.source.random() > HANDED_OFF:
            return None
        return RequestParams(kv_transfer_params={"do_remote_decode": True})

    def _matched(self, name: str) -> int | None:
        found = super()._matched(name)
        if found is None:
            self._deferred.note(name, self.side.clock())
        return found

    def _take_outcome(self, report: WorkerReport) -> None:
        super()._take_outcome(report)
        self.stored += sum(len(each.block_hashes) for each in self.scheduler.take_events())
        loading = {s.name for s in [*self.sequences.values(), *self.held.values()] if s.loading}
        self._loading.keep(loading)
        for name in loading:
            self._loading.note(name, self.side.clock())
        self._deferred.keep({s.name for s in self.sequences.values() if not s.runs} - loading)

    def _has_loaded(self, name: str) -> None:
        self.loaded.add(name)

    def _take(self, number: int) -> int:
        """Mostly what became free last, whose stores may still be under way.

        A lazy engine says beforehand which it will take.
        """
        if not self.lazy:
            self.free[number].rotate(int(self.source.random() < LAST_FREED))
        return super()._take(number)

    def reset(self, version: str) -> None:
        """As where weights change: nothing that was computed before is of use any more."""
        for sequence in list(self.sequences.values()):
            if sequence.runs:
                self._take_blocks_back(sequence)
        self.version = version
        self.scheduler.reset_cache()

    def end_all(self) -> None:
        self.arrives = False
        for name in [*self.sequences]:
            if not self.sequences[name].loading:
                self._finish(name)


@dataclass(eq=False)
class ClientEngine(Engine):
    """Its scheduler and its one rank are the client's own; `links` is how they find the daemon."""

    groups: tuple[Group, ...] = MODELS[0]
    options: SchedulerOptions = OPTIONS[0]
    behind_s: float = 0.0  # what it is told to compute it may have computed so much later
    threads: Threads = field(kw_only=True)
    links: Links = field(kw_only=True)

    blocks = BLOCKS
    has_mortal_ranks = False

    # -- its life -----------------------------------------------------------------------------

    def start(self) -> None:
        """The processes begin: new memory, nothing known."""
        self._begin_process()
        identity = EngineIdentity(self.name, self.boot_nonce)
        (memory,) = self.memory
        link = WatchedConnection(self.name, identity, namespace_of(self.model, self.groups))
        worker = Worker(self.name, identity)
        worker.register([self.shared_memory(0)], self.layouts())
        side = self.side = ClientSide(self.loop, link, worker, self._device)
        side.take(memory)
        self.careless = CarelessEngine(side, self.options, hash_of(self.name) + self.starts)

    def _begin_process(self) -> None:
        """What comes from now on is this life's: calls, threads, movers."""
        super().start()
        self.links.engines[self.name] = self
        self.links.calls.pop(self.name, None)
        self.threads.process = self.name
        self.had: list[SimMover] = []  # its rank's, of this memory
        self.pressed = 0

    def _device(self, memory: RankBytes) -> Device:
        if not self.behind_s:
            return Device(memory)
        return LateDevice(memory, self.threads, self.behind_s, self.random)

    def die(self) -> None:
        self.threads.end(self.name)
        self.side.device.end()
        super().die()
        self.daemon = None  # its next life has yet to be told where it is

    @property
    def session(self) -> SessionId | None:
        held = self.side.connection._session
        return None if held is None else SessionId(held.session_id)

    @property
    def stream(self) -> Stream | None:
        call = self.links.calls.get(self.name)
        return None if call is None else call.stream

    @property
    def has_session(self) -> bool:
        return self.side.connection.session is not None

    def open_session(self) -> None:
        """The connection's own thread does."""

    def forget_session(self) -> None:
        """Its processes end, or the daemon's has: the stream breaks."""
        self.lose_stream()

    def lose_stream(self) -> None:
        if self.stream is not None:
            self.stream.cut()

    def lose_daemon(self) -> None:
        self.lose_stream()
        super().lose_daemon()

    def register(self, rank: int) -> None:
        """The registrar's own thread does."""

    def rank_is_here(self, rank: int, mover: SimMover) -> None:
        self.movers[rank] = mover
        self.had.append(mover)

    def rank_has_failed(self, rank: int) -> None:
        raise AssertionError("its ranks don't die alone")

    # -- what it does -------------------------------------------------------------------------

    def look(self) -> None:
        """A mover that has ended is let go of; the worker takes its last words."""
        for rank, mover in list(self.movers.items()):
            if not mover.is_alive:
                del self.movers[rank]

    def act(self) -> None:
        """One step, whether there is a daemon or none."""
        self._begin_turn()
        moved = MOVED_FROM_A_STOPPED if self.loop.is_stalled else MOVED
        if not self.is_plain and self.careless.source.random() < moved:
            self.move_memory()
        before = self.careless.tokens_loaded
        self.careless.turn()
        self.loads_done += self.careless.tokens_loaded > before

    def _begin_turn(self) -> None:
        self.look()
        if self.daemon is not None and not self.daemon.is_gone:
            self.connect(self.daemon)
        self.threads.process = self.name

    def move_memory(self) -> None:
        """Its KV goes elsewhere, as for a pause of the engine: all that was computed is gone."""
        careless, worker = self.careless, self.side.worker
        careless.reset(careless.version)  # as vLLM does it, before
        self.take_memory_back()
        self.movers.clear()
        self.had.clear()
        memory = self.memory[0] = self.new_memory()
        careless.device = self.side.take(memory)
        worker.register([self.shared_memory(0)], self.layouts())

    def take_memory_back(self) -> None:
        """Once the client says so, nothing may be copied there."""
        deadline = self.loop.now + MOVED_S
        while not self.side.worker.unregister(self.careless.source.choice(PATIENCE_S)):
            assert self.loop.now < deadline, "the rank's memory is not taken back in time"
        self._withdraw_memory()

    def _withdraw_memory(self) -> None:
        """The client has said that nothing is copied there any more."""
        self.memory[0].is_withdrawn = True
        living = [each for each in self.had if each.is_alive]
        assert not living, "a rank's memory is given back, and its mover lives (I4)"

    def store(self) -> None:
        self.act()

    def session_epoch(self, epoch: str) -> None:
        self.careless.reset(epoch)

    def press(self) -> None:
        if len(self.careless.sequences) < 4:
            self.pressed += 1
            self.careless.arrive_with(self._prompt(self.pressed))
        self.act()

    def _prompt(self, number: int) -> list[int]:
        drawn = random.Random(f"{self.name} {self.starts} {number}")
        return [drawn.randrange(3) for _ in range(33)]

    def wish(self) -> Wish:
        return ClientWish(self)

    def leave(self) -> None:
        """All requests end; nothing stays in the client."""
        careless = self.careless
        deadline = self.loop.now + DRAINED_S
        while careless.sequences or careless.held or careless.scheduler.has_pending_work():
            assert self.loop.now < deadline, "the client's work stays pending"
            careless.end_all()
            self.act()
            self.loop.run_for(STEP_S * 10)
        scheduler, worker = careless.scheduler, self.side.worker
        assert not len(scheduler._jobs), "a job of the client's never ended"
        assert not scheduler._requests, "a request of the client's stays"
        assert not worker._jobs._open, "a rank's job never ended"
        lookups = self.side.connection._lookups
        assert not lookups._answers, "an answer of a lookup is kept for nobody"
        self.take_memory_back()


class ClientWish(Wish):
    """A prompt of its own is computed, stored, and then loaded.

    A lazy engine stores when the device is full, and by then its neighbours may have stored over
    all of the group. And of several groups each may have lost its rows before the next has them.
    Such engines want some of their blocks stored, and no more.
    """

    def __init__(self, engine: ClientEngine) -> None:
        self._engine = engine
        self._name = ""
        self._stored = engine.careless.stored

    @property
    def is_served(self) -> bool:
        careless = self._engine.careless
        if careless.lazy or len(careless.groups) > 1:
            return careless.stored > self._stored
        return self._name in careless.loaded

    def ask(self) -> None:
        careless = self._engine.careless
        careless.arrives = False
        if not self.is_served and self._name not in careless.sequences:
            self._name = careless.arrive_with(self._engine._prompt(0))
        self._engine.act()

    def told(self) -> str:
        side = self._engine.side
        return f"{side.connection.problem or 'connected'}, movers {len(self._engine.movers)}"


def namespace_of(model: Model, groups: tuple[Group, ...]) -> NamespaceFields:
    return NamespaceFields(
        tenant=model.tenant,
        model=model.name,
        kv_dtype="bf16",
        hash_algorithm="sha256",
        hash_bytes=HASH_BYTES,
        groups=groups,
    )


def model_of(name: str, tenant: str, uid: int, groups: tuple[Group, ...]) -> Model:
    """What the simulation must know of such a namespace."""
    widths = tuple(group.blocks_per_block for group in groups)
    sizes = tuple(group.shard_bytes[0] for group in groups)
    unsaid: Any = None
    model = Model(name, tenant, uid, unsaid, widths, sizes, 1, (0,))
    return replace(model, fields=namespace_of(model, groups).to_proto())


def in_force(threads: Threads, links: Links, drawn: random.Random) -> AbstractContextManager[None]:
    """Within, what the client asks of time, threads and sockets is the simulation's."""
    time = threads.as_time()
    return replaced(
        [
            (connection, "threading", threads.as_threading()),
            (connection, "time", time),
            (connection, "SimpleQueue", lambda: Queue(threads)),
            (connection, "greeted", links.greeted),
            (backoff, "time", time),
            (backoff, "random", drawn),
            (worker_module, "threading", threads.as_threading()),
            (worker_module, "time", time),
            (worker_module, "SimpleQueue", lambda: Queue(threads)),
            (worker_module, "take_memory", take_memory),
            (worker_jobs, "time", time),
            (registrar, "threading", threads.as_threading()),
            (registrar, "time", time),
            (registrar, "os", links.descriptors.as_os()),
            (registrar, "select", links.descriptors.as_select()),
            (registrar, "greeted", links.greeted),
            (registrar, "Registration", links.registration),
            (registrar, "worker_pb2_grpc", SimpleNamespace(WorkerServiceStub=lambda made: made)),
        ]
    )
