"""One incarnation of the daemon: all of control but gRPC and the sockets, over the sim's movers."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvd.config.tenant_rule import TenantRule
from kvd.config.tiers import TierRule
from kvd.control.access.peers import (
    TOKEN_KEY,
    Credentials,
    Memory,
    Peer,
    Peers,
    Role,
    Send,
)
from kvd.control.access.tenants import TenantPolicy
from kvd.control.errors import OldEngineEnding
from kvd.control.namespaces import Namespaces
from kvd.control.registration.gpu_capacity import GpuCapacity, GpuTerms
from kvd.control.registration.rendezvous import Rendezvous
from kvd.control.services.events import EventServicer
from kvd.control.services.worker import WorkerServicer
from kvd.control.sessions.session import SessionContext, SessionTerms
from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.keys import MoverId
from kvd.core.machine import Machine, MachineConfig
from kvd.mover.process import MoverConfig, MoverSink, MoverStartError
from kvd.pool.config import PoolConfig
from kvd.pool.pool import Pool
from kvd.runtime.clock import AwakeClock
from kvd.runtime.driver import Driver
from kvd.runtime.tiers import terms_of
from kvd_proto.v1 import engine_pb2 as pb
from kvd_proto.v1 import worker_pb2
from tests.simulation.whole.bytes import RankBytes
from tests.simulation.whole.hazards import PowerCut
from tests.simulation.whole.movers import FIRST_PID, SimMover, Surroundings

START_S = 0.1  # of a mover


@dataclass(frozen=True)
class Settings:
    """Of one world's daemons; the same over all incarnations."""

    directory: Path
    extents: int
    extent_bytes: int
    policy: str
    threshold: int
    checksums: bool
    tenants: tuple[TenantRule, ...]
    tiers: tuple[TierRule, ...] = ()
    lease_share: float = 0.25


class Observer:
    """Counts what passes by."""

    def __init__(self) -> None:
        self.ended = 0

    def transfer_finished(self, *_said: object) -> None:
        pass

    def job_ended(self, _order: object) -> None:
        self.ended += 1

    def tags_spilled(self, count: int) -> None:
        pass


def _unheard(_message: object, _fds: object) -> None:
    """For a client whose descriptors are modelled whole."""


class SimPeer(Peer):
    """A companion connection whose descriptors are numbers alone."""

    def end(self) -> None:
        self.memories.clear()
        super().end()


class Call:
    """A gRPC call: who makes it, and whether the caller still waits."""

    def __init__(self, peer: Peer, write: Callable[[Any], None] | None = None) -> None:
        self._peer = peer
        self._write = write
        self.is_lost = False

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, self._peer.token),)

    def cancelled(self) -> bool:
        return self.is_lost

    async def send_initial_metadata(self, _entries: object) -> None:
        pass

    async def write(self, message: Any) -> None:
        if self._write is not None and not self.is_lost:
            self._write(message)


class Stream:
    """A session's stream as the network has it: in order, and cut at any moment."""

    def __init__(self, daemon: SimDaemon, peer: Peer, receive: Callable[[Any], None]) -> None:
        self._daemon = daemon
        self._receive = receive
        self._arrived: deque[pb.SessionRequest] = deque()
        self._news = asyncio.Event()
        self._last = [0.0, 0.0]  # when the last message arrived there, and here
        self.is_cut = False
        self._reads = False  # has handled all that arrived
        self.error: Exception | None = None
        self.call = Call(peer, self._written)
        self._task = daemon.loop.create_task(self._serve(peer))

    async def _serve(self, peer: Peer) -> None:
        try:
            await self._daemon.common.serve(self._requests(), self.call, peer)  # type: ignore[arg-type]
        except (KvdError, AssertionError) as error:
            self.error = error
            self._daemon.check_refusal(error)
        finally:
            if not self._daemon.is_gone:
                self._daemon.loop.outside(0, self._cut_here)

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while True:
            while self._arrived:
                yield self._arrived.popleft()
            if self.is_cut:
                return
            self._news.clear()
            self._reads = True
            await self._news.wait()
            self._reads = False

    @property
    def is_idle(self) -> bool:
        """Whether all that was sent has been handled."""
        return self._reads and not self._arrived and self._last[0] <= self._daemon.loop.now

    def _delay(self, way: int) -> float:
        """No message overtakes another one."""
        loop, random = self._daemon.loop, self._daemon.around.random
        when = max(self._last[way], loop.now + random.random() * 0.001)
        self._last[way] = when
        return when - loop.now

    def send(self, message: pb.SessionRequest) -> None:
        self._daemon.loop.outside(self._delay(0), self._arrive, message)

    def _arrive(self, message: pb.SessionRequest) -> None:
        if not self.is_cut and not self._daemon.is_gone:
            self._arrived.append(message)
            self._news.set()

    def _written(self, message: Any) -> None:
        self._daemon.loop.outside(self._delay(1), self._read, message)

    def _read(self, message: Any) -> None:
        if not self.is_cut:
            self._receive(message)

    def _cut_here(self) -> None:
        self.is_cut = True

    def cut(self) -> None:
        """The connection breaks; either side notices by itself."""
        self.is_cut = True
        self.call.is_lost = True
        if not self._daemon.is_gone:
            self._news.set()


@dataclass
class SimDaemon:
    """Made by `start`. When it `is_gone` nothing of it runs any more."""

    settings: Settings
    around: Surroundings
    machine_class: type[Machine]
    broken: Callable[[BaseException], None]
    launched: Callable[[SimMover], None]
    pids: itertools.count[int]
    is_gone: bool = False
    is_serving: bool = False
    movers: dict[MoverId, SimMover] = field(default_factory=dict)
    has_pool: bool = False
    when_gone: list[Callable[[], None]] = field(default_factory=list)  # told of its end

    def start(self) -> None:
        """Open the pool and rebuild the machine from it."""
        settings = self.settings
        self.loop = self.around.loop
        self.jumps = self.loop.jumps
        config = PoolConfig(
            directory=settings.directory,
            pool_bytes=settings.extent_bytes * settings.extents,
            extent_bytes=settings.extent_bytes,
            payload_checksums=settings.checksums,
        )
        self.pool = Pool.open(config, lambda _done, _all: None)
        self.has_pool = True
        self.machine = self.machine_class(
            MachineConfig(
                extents=self.pool.extents,
                extent_bytes=self.pool.extent_bytes,
                policy=settings.policy,
                store_threshold=settings.threshold,
                spare_bytes=settings.extent_bytes,
                tag_secret=self.pool.tag_secret,
                lease_share=settings.lease_share,
                tiers=terms_of(settings.tiers, settings.extents * settings.extent_bytes),
            )
        )
        self.observer = Observer()
        self.driver = Driver(
            self.machine,
            self.pool,
            self.observer,
            clock=AwakeClock(),
            launch=self._launch,
            tiers=settings.tiers,
        )
        self.driver.on_broken_invariant = lambda _event, error, _story: self.broken(error)
        list(self.driver.recover())
        for rule in settings.tenants:
            self.driver.call(
                ev.QuotaSet(self.driver.long_work.next_token(), rule.tenant, rule.quota_bytes)
            )
        engines = Rendezvous(self.driver)
        self.driver.fleet.on_mover_gone = engines.mover_gone
        self.tenants = TenantPolicy(settings.tenants)
        self.common = SessionContext(
            self.driver, engines, self.tenants, SessionTerms(2000, settings.threshold)
        )
        self.peers = Peers()
        self.namespaces = Namespaces(self.driver, self.tenants)
        self.events = EventServicer(self.driver, self.namespaces, self.peers)
        gpus = GpuCapacity(GpuTerms())
        self.workers = WorkerServicer(self.common, self.peers, gpus)
        self.loop.create_task(self.driver.run()).add_done_callback(self._ended)
        self.is_serving = True

    def _ended(self, driving: asyncio.Task[None]) -> None:
        """The driver goes on as long as its daemon."""
        error = None if driving.cancelled() else driving.exception()
        self.broken(error or AssertionError("the driver ended"))

    async def _launch(self, config: MoverConfig, sink: MoverSink) -> Any:
        random = self.around.random
        memory = self.around.memories[config.regions[0].fd]
        mover = SimMover(config, sink, memory, self.around, FIRST_PID + next(self.pids))
        try:
            sink.process_started(config.mover, mover.pid, 1)
        except OSError as error:
            raise MoverStartError(str(error)) from error
        await asyncio.sleep(random.random() * START_S)
        if random.random() < self.around.temper.no_start:
            sink.process_ended(config.mover, mover.pid)
            raise MoverStartError("it ended before it said hello")
        self.movers[config.mover] = mover
        self.launched(mover)
        return mover

    # -- who comes --------------------------------------------------------------------------

    def greet(self, uid: int, role: Role, name: str, send: Send = _unheard) -> SimPeer:
        """A client has said hello on the companion socket; `send` is how it is spoken to there."""
        peer = SimPeer(Credentials(uid, uid, 0, None), role, name, send)
        self.peers.add(peer)
        return peer

    def register(
        self,
        peer: SimPeer,
        request: worker_pb2.RegisterRankRequest,
        memory: tuple[int, RankBytes],
        then: Callable[[SimMover | None], None],
    ) -> Call:
        """A worker's RegisterRank; `then` hears what came of it, unless the call was lost."""
        token, held = memory
        self.around.memories[token] = held
        peer.memories[1] = Memory(token, 1 << 40)
        call = Call(peer)
        task = self.loop.create_task(self.workers.RegisterRank(request, call))  # type: ignore[arg-type]
        task.add_done_callback(partial(self._registered, call, then))
        return call

    def _registered(
        self, call: Call, then: Callable[[SimMover | None], None], task: asyncio.Task[Any]
    ) -> None:
        mover = None
        if not task.cancelled():
            error = task.exception()
            if error is None:
                mover = self.movers[MoverId(task.result().registration_id)]
            else:
                self.check_refusal(error)
        if not call.is_lost:
            self.loop.outside(0.001, then, mover)

    def check_refusal(self, error: BaseException) -> None:
        """An assertion ends the daemon; and nobody waits in vain for movers that are killed."""
        if isinstance(error, OldEngineEnding) and self.jumps == self.loop.jumps:
            error = AssertionError("movers of an earlier start are said to run still")
        if not isinstance(error, KvdError):
            self.broken(error)

    # -- its end ----------------------------------------------------------------------------

    def kill(self) -> None:
        """As kill -9 does it: the movers go along, and the files stay as they are."""
        self.is_gone = True
        for mover in self.movers.values():
            mover.is_alive = mover.is_heard = False
        for told in self.when_gone:
            self.loop.outside(0.0, told)
        self.around.news()
        self.loop.forget_daemon()
        if not self.has_pool:
            return
        pool = self.pool
        pages = [*pool._pages.values(), *filter(None, [pool._spare_page])]
        held_still: list[Any] = [*pages, pool._resources]
        for held in held_still:
            with suppress(PowerCut):
                held.close()
