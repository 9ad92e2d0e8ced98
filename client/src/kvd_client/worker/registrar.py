"""Keeps one rank registered: finds the daemon, hands it the rank's memory, and again.

A background thread. After a loss it registers again only when the old mover is dead, so that
at any time at most one mover writes into the rank's memory.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from kvd_client.backoff import MAX_DOUBLINGS, NOT_CONNECTED, Backoff, error_of, problem_of
from kvd_client.companion import CompanionSocket
from kvd_client.daemon import greeted
from kvd_client.forks import FORKED, keep_from_children
from kvd_client.identity import EngineIdentity
from kvd_client.worker.rank_memory import RegisteredMemory
from kvd_client.worker.regions import VmmRegion
from kvd_client.worker.registration import Registration
from kvd_proto.v1 import companion_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 30.0  # a new mover touches all of the rank's memory first
GPU_REGISTER_TIMEOUT_S = 120.0  # the mover loads CUDA and makes a context before it answers
MAX_GPU_DOUBLINGS = MAX_DOUBLINGS + 1  # an attempt may make a CUDA context there
MARK_READY_TIMEOUT_S = 5.0
MAX_MARKING = 12  # calls under way that say ready, of the 16 that a connection may have
MAX_LOST = 16  # registrations whose last words the worker has not taken; each has descriptors
LOOK_FOR_ROOM_S = 0.2


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank of its engine this is, and which shard's bytes it holds.

    `writer` is False for a rank whose shard another rank writes (a replicated layout).
    """

    rank: int
    world_size: int
    shard: int
    writer: bool = True


class Registrar:
    """Keeps the rank registered whenever there is a daemon, from `start` to `stop`.

    Never raises for an absent daemon.
    """

    def __init__(
        self, socket_path: str, identity: EngineIdentity, place: RankPlace, memory: RegisteredMemory
    ) -> None:
        self.problem = NOT_CONNECTED
        self.lost: list[Registration] = []  # not current any more; the worker drains and closes
        self._socket_path = socket_path
        self._identity = identity
        self._place = place
        self._memory = memory
        self._changed = threading.Condition()
        self._current: Registration | None = None
        self._stub: worker_pb2_grpc.WorkerServiceStub | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._registering: grpc.Future[worker_pb2.RegisterRankResponse] | None = None
        self._marking: set[grpc.Future[worker_pb2.MarkReadyResponse]] = set()
        self._stopping = False
        self._backoff = Backoff(MAX_DOUBLINGS if memory.gpu is None else MAX_GPU_DOUBLINGS)
        self._wake_fd = -1
        self._thread = threading.Thread(target=self._run, name="kvd-rank", daemon=True)
        keep_from_children(self)

    def start(self) -> None:
        """Begin, once. Whatever it raises, `stop` ends what has begun."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def leave_to_parent(self) -> None:
        """In a forked process the rank is not registered: it touches no ring and ends no mover."""
        self._changed = threading.Condition()
        self._stopping = True
        self._current = self._stub = self._registering = None
        self.lost = []
        self.problem = FORKED

    @property
    def current(self) -> Registration | None:
        """Where new jobs go; None while there is no daemon."""
        return self._current

    def awaited(self, timeout_s: float) -> Registration | None:
        """Where new jobs go, after a short wait when the daemon is about to say it.

        The scheduler may hear a moment before the rank that the rank is registered.
        """
        if self._current is None and self._registering is not None:
            self.wait_registered(timeout_s)
        return self._current

    def wait_registered(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._current is not None, timeout_s)
            return self._current is not None

    def mark_ready_by_call(self, registration: Registration, job_ids: Sequence[int]) -> None:
        """Fallback for a full ring. Waits for nothing; a failure leaves the jobs to deadlines."""
        stub = self._stub
        if stub is None or registration is not self._current:
            return
        request = worker_pb2.MarkReadyRequest(
            registration_id=registration.registration_id, job_ids=job_ids
        )
        if len(self._marking) >= MAX_MARKING:
            log.warning("kvd: %d jobs could not be marked ready: the daemon hangs", len(job_ids))
            return
        call = stub.MarkReady.future(request, timeout=MARK_READY_TIMEOUT_S, metadata=self._metadata)
        self._marking.add(call)
        call.add_done_callback(self._marked)

    def _marked(self, call: grpc.Future[worker_pb2.MarkReadyResponse]) -> None:
        """On gRPC's thread."""
        self._marking.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None:
            log.warning("kvd: jobs could not be marked ready: %s", error)

    def end_mover(self, timeout_s: float) -> None:
        """End this registration and its mover, as `stop` does; the thread then registers again."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            ending = list(self.lost)
            stub, current = self._stub, self._current
            if current is not None and stub is not None:
                ending.append(current)
                self._unregister(stub, current, timeout_s)
                current.is_unwanted = True
        _end_all(ending, deadline)

    def stop(self, timeout_s: float) -> bool:
        """Unregister and end the thread. True: no copy can touch the rank's memory any more.

        After False it may be called again.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            if self._current is not None and self._stub is not None:
                self._unregister(self._stub, self._current, timeout_s)
        registering = self._registering
        if registering is not None and self._memory.gpu is None:
            # A mover that is only just starting copies nothing: we never say ready. On a GPU it
            # may have opened the memory already, so there its end is waited for.
            registering.cancel()
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._wake_fd >= 0:
            wake_fd, self._wake_fd = self._wake_fd, -1  # a signal's handler may raise in between
            os.close(wake_fd)
        return _end_all(self.lost, deadline)

    def _unregister(
        self,
        stub: worker_pb2_grpc.WorkerServiceStub,
        registration: Registration,
        timeout_s: float,
    ) -> None:
        request = worker_pb2.UnregisterRankRequest(registration_id=registration.registration_id)
        try:
            stub.UnregisterRank(request, timeout=timeout_s, metadata=self._metadata)
            registration.is_dead = True
        except grpc.RpcError as error:
            problem = problem_of(error, self._socket_path)
            log.warning("kvd: unregistering failed, waiting for the mover's end: %s", problem)

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._sleep(self._end_attempt(error_of(self._hold_registration)))
            while len(self.lost) >= MAX_LOST and not self._stopping:
                self._note("waiting for the engine's next step")  # which looks at what was lost
                self._sleep(LOOK_FOR_ROOM_S)

    def _end_attempt(self, error: Exception | None) -> float:
        """Say why there is no registration; the pause before the next attempt."""
        if error is not None:
            self._note(problem_of(error, self._socket_path), error)
        return self._backoff.after(error)

    def _hold_registration(self) -> None:
        program = f"kvd-client {self._identity.engine_id} rank {self._place.rank}"
        with greeted(self._socket_path, companion_pb2.PEER_ROLE_WORKER, program) as daemon:
            self._backoff.meet()
            for token, region in enumerate(self._memory.regions, 1):
                if region.fd is not None:
                    is_device = isinstance(region, VmmRegion)
                    daemon.companion.offer_memory(token, region.fd, is_device)
            self._metadata = daemon.metadata
            stub = worker_pb2_grpc.WorkerServiceStub(daemon.channel)
            registration = self._register(stub, daemon.companion)
            try:
                self._watch(registration, daemon.companion.fileno())
            finally:
                with self._changed:
                    self._current = self._stub = None
                    self.lost.append(registration)
        # The companion is closed: a daemon that lives ends the mover, one that died took it along.
        while not registration.wait_dead(0.05) and not self._stopping:
            pass

    def _register(
        self, stub: worker_pb2_grpc.WorkerServiceStub, companion: CompanionSocket
    ) -> Registration:
        self._registering = stub.RegisterRank.future(
            self._request(),
            timeout=REGISTER_TIMEOUT_S if self._memory.gpu is None else GPU_REGISTER_TIMEOUT_S,
            metadata=self._metadata,
        )
        try:
            if self._stopping and self._memory.gpu is None:  # `stop` may have looked too early
                self._registering.cancel()
            answer = self._registering.result()
            channel_fds = companion.rank_channel(answer.registration_id)
            registration = Registration(answer.registration_id, channel_fds)
            log.info(
                "kvd: rank %d is registered, by %s, with mover %d; it takes %d bytes of GPU memory",
                self._place.rank,
                answer.transport,
                answer.mover_pid,
                answer.gpu_context_bytes,
            )
            with self._changed:
                self._current, self._stub, self.problem = registration, stub, ""
                self._backoff.hold()
                self._changed.notify_all()
        finally:
            self._registering = None
        return registration

    def _request(self) -> worker_pb2.RegisterRankRequest:
        place, regions = self._place, self._memory.regions
        return worker_pb2.RegisterRankRequest(
            identity=self._identity.to_proto(),
            rank=place.rank,
            world_size=place.world_size,
            shard=place.shard,
            writer=place.writer,
            memories=[region.to_proto(token) for token, region in enumerate(regions, 1)],
            groups=[layout.to_proto(group) for group, layout in enumerate(self._memory.groups)],
            gpu_memory=self._gpu_memory(),
        )

    def _gpu_memory(self) -> worker_pb2.GpuMemory | None:
        """As it is now: every registration makes a mover, and so a context, anew."""
        gpu = self._memory.gpu
        if gpu is None:
            return None
        free, total = gpu.memory_bytes()
        return worker_pb2.GpuMemory(free_bytes=free, total_bytes=total)

    def _watch(self, registration: Registration, companion_fd: int) -> None:
        """Return when the mover or the daemon is dead, the board is broken, or at `stop`."""
        poller = select.poll()
        for fd in (registration.pidfd, companion_fd, self._wake_fd):
            poller.register(fd, select.POLLIN)
        while not (self._stopping or registration.is_broken or registration.is_unwanted):
            ready = {fd for fd, _ in poller.poll(1000)}
            if registration.pidfd in ready:
                registration.is_dead = True
                self._note("the mover has ended")
                return
            if companion_fd in ready:
                self._note("the daemon has gone")
                return

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.poll(seconds * 1000)

    def _note(self, problem: str, error: Exception | None = None) -> None:
        if not self._stopping:
            self._backoff.warn(f"kvd rank {self._place.rank}", problem, error)
            self.problem = problem


def _end_all(registrations: Sequence[Registration], deadline: float) -> bool:
    """End their movers, by force those that hang past the deadline; whether all have ended."""
    ended = [each.end(max(0.0, deadline - time.monotonic())) for each in registrations]
    return all(ended)
