"""Watchers of the cache's events: all that one was told makes what it may see, at any moment.

They lose their streams, and messages on the way with them; take their time; come back where they
were; watch all that they may see or one namespace; and a reload gives and takes their rights.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from kvd.control import convert
from kvd.control.access.peers import Role
from kvd.core.errors import KvdError, UnknownNamespace
from kvd.core.keys import NamespaceId
from kvd.runtime import event_log
from kvd_proto.v1 import events_pb2 as pb
from tests.simulation.whole.daemon import Call, SimDaemon, SimPeer
from tests.simulation.whole.loop import BUSY_S

if TYPE_CHECKING:
    from tests.simulation.whole.world import World

READER = 301  # a user of no engine: it may see what reloads say
# Of one tenant, of the other, of what reloads say, and an operator.
USERS = (101, 201, READER, READER, READER, os.getuid())
SLOWEST_S = 12.0  # more than the daemon waits for
TOLD_S = 1.0  # within which all is told to who takes it, once nothing changes any more
DISTURBED = 0.5  # of the messages of a snapshot
COMPARED = 0.2  # of the messages behind a snapshot that bring a watcher up to date

Name = tuple[int, str, str, int, bytes]


class View:
    """The blocks of host memory that messages name. What tiers hold is a hint."""

    def __init__(self) -> None:
        self.blocks: set[Name] = set()
        self.place: tuple[bytes, int] | None = None  # where to go on
        self.in_snapshot = False

    def copy(self) -> View:
        other = View()
        other.blocks = set(self.blocks)
        other.place, other.in_snapshot = self.place, self.in_snapshot
        return other

    def apply(self, message: pb.WatchEventsResponse) -> None:
        """As the protocol says it."""
        if message.snapshot and not self.in_snapshot:
            self.blocks = set()
            self.place, self.in_snapshot = None, True
        assert message.snapshot == self.in_snapshot, "a snapshot without an end"
        for event in message.events:
            self._apply(event)
        if message.snapshot_end:
            self.in_snapshot = False
        if not self.in_snapshot:
            name = message.incarnation, message.sequence
            is_on = self.place is None or (name[0] == self.place[0] and name[1] >= self.place[1])
            assert is_on, f"sequence {self.place} is followed by {name}"
            self.place = name

    def _apply(self, event: pb.CacheEvent) -> None:
        if event.kind == pb.CacheEvent.KIND_CLEARED:
            self.blocks = {name for name in self.blocks if name[0] != event.namespace_id}
        elif not event.tier:
            width = event.hash_bytes
            scope = (event.namespace_id, event.epoch, event.account, event.group)
            hashes = [event.hashes[at : at + width] for at in range(0, len(event.hashes), width)]
            names = {(*scope, each) for each in hashes}
            if event.kind == pb.CacheEvent.KIND_STORED:
                self.blocks |= names
            else:
                self.blocks -= names


class WatchCall(Call):
    """A call of WatchEvents whose caller takes what is written as fast as it likes."""

    def __init__(self, peer: SimPeer, watcher: Watcher) -> None:
        super().__init__(peer)
        self._watcher = watcher
        self._was_late = False

    async def write(self, message: Any) -> None:
        watcher = self._watcher
        if watcher.pause_s:
            self._was_late = True  # and more of the same delivery may follow
            await asyncio.sleep(watcher.pause_s)
        if not self.is_lost:
            watcher.written(message, is_of_now=not self._was_late)


class Watcher:
    """Somebody with a stream of events, or without one for now."""

    def __init__(self, world: World, number: int) -> None:
        random = world.random
        self.name = f"watcher{number}"
        self.uid = random.choice(USERS)
        self.with_tiers = random.random() < 0.5
        self._world = world
        self._namespace = 0  # 0: all that it may see
        self._view = View()  # of what has arrived
        self._told = View()  # with what is on its way
        self._on_its_way: deque[pb.WatchEventsResponse] = deque()
        self._arrives = 0.0  # when the last message does
        self.pause_s = 0.0  # before it takes the next message
        self._daemon: SimDaemon | None = None
        self._peer: SimPeer
        self._call: WatchCall
        self._task: asyncio.Task[Any]

    def act(self) -> None:
        """Come, go, or take another pace."""
        random = self._world.random
        if self._daemon is not self._world.daemon:
            self._connect()
        elif random.random() < 0.5:
            self._world.note(f"{self.name} leaves")
            self._leave(by_call=random.random() < 0.5)
            if self.uid == READER and random.random() < 0.5:
                rights_change(self._world)
        else:
            self.pause_s = random.choice([0.0, 0.0, 0.001, 0.05, SLOWEST_S])

    def _connect(self) -> None:
        world, random = self._world, self._world.random
        daemon = world.daemon
        peer = daemon.greet(self.uid, Role.TOOL, self.name)
        is_there = self._namespace == 0 or daemon.machine.knows(NamespaceId(self._namespace))
        if random.random() < 0.2 or not is_there:
            self._namespace, self._view = 0, View()
            seen = daemon.namespaces.visible(peer)
            if seen and random.random() < 0.5:
                self._namespace = random.choice(seen)
        incarnation, sequence = self._view.place or (b"", 0)
        request = pb.WatchEventsRequest(
            incarnation=incarnation,
            after_sequence=sequence,
            namespace_id=self._namespace,
            with_tiers=self.with_tiers,
        )
        world.note(f"{self.name} of {self.uid} watches {self._namespace} from {sequence}")
        self._view.in_snapshot = False  # of the call before
        self._told = self._view.copy()
        self._daemon, self._peer, self._call = daemon, peer, WatchCall(peer, self)
        call: Any = self._call
        self._task = daemon.loop.create_task(daemon.events.WatchEvents(request, call))
        self._task.add_done_callback(partial(self._ended, self._call))

    def _ended(self, call: WatchCall, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if call is self._call:
            self._daemon = None
            if isinstance(error, UnknownNamespace):  # none that it may see any more
                self._namespace, self._view = 0, View()
        if error is not None and not isinstance(error, KvdError):
            self._world.broken(error)

    def _leave(self, *, by_call: bool) -> None:
        """What has not arrived is lost."""
        self.lose_daemon()
        if by_call:
            self._task.cancel()
        self._peer.end()

    def lose_daemon(self) -> None:
        """Its process, or the way to it."""
        self._on_its_way.clear()
        if self._daemon is not None:
            self._call.is_lost = True
            self._daemon = None

    def written(self, message: pb.WatchEventsResponse, *, is_of_now: bool) -> None:
        """The daemon has sent it."""
        self._told.apply(message)
        if is_of_now:
            self._check_rights(message)
        if message.snapshot and self.uid == READER:
            self._be_disturbed(is_end=message.snapshot_end)
        is_new = message.sequence == self._world.daemon.driver.event_log.sequence
        is_whole = not self._told.in_snapshot
        is_looked_at = message.snapshot or self._world.random.random() < COMPARED
        if is_new and is_whole and is_looked_at:
            self.compare(self._told)
        loop = self._world.loop
        self._on_its_way.append(message)
        self._arrives = max(self._arrives, loop.now + self._world.random.random() * 0.001)
        loop.outside(self._arrives - loop.now, self._arrive, message)

    def _be_disturbed(self, *, is_end: bool) -> None:
        """Reloads come amid its snapshot, or its stream breaks at the snapshot's end."""
        world = self._world
        if world.random.random() >= DISTURBED or world.step >= world.steps:
            return
        befalls = world.random.choice([partial(rights_change, world), partial(_lapse, world)])
        world.loop.outside(BUSY_S, self._lose_stream if is_end else befalls)

    def _lose_stream(self) -> None:
        if self._daemon is self._world.daemon:
            self._leave(by_call=True)

    def _arrive(self, message: pb.WatchEventsResponse) -> None:
        if self._on_its_way and self._on_its_way[0] is message:
            self._view.apply(self._on_its_way.popleft())

    # -- what must be so ----------------------------------------------------------------------

    def _check_rights(self, message: pb.WatchEventsResponse) -> None:
        """Nobody is told of what is none of theirs, from a reload on."""
        daemon = self._world.daemon
        for event in message.events:
            if event.kind == pb.CacheEvent.KIND_TIER_LOST:
                continue
            tenant = daemon.machine.tenant_of(NamespaceId(event.namespace_id))
            is_theirs = tenant is None or daemon.tenants.may_see(self._peer, tenant)
            assert is_theirs, f"{self.name} of {self.uid} is told of {tenant}'s blocks"
            is_wanted = self._namespace in (0, event.namespace_id)
            assert is_wanted, f"{self.name} is told of another namespace"
            assert self.with_tiers or not event.tier, f"{self.name} is told of a tier"

    def compare(self, view: View) -> None:
        """It was told of every block that it may see and of no other."""
        world, daemon = self._world, self._world.daemon
        machine, policy = daemon.machine, daemon.tenants
        seen = {
            number
            for number in machine.namespaces()
            if self._namespace in (0, number)
            and policy.may_see(self._peer, machine.tenant_of(number))
        }
        told = {name for name in view.blocks if name[0] in seen}
        there = {name for name in world.ledger.announced if name[0] in seen}
        assert told == there, (
            f"{self.name} misses {len(there - told)} blocks and has {len(told - there)} too many"
        )

    def settle(self) -> None:
        """It is there and takes all that it is told, from now on."""
        if self.pause_s:
            self._lose_stream()
        self.pause_s = 0.0
        if self._daemon is not self._world.daemon:
            self._connect()

    def check_rest(self) -> None:
        """TOLD_S after it came, while nothing changed any more."""
        assert self._daemon is self._world.daemon, f"{self.name} lost its stream: {self._task}"
        assert not self._view.in_snapshot, "a snapshot has no end"
        self.compare(self._view)


def rights_change(world: World) -> None:
    """A reload says what the reader may see."""
    _reload(world.daemon, [world.random.random() < 0.5 for _ in world.daemon.tenants.rules])


def _lapse(world: World) -> None:
    """A reload takes all from the reader, and the next one gives it back."""
    daemon = world.daemon
    before = [READER in rule.uids for rule in daemon.tenants.rules]
    _reload(daemon, [False] * len(before))
    daemon.loop.outside(world.random.random() * BUSY_S, _reload, daemon, before)


def _reload(daemon: SimDaemon, may_see: list[bool]) -> None:
    if daemon.is_gone:
        return
    rules = [
        replace(rule, uids=rule.uids - {READER} | ({READER} if may else set()))
        for rule, may in zip(daemon.tenants.rules, may_see, strict=True)
    ]
    daemon.tenants.replace(rules, (), root=True)
    daemon.driver.event_log.rights_changed()


def drawn(random: Random) -> list[tuple[Any, str, Any]]:
    """Bounds of the log, so small that watchers fall behind."""
    kept = random.choice([event_log.KEPT_CHANGES, 40, 8])
    return [
        (event_log, "KEPT_CHANGES", kept),
        (event_log, "KEPT_BLOCKS", random.choice([event_log.KEPT_BLOCKS, 60])),
        (event_log, "DELIVERY_CHANGES", random.choice([event_log.DELIVERY_CHANGES, 1, 3])),
        (convert, "EVENT_KEYS", random.choice([convert.EVENT_KEYS, 1, 2])),
    ]
