"""A mover makes as many copies of a direction at once as its engine says; no time counts twice."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd.core.events import JobKind, TransferOutcome
from kvd.core.keys import JobId, MoverId, TransferId
from kvd.mover import frames
from kvd.mover.child import MoverLoop
from kvd.mover.copy_engine import CopyStopped, KeepGoing
from kvd.mover.frames import Finished, FrameKind, TransferOrder
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart, MoverConfig, Region
from kvd.processes.child import ChannelToControl
from kvd.processes.framing import FrameReader, frame, pack_number
from kvd.processes.mappings import ExtentFiles
from kvd_proto.board import BoardWriter, create_board
from kvd_proto.layout import LANE_MOVER
from kvd_proto.ring import RingReader, create_ring
from tests.contract.test_copy_engine_contract import part
from tests.fakes.copy_engine import FakeCopyEngine

BLOCKS = 16
BLOCK_BYTES = 64
PATIENCE_S = 20.0
LANDING_S = 0.01  # of what a copy has submitted, after its turn
COPY_S = 0.05  # of each, once all that shall run at once do

pytestmark = pytest.mark.filterwarnings("ignore:Exception in thread warm")  # see `warm_extent`


class MetEngine(FakeCopyEngine):
    """Its copies of a direction wait until so many of them run, and then take a while."""

    def __init__(self, config: MoverConfig, at_once: int) -> None:
        super().__init__(config)
        self.copies_at_once = at_once
        self.most = dict.fromkeys(JobKind, 0)
        self._running = dict.fromkeys(JobKind, 0)
        self._lock = threading.Lock()
        self._met = {kind: threading.Barrier(at_once) for kind in JobKind}

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        assert keep_going()
        with self._lock:
            self._running[kind] += 1
            self.most[kind] = max(self.most[kind], self._running[kind])
        self._met[kind].wait(PATIENCE_S)
        time.sleep(COPY_S)
        with self._lock:
            self._running[kind] -= 1
        return super().copy(kind, part, keep_going)

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        raise SystemExit  # ends the warming thread: elsewhere it lives as long as its process


class TurnsEngine(FakeCopyEngine):
    """Copies of a direction take turns: the first keeps its until it is told to go on."""

    copies_at_once = 2

    def __init__(self, config: MoverConfig) -> None:
        super().__init__(config)
        self.go_on = threading.Event()
        self.waiting = threading.Semaphore(0)  # released by each copy that wants the turn
        self.touched: list[int] = []  # the first block of each copy that went on
        self.is_busy = threading.Event()  # one did
        self._turn = threading.Lock()

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        self.waiting.release()
        with self._turn:
            if not keep_going():
                raise CopyStopped
            self.touched.append(int(part.engine_blocks[0, 0]))
            self.is_busy.set()
            assert self.go_on.wait(PATIENCE_S)
            copied = super().copy(kind, part, keep_going)
        time.sleep(LANDING_S)
        return copied

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        raise SystemExit  # as above


class Control:
    """The other end of a mover that runs in this process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reader = FrameReader(FrameKind)

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        self._end.sendall(frame(kind, body))

    def order(self, number: int, kind: JobKind, extent: int = 0, parts: int = 1) -> None:
        """Have block `number` copied, its worker's half included; several times, a part each."""
        moved = part(0, [(extent, number * BLOCK_BYTES)], [[number]])
        order = TransferOrder(TransferId(number), (JobId(number),), kind, (moved,) * parts)
        self.send(FrameKind.TRANSFER, frames.pack_transfer(order))
        self.send(FrameKind.READY, frames.pack_jobs([JobId(number)]))

    def ends(self, count: int, outcome: TransferOutcome = TransferOutcome.DONE) -> list[Finished]:
        """The next ends of transfers, all of which ended so."""
        found: list[Finished] = []
        while len(found) < count:
            for kind, body in self._reader.feed(self._end.recv(1 << 16)):
                if kind is FrameKind.FINISHED:
                    found.append(frames.unpack_finished(body))
        assert {end.outcome for end in found} == {outcome}
        return found


def config_of(directory: Path) -> MoverConfig:
    fragment = FragmentSpec(0, 0, BLOCK_BYTES, BLOCK_BYTES)
    return MoverConfig(
        MoverId(1),
        (Region(-1, 0, BLOCKS * BLOCK_BYTES),),
        (GroupMap(BLOCKS, 1, BLOCK_BYTES, (fragment,)),),
        ExtentFiles(directory, 0, BLOCKS * BLOCK_BYTES),
    )


@contextmanager
def mover(engine: FakeCopyEngine, config: MoverConfig) -> Iterator[Control]:
    """A mover's loop with that engine, with one row mapped."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    fds = (create_ring(), create_board(), os.eventfd(0, os.EFD_NONBLOCK))
    with ExitStack() as stack:
        for fd in fds:
            stack.callback(os.close, fd)
        stack.enter_context(ours)
        stack.enter_context(theirs)
        ends = (RingReader(fds[0]), BoardWriter(fds[1], LANE_MOVER))
        loop = MoverLoop(config, engine, ChannelToControl(theirs), *ends)
        loop.start()
        listening = threading.Thread(target=loop.run, args=(fds[2],))
        listening.start()
        control = Control(ours)
        try:
            control.send(FrameKind.MAP_ROW, frames.pack_row(0, 0))
            yield control
        finally:
            control.send(FrameKind.STOP)
            listening.join(PATIENCE_S)
            assert not listening.is_alive()


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_direction_has_as_many_copies_at_once_as_the_engine_says(
    tmp_path: Path, at_once: int
) -> None:
    config = config_of(tmp_path)
    engine = MetEngine(config, at_once)
    with mover(engine, config) as control:
        for number in range(2 * at_once):
            control.order(number, JobKind.STORE)
            control.order(number + BLOCKS // 2, JobKind.LOAD)
        control.ends(4 * at_once)  # copies that had not met would have failed
    assert engine.most == dict.fromkeys(JobKind, at_once)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("kind", list(JobKind), ids=lambda kind: kind.name.lower())
def test_times_of_one_direction_never_overlap(tmp_path: Path, kind: JobKind, at_once: int) -> None:
    config = config_of(tmp_path)
    with mover(MetEngine(config, at_once), config) as control:
        began = time.monotonic_ns()
        for number in range(4):
            control.order(number, kind)
        ends = control.ends(4)
        wall = time.monotonic_ns() - began
    counted = sum(end.duration_ns for end in ends)
    assert counted <= wall
    assert counted >= 4 // at_once * COPY_S * 1e9, "what they took is counted, though once"


@pytest.mark.parametrize("kind", list(JobKind), ids=lambda kind: kind.name.lower())
def test_a_copy_that_waits_for_its_turn_can_be_revoked(tmp_path: Path, kind: JobKind) -> None:
    """It has touched nothing: to end the mover for it would fail those that are under way."""
    config = config_of(tmp_path)
    engine = TurnsEngine(config)
    with mover(engine, config) as control:
        control.send(FrameKind.MAP_ROW, frames.pack_row(1, 1))  # which is not warmed any more
        for number in range(3):
            control.order(number, kind, extent=1)
        for _ in range(2):
            assert engine.waiting.acquire(timeout=PATIENCE_S)
        assert engine.is_busy.wait(PATIENCE_S)
        first = engine.touched[0]
        others = {0, 1, 2} - {first}
        for number in others:
            control.send(FrameKind.REVOKE, pack_number(number))
        ended = control.ends(2, TransferOutcome.REVOKED)
        assert {end.transfer for end in ended} == others
        control.send(FrameKind.REVOKE, pack_number(first))  # too late
        control.send(FrameKind.UNMAP_ROW, pack_number(1))
        engine.go_on.set()
        assert [end.transfer for end in control.ends(1)] == [first]
    assert engine.touched == [first]
    assert engine.opened == {0}, "a revoked copy still kept its row, or let go of it twice"


@pytest.mark.parametrize("kind", list(JobKind), ids=lambda kind: kind.name.lower())
def test_no_copy_comes_between_the_parts_of_one_that_was_ordered_before(
    tmp_path: Path, kind: JobKind
) -> None:
    """The first would end as late as the second, and the second no sooner."""
    config = config_of(tmp_path)
    engine = TurnsEngine(config)
    with mover(engine, config) as control:
        for number in range(5):
            control.order(number, kind, parts=3)
        engine.go_on.set()
        control.ends(5)
    assert engine.touched == [number for number in range(5) for _ in range(3)]
