"""A worker whose mover and registrar the test plays, with a real ring and board."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from kvd_client import EngineIdentity, Worker
from kvd_client.worker.registration import Registration
from kvd_proto import layout
from kvd_proto.board import BoardRecord, BoardWriter, create_board
from kvd_proto.ring import RingReader, create_ring

STORE, LOAD = 1, 2
DONE, FAILED, REFUSED = 1, 2, 3


class MoverStandIn:
    """The far end of ring and board; the process only lives and dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"])
        fds = (create_ring(), create_board(), os.eventfd(0), os.pidfd_open(self._process.pid))
        self.ring = RingReader(fds[0])
        self._lanes = [BoardWriter(fds[1], lane) for lane in range(layout.BOARD_LANES)]
        self.registration = Registration(1, fds)

    def post(self, job_id: int, kind: int, status: int = DONE, lane: int = 0) -> None:
        self._lanes[lane].post(BoardRecord(job_id, kind, status, 4096, 1000))

    def die(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.die()
        self.ring.close()
        for lane in self._lanes:
            lane.close()


class FixedRegistrar:
    """A registrar whose registration the test decides."""

    def __init__(self, registration: Registration | None) -> None:
        self.current = registration
        self.lost: list[Registration] = []
        self.by_call: list[int] = []

    def awaited(self, timeout_s: float) -> Registration | None:
        return self.current

    def lose(self) -> None:
        assert self.current is not None
        self.lost.append(self.current)
        self.current = None

    def end_mover(self, timeout_s: float) -> bool:
        """As the real one, whose thread moves the registration to the lost ones."""
        registration = self.current
        assert registration is not None
        self.lose()
        return registration.end(0.0)  # a daemon that hangs: by force

    def mark_ready_by_call(self, registration: Registration, job_ids: Sequence[int]) -> None:
        self.by_call += job_ids


class Bench:
    """A worker with its stand-ins."""

    def __init__(
        self,
        mover: MoverStandIn | None,
        writer: bool = True,
        flush_timeout_s: float = 1.0,
        load_flush_timeout_s: float = 5.0,
        load_deadline_s: float = 10.0,
    ) -> None:
        self.worker = Worker(
            "/nowhere",
            EngineIdentity("e", bytes(16)),
            writer=writer,
            flush_timeout_s=flush_timeout_s,
            load_flush_timeout_s=load_flush_timeout_s,
            load_deadline_s=load_deadline_s,
        )
        self.registrar = FixedRegistrar(None if mover is None else mover.registration)
        self.worker._registrar = self.registrar  # type: ignore[assignment]

    def ended(self) -> list[tuple[int, bool]]:
        return [(job.job_id, job.done) for job in self.worker.get_finished().ended]
