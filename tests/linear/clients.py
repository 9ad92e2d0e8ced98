"""Real clients in processes of their own, whose calls are written down with their times."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvd_proto.v1 import events_pb2
from tests.client.content import HASH_BYTES, block_hashes
from tests.control.daemon_rig import Caller
from tests.faults.probe import Probe, ProbeFailed
from tests.faults.scene import Scene
from tests.linear.checker import Call, Kind

HIT, MISS = 1, 0
PROMPTS = 6
MOST = 12  # blocks of a prompt
PATIENCE_S = 90.0

Block = tuple[str, bytes]  # epoch and key


@dataclass(slots=True)
class History:
    """What happened. Any thread adds to it."""

    calls: list[tuple[Block, Call]] = field(default_factory=list)
    clears: list[Call] = field(default_factory=list)  # of every block of every epoch
    wrong: list[str] = field(default_factory=list)

    def whole(self) -> list[tuple[Block, Call]]:
        """Every call on each block."""
        blocks = {block for block, _ in self.calls}
        return self.calls + [(block, clear) for block in blocks for clear in self.clears]

    def add(self, epoch: str, key: bytes, call: Call) -> None:
        self.calls.append(((epoch, key), call))


class Client(threading.Thread):
    """Gives one engine random orders, one after the other."""

    def __init__(self, probe: Probe, history: History, orders: int, *, resets: bool) -> None:
        super().__init__(name=probe.engine_id)
        self._probe, self._history = probe, history
        self._dice, self.orders = random.Random(probe.engine_id), orders
        self._resets = resets
        self._clears: Scene | None = None
        self.epoch = str(probe.ask("status")["epoch"])
        self.begun = 0  # orders
        self.trouble: BaseException | None = None

    def clear_by(self, scene: Scene) -> None:
        """It clears everything now and then, too."""
        self._clears = scene

    def run(self) -> None:
        try:
            for _ in range(self.orders):
                self.begun += 1
                self._one()
        except BaseException as error:  # noqa: BLE001 - the test's thread tells it
            self.trouble = error

    def _one(self) -> None:
        prompt = f"prompt {self._dice.randrange(PROMPTS)}"
        count = self._dice.randint(1, MOST)
        drawn = self._dice.random()
        if self._resets and drawn < 0.05:
            self._reset()
        elif self._clears is not None and drawn < 0.05:
            self._clear()
        elif drawn < 0.4:
            self.store(prompt, count)
        elif drawn < 0.8:
            self._look_up(prompt, count)
        else:
            self._load(prompt, count)

    def store(self, prompt: str, count: int) -> None:
        begin = time.monotonic()
        self._probe.ask("store", prefix=prompt, count=count)
        end = time.monotonic()
        told = {bytes.fromhex(key) for key in self._probe.ask("take_stored")}
        for key in block_hashes(prompt, count):
            if key in told:
                call = Call(Kind.STORED, begin, end, self.name)
            else:  # it was there, or in flight, or refused: nobody said
                call = Call(Kind.MAYBE_STORED, begin, end, self.name)
            self._history.add(self.epoch, key, call)

    def _look_up(self, prompt: str, count: int) -> None:
        begin = time.monotonic()
        said = self._probe.ask("probe", prefix=prompt, count=count)
        end = time.monotonic()
        kinds = {HIT: Kind.FOUND, MISS: Kind.MISSED}
        for key, status in zip(block_hashes(prompt, count), said.get("statuses", ()), strict=False):
            if status & 3 in kinds:
                call = Call(kinds[status & 3], begin, end, self.name)
                self._history.add(self.epoch, key, call)

    def _load(self, prompt: str, count: int) -> None:
        begin = time.monotonic()
        said = self._probe.ask("load", prefix=prompt, count=count)
        end = time.monotonic()
        if said["wrong"]:
            self._history.wrong.append(f"{self.name}: {prompt} {said}")
        for key in block_hashes(prompt, said["loaded"]):
            self._history.add(self.epoch, key, Call(Kind.FOUND, begin, end, self.name))

    def _clear(self) -> None:
        assert self._clears is not None
        begin = time.monotonic()
        self._clears.forget_caller()  # it may know a daemon that has died since
        try:
            self._clears.clear()
        except (grpc.RpcError, OSError):  # the daemon has died, and may end it when it is back
            call = Call(Kind.MAYBE_CLEARED, begin, math.inf, self.name)
        else:
            call = Call(Kind.CLEARED, begin, time.monotonic(), self.name)
        self._history.clears.append(call)

    def _reset(self) -> None:
        """From now on it finds nothing that it has not stored since."""
        self.epoch = str(self._probe.ask("reset")["epoch"])


def run_all(clients: Sequence[Client], *beside: threading.Thread) -> None:
    """Returns once all have ended. Raises what one of the clients met."""
    for thread in (*clients, *beside):
        thread.start()
    for thread in (*clients, *beside):
        thread.join()
    for client in clients:
        if client.trouble is not None:
            raise client.trouble


class Survivor(Client):
    """One whose daemon dies now and then: it begins each order with one that serves it."""

    def _one(self) -> None:
        # The oftener a daemon has died, the longer a client waits before it tries again.
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._probe.wait_usable()
                break
            except ProbeFailed:
                if time.monotonic() > deadline:
                    raise
        super()._one()


class Killer(threading.Thread):
    """Kills the daemon (-9) and starts it again, at random moments within the clients' orders.

    Deaths lie evenly among the orders, so as many are before each on a fast machine as on a slow.
    """

    def __init__(self, scene: Scene, clients: Sequence[Client], deaths: int) -> None:
        super().__init__()
        self._daemon, self._clients, self._deaths = scene.daemon, clients, deaths
        self._dice = random.Random(11)
        self.died_at: list[float] = []

    def run(self) -> None:
        orders = sum(client.orders for client in self._clients)
        for death in range(1, self._deaths + 1):
            self._wait_for(orders * death // (self._deaths + 1))
            time.sleep(self._dice.uniform(0, 0.05))  # within one
            self._daemon.kill()
            self.died_at.append(time.monotonic())
            self._daemon.start()

    def _wait_for(self, orders: int) -> None:
        while sum(client.begun for client in self._clients) < orders:
            if not any(client.is_alive() for client in self._clients):
                return  # they have failed, and say why
            time.sleep(0.001)


class Watcher(threading.Thread):
    """Hears what is announced as removed."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._caller = Caller(scene.daemon.socket)
        self._stream = self._caller.events.WatchEvents(
            events_pb2.WatchEventsRequest(), metadata=self._caller.metadata
        )
        self.removed: list[tuple[str, bytes, float]] = []
        self.sequence = 0

    def run(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in self._stream:
                now = time.monotonic()
                for event in message.events:
                    self._take(event, now)
                self.sequence = message.sequence

    def _take(self, event: Any, now: float) -> None:
        if event.kind == events_pb2.CacheEvent.KIND_REMOVED:
            keys = [
                event.hashes[at : at + HASH_BYTES] for at in range(0, len(event.hashes), HASH_BYTES)
            ]
            self.removed += [(event.epoch, key, now) for key in keys]

    def close(self) -> None:
        self._stream.cancel()
        self.join()
        self._caller.close()
