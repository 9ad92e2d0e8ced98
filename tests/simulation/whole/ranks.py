"""What every simulated engine has: a name, a model, and ranks that come to the daemon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvd.control.access.peers import Role
from kvd.core.keys import SessionId
from kvd_client.worker.memory import Fragment, GroupLayout, SharedMemory
from kvd_proto.v1 import engine_pb2 as pb
from kvd_proto.v1 import worker_pb2
from tests.simulation.whole import worker_life
from tests.simulation.whole.bytes import Meanings, RankBytes
from tests.simulation.whole.daemon import Call, SimDaemon, SimPeer, Stream
from tests.simulation.whole.drawn import BLOCKS, Found, Model, hash_of
from tests.simulation.whole.loop import SimLoop
from tests.simulation.whole.movers import SimMover


class Wish(ABC):
    """What one engine wants once faults have stopped: a block of its own stored, and loaded."""

    @property
    @abstractmethod
    def is_served(self) -> bool:
        """Whether it has had it all."""

    @abstractmethod
    def ask(self) -> None:
        """Go on, in the engine's turn."""

    @abstractmethod
    def told(self) -> str:
        """For whoever asks why it is not served."""


@dataclass(eq=False)
class Engine(ABC):
    """One engine: a scheduler and its ranks. Their memory is modelled, and so are their movers."""

    name: str
    model: Model
    loop: SimLoop
    random: Random
    meanings: Meanings
    journal: Callable[[str], None]

    blocks = BLOCKS  # of its memory, in each group
    has_mortal_ranks = True  # one may die alone, and come back

    def __post_init__(self) -> None:
        self.daemon: SimDaemon | None = None
        self.scheduler: SimPeer | None = None
        self.epoch = ""
        self.found: list[Found] = []  # what a lease promises
        self.is_plain = False  # it does all that an engine should
        self.starts = self.loads_done = 0
        self.start()

    # -- its life -----------------------------------------------------------------------------

    def start(self) -> None:
        """The processes begin: new memory, nothing known."""
        self.starts += 1
        self.memory = [self.new_memory() for _ in self.model.ranks]
        self.workers: list[SimPeer | None] = [None] * len(self.model.ranks)
        self.movers: dict[int, SimMover] = {}
        self.registering: dict[int, Call] = {}
        self.away: dict[int, float] = {}  # when these ranks come again

    def new_memory(self) -> RankBytes:
        return RankBytes(len(self.model.widths), self.blocks)

    @property
    def identity(self) -> pb.EngineIdentity:
        return pb.EngineIdentity(engine_id=self.name, boot_nonce=self.boot_nonce)

    @property
    def boot_nonce(self) -> bytes:
        return self.starts.to_bytes(16, "little")

    @property
    @abstractmethod
    def session(self) -> SessionId | None:
        """The one that it has; None: none that it knows of."""

    @property
    @abstractmethod
    def stream(self) -> Stream | None:
        """Its session's; None: it has none."""

    @property
    @abstractmethod
    def has_session(self) -> bool:
        """Whether it has one that takes work, as far as it knows."""

    @property
    def usable(self) -> bool:
        """Whether it has a session with all ranks."""
        return (
            self.has_session
            and len(self.movers) == len(self.model.ranks)
            and self.daemon is not None
            and not self.daemon.is_gone
        )

    def connect(self, daemon: SimDaemon) -> None:
        """Come to a daemon, as far as it is not there: session, then ranks, in any order."""
        if self.daemon is not daemon:
            self.lose_daemon()
            self.daemon = daemon
        self.open_session()
        for rank in range(len(self.model.ranks)):
            here = rank in self.movers or rank in self.registering
            if not here and self.loop.now >= self.away.get(rank, 0.0):
                self.register(rank)

    @abstractmethod
    def open_session(self) -> None:
        """Ask for one, unless that is under way or done."""

    def die(self) -> None:
        """All its processes end; whatever wrote to its memory from now on would be a fault."""
        for memory in self.memory:
            worker_life.withdraw_soon(self, memory)
        daemon = self.daemon
        for call in self.registering.values():
            call.is_lost = True
        if self.stream is not None:
            self.stream.cut()
        peers = [self.scheduler, *self.workers]
        self.forget_session()
        self.start()
        if daemon is not None and not daemon.is_gone:
            # The memory of a dead process stays as long as a mover maps it: nobody reads it.
            for peer in peers:
                if peer is not None:
                    peer.end()

    @abstractmethod
    def forget_session(self) -> None:
        """Stream and scheduler are no more."""

    def lose_daemon(self) -> None:
        """The daemon is gone with its movers: every open job has failed."""
        self.workers = [None] * len(self.workers)
        self.movers.clear()
        self.registering.clear()

    @abstractmethod
    def lose_stream(self) -> None:
        """Only the connection breaks; it comes back."""

    # -- its ranks ----------------------------------------------------------------------------

    def layouts(self) -> list[GroupLayout]:
        """Where each group lies in a rank's memory: one after the other."""
        layouts, base = [], 0
        for width, size in zip(self.model.widths, self.model.block_bytes, strict=True):
            fragment = Fragment(memory=0, base=base, stride=size, bytes=size)
            layouts.append(GroupLayout(self.blocks, [fragment], width))
            base += size * self.blocks
        return layouts

    def shared_memory(self, rank: int) -> SharedMemory:
        """A rank's memory; its descriptor is a number that no other start of any engine has."""
        token = self.starts * 1_000_003 + hash_of(self.name) * 64 + rank
        return SharedMemory(token, 0, self.blocks * sum(self.model.block_bytes))

    def register(self, rank: int) -> None:
        """Have it come to the daemon."""
        assert self.daemon is not None
        peer = self.workers[rank]
        if peer is None or peer.ended:
            peer = self.workers[rank] = self.daemon.greet(self.model.uid, Role.WORKER, "sim")
        memory = self.memory[rank]
        shard = self.model.ranks[rank]
        groups = [layout.to_proto(group) for group, layout in enumerate(self.layouts())]
        request = worker_pb2.RegisterRankRequest(
            identity=self.identity,
            rank=rank,
            world_size=len(self.model.ranks),
            shard=shard,
            writer=self.model.ranks.index(shard) == rank,
            memories=[self.shared_memory(rank).to_proto(1)],
            groups=groups,
        )
        token = self.shared_memory(rank).fd
        self.registering[rank] = self.daemon.register(
            peer, request, (token, memory), lambda mover: self._registered(rank, memory, mover)
        )

    def _registered(self, rank: int, memory: RankBytes, mover: SimMover | None) -> None:
        if memory is not self.memory[rank]:
            return  # of an earlier start
        self.registering.pop(rank, None)
        if mover is not None and mover.is_alive:
            self.movers[rank] = mover
            self.rank_is_here(rank, mover)

    @abstractmethod
    def rank_is_here(self, rank: int, mover: SimMover) -> None:
        """It has a mover."""

    @abstractmethod
    def rank_has_failed(self, rank: int) -> None:
        """It has begun anew, with other memory: what it had to do has failed."""

    # -- what it does -------------------------------------------------------------------------

    @abstractmethod
    def look(self) -> None:
        """Read the boards; bury the movers that have ended."""

    @abstractmethod
    def act(self) -> None:
        """One step."""

    @abstractmethod
    def store(self) -> None:
        """Begin to store something, if it can."""

    @abstractmethod
    def session_epoch(self, epoch: str) -> None:
        """Its cache is reset: from now on it is in an epoch of its own."""

    @abstractmethod
    def press(self) -> None:
        """Store on and on, so that the others have to be served beside it."""

    @abstractmethod
    def wish(self) -> Wish:
        """To be served, once faults have stopped."""

    @abstractmethod
    def leave(self) -> None:
        """End what it has begun; then it may die."""
