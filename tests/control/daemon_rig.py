"""A real daemon process, and engines that speak the bare protocol to it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2

from kvd.control.errors import DETAILS_KEY
from kvd_client.companion import CompanionSocket
from kvd_proto.v1 import (
    common_pb2,
    companion_pb2,
    engine_pb2,
    engine_pb2_grpc,
    events_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.control.running_daemon import DEADLINE_S, RunningDaemon, daemon

__all__ = ["RunningDaemon", "daemon"]  # for those who need both

BLOCK_BYTES = 4096  # of one engine block in one shard
HASH_BYTES = 32
NUM_BLOCKS = 64


def details_of(error: Any) -> Any:
    """The ErrorInfo that came with a gRPC error; None where none did."""
    return next(
        (error_info(v) for k, v in error.trailing_metadata() or () if k == DETAILS_KEY), None
    )


def error_info(details: bytes) -> error_details_pb2.ErrorInfo:
    """Read ErrorInfo back from the metadata; an empty one when there is none."""
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(details).details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
            break
    return info


def refusal(call: Callable[[], Any]) -> tuple[str, str, str]:
    """(code, reason, field) with which a call is refused; fails when it isn't."""
    try:
        call()
    except grpc.RpcError as error:
        info = details_of(error)
        if info is None or info.domain != "kvd":
            raise AssertionError(f"an untyped refusal: {error}") from error
        return error.code().name, info.reason, info.metadata["field"]
    raise AssertionError("the call was not refused")


class Caller:
    """A peer with its companion connection, its channel and every stub."""

    def __init__(self, path: str, role: str = "TOOL") -> None:
        self.companion = CompanionSocket(path, 5.0)
        kind = getattr(companion_pb2, f"PEER_ROLE_{role}")
        self.welcome = self.companion.hello(kind, "test")
        self.metadata = (("kvd-token", self.welcome.token),)
        # A channel of its own: gRPC would else share one connection among callers.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self.channel = grpc.insecure_channel(f"unix:{path}", options=options)
        self.engine = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.operator = operator_pb2_grpc.OperatorServiceStub(self.channel)
        self.events = events_pb2_grpc.EventServiceStub(self.channel)

    def call(self, method: Any, request: Any) -> Any:
        return method(request, timeout=DEADLINE_S, metadata=self.metadata)

    def status(self) -> operator_pb2.StatusResponse:
        answer: operator_pb2.StatusResponse = self.call(
            self.operator.Status, operator_pb2.StatusRequest()
        )
        return answer

    def close(self) -> None:
        self.channel.close()
        self.companion.close()


def namespace(**changes: Any) -> engine_pb2.NamespaceFields:
    """A namespace of one full-attention group with one shard."""
    fields: dict[str, Any] = {
        "model": "test-model",
        "kv_dtype": "float32",
        "tokens_per_block": 16,
        "hash_algorithm": "sha256",
        "hash_bytes": HASH_BYTES,
        "groups": [group()],
    }
    return engine_pb2.NamespaceFields(**{**fields, **changes})


def group(**changes: Any) -> engine_pb2.GroupSpec:
    fields: dict[str, Any] = {
        "kind": engine_pb2.GROUP_KIND_FULL_ATTENTION,
        "tokens_per_block": 16,
        "blocks_per_block": 1,
        "shard_bytes": [BLOCK_BYTES],
    }
    return engine_pb2.GroupSpec(**{**fields, **changes})


def identity(name: str = "e0", nonce: bytes = b"n" * 16) -> engine_pb2.EngineIdentity:
    return engine_pb2.EngineIdentity(engine_id=name, boot_nonce=nonce)


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") * 4 for number in numbers)


def context(request: str = "r0") -> common_pb2.ReqContext:
    return common_pb2.ReqContext(request_id=request)


def transfer_run(keys: list[int], blocks: list[int]) -> common_pb2.TransferRun:
    matrix = np.array(blocks, dtype="<u4").tobytes()
    return common_pb2.TransferRun(hashes=hashes(*keys), engine_blocks=matrix)


def store_job(job: int, keys: list[int], blocks: list[int]) -> engine_pb2.StoreJob:
    return engine_pb2.StoreJob(job_id=job, context=context(), runs=[transfer_run(keys, blocks)])


def load_job(job: int, keys: list[int], blocks: list[int]) -> engine_pb2.LoadJob:
    return engine_pb2.LoadJob(job_id=job, context=context(), runs=[transfer_run(keys, blocks)])


def query(keys: list[int], lease: Any = engine_pb2.LEASE_MODE_PREFIX) -> engine_pb2.Query:
    run = common_pb2.KeyRun(hashes=hashes(*keys))
    return engine_pb2.Query(context=context(), run=run, lease=lease)


class RawScheduler(Caller):
    """A scheduler process's side: the session stream and the unary verbs."""

    def __init__(self, path: str, **opening: Any) -> None:
        super().__init__(path, "SCHEDULER")
        self._requests: queue.SimpleQueue[engine_pb2.SessionRequest | None] = queue.SimpleQueue()
        self.responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: list[engine_pb2.JobsEnded] = []
        fields: dict[str, Any] = {
            "identity": identity(),
            "namespace": namespace(),
            "world_size": 1,
        }
        self.send(open=engine_pb2.OpenSession(**{**fields, **opening}))
        self._stream = self.engine.Session(iter(self._requests.get, None), metadata=self.metadata)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.sequence = 0
        self.highest_job = 0  # of all that steps named
        self._opened: engine_pb2.SessionOpened | None = None

    def _read(self) -> None:
        try:
            for response in self._stream:
                self.responses.put(response)
        except grpc.RpcError as error:
            self.responses.put(error)
        self.responses.put(None)

    def send(self, **request: Any) -> None:
        self._requests.put(engine_pb2.SessionRequest(**request))

    def next(self, kind: str) -> Any:
        """The next response of this kind; others before it are skipped, but ends of jobs kept."""
        deadline = time.monotonic() + DEADLINE_S
        if kind == "jobs_ended" and self._ended:
            return self._ended.pop(0)
        while True:
            response = self.responses.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(response, grpc.RpcError):
                raise response
            assert response is not None, f"the stream ended before {kind}"
            if response.WhichOneof("kind") == kind:
                return getattr(response, kind)
            if response.WhichOneof("kind") == "jobs_ended":
                self._ended.append(response.jobs_ended)

    @property
    def opened(self) -> engine_pb2.SessionOpened:
        if self._opened is None:
            self._opened = self.next("opened")
        return self._opened

    @property
    def id(self) -> int:
        return self.opened.session_id

    def step(self, **parts: Any) -> engine_pb2.StepReply:
        self.sequence += 1
        jobs = [*parts.get("loads", ()), *parts.get("stores", ())]
        self.highest_job = max(self.highest_job, *(job.job_id for job in jobs), 0)
        self.send(step=engine_pb2.Step(sequence=self.sequence, **parts))
        reply: engine_pb2.StepReply = self.next("step")
        return reply

    def statuses(self, keys: list[int]) -> list[int]:
        request = engine_pb2.LookupRequest(session_id=self.id, queries=[query(keys, 0)])
        (answer,) = self.call(self.engine.Lookup, request).answers
        return [status & 3 for status in answer.statuses]

    def close(self) -> None:
        self._requests.put(None)
        self._stream.cancel()
        self._reader.join(DEADLINE_S)
        super().close()


def open_and_close(path: str, **opening: Any) -> None:
    """A session that is opened and left at once; raises what it is refused with."""
    scheduler = RawScheduler(path, **opening)
    try:
        assert scheduler.opened.session_id
    finally:
        scheduler.close()


class RawWorker(Caller):
    """A worker process's side, with its KV in shared memory as [block, bytes]."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "WORKER")
        size = NUM_BLOCKS * BLOCK_BYTES
        self.fd = os.memfd_create("kvd-test-kv")
        os.ftruncate(self.fd, size)
        self.companion.offer_memory(7, self.fd)
        self.registration = 0
        self._descriptors: tuple[int, ...] = ()

    def request(self, **changes: Any) -> worker_pb2.RegisterRankRequest:
        fields: dict[str, Any] = {
            "identity": identity(),
            "rank": 0,
            "world_size": 1,
            "shard": 0,
            "writer": True,
            "memories": [memory()],
            "groups": [group_layout()],
        }
        return worker_pb2.RegisterRankRequest(**{**fields, **changes})

    def register(self, **changes: Any) -> int:
        answer = self.call(self.worker.RegisterRank, self.request(**changes))
        self.registration = answer.registration_id
        self._descriptors += self.companion.rank_channel(self.registration)
        return int(answer.mover_pid)

    @property
    def board_fd(self) -> int:
        return self._descriptors[-3]  # of ring, board, eventfd, pidfd

    def unregister(self) -> None:
        request = worker_pb2.UnregisterRankRequest(registration_id=self.registration)
        self.call(self.worker.UnregisterRank, request)

    def ready(self, *jobs: int) -> None:
        request = worker_pb2.MarkReadyRequest(registration_id=self.registration, job_ids=jobs)
        self.call(self.worker.MarkReady, request)

    def write(self, block: int, content: bytes) -> None:
        os.pwrite(self.fd, content, block * BLOCK_BYTES)

    def read(self, block: int) -> bytes:
        return os.pread(self.fd, BLOCK_BYTES, block * BLOCK_BYTES)

    def close(self) -> None:
        super().close()
        for fd in (self.fd, *self._descriptors):
            os.close(fd)


def memory(**changes: Any) -> worker_pb2.MemoryHandle:
    fields: dict[str, Any] = {"memory_token": 7, "offset": 0, "bytes": NUM_BLOCKS * BLOCK_BYTES}
    return worker_pb2.MemoryHandle(host=worker_pb2.HostSharedMemory(**{**fields, **changes}))


def group_layout(**changes: Any) -> worker_pb2.GroupLayout:
    fragment = worker_pb2.Fragment(memory=0, base=0, stride=BLOCK_BYTES, bytes=BLOCK_BYTES)
    fields: dict[str, Any] = {
        "group": 0,
        "num_blocks": NUM_BLOCKS,
        "blocks_per_block": 1,
        "fragments": [fragment],
    }
    return worker_pb2.GroupLayout(**{**fields, **changes})


class RawEngine:
    """A scheduler and one worker, met and usable."""

    def __init__(self, path: str, **opening: Any) -> None:
        self.worker = RawWorker(path)
        named = {key: opening[key] for key in ("identity",) if key in opening}
        self.mover_pid = self.worker.register(**named)
        self.scheduler = RawScheduler(path, **opening)
        assert self.scheduler.opened.session_id
        self.scheduler.next("ranks_ready")
        self._job = 0
        self._ends: dict[int, engine_pb2.JobEnded] = {}

    def store(self, contents: dict[int, bytes]) -> engine_pb2.JobEnded:
        """Store {key: bytes of one block} from engine blocks 0, 1, …; returns how it ended."""
        for block, content in enumerate(contents.values()):
            self.worker.write(block, content)
        self._job = max(self._job, self.scheduler.highest_job) + 1
        job = store_job(self._job, list(contents), list(range(len(contents))))
        (verdict,) = self.scheduler.step(stores=[job], end_step=True).verdicts
        assert verdict.accepted, verdict
        self.worker.ready(self._job)
        return self.ended(self._job)

    def load(self, keys: list[int], first_block: int = 32) -> list[bytes]:
        """Load into engine blocks from `first_block` on; the bytes that came."""
        self._job = max(self._job, self.scheduler.highest_job) + 1
        blocks = list(range(first_block, first_block + len(keys)))
        (verdict,) = self.scheduler.step(loads=[load_job(self._job, keys, blocks)]).verdicts
        assert verdict.accepted, verdict
        self.worker.ready(self._job)
        assert self.ended(self._job).status == common_pb2.JOB_STATUS_DONE
        return [self.worker.read(block) for block in blocks]

    def ended(self, job: int) -> engine_pb2.JobEnded:
        while job not in self._ends:
            self._ends.update({e.job_id: e for e in self.scheduler.next("jobs_ended").jobs})
        return self._ends.pop(job)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def block(number: int) -> bytes:
    """Recognisable bytes of one engine block."""
    return np.random.default_rng(number).bytes(BLOCK_BYTES)


def disk_config(folder: Path, more: str = "") -> Path:
    """A file of settings with a tier on a disk below the folder; `more` lines of the tier's."""
    disk = folder / "disk"
    disk.mkdir(mode=0o700)
    file = folder / "kvd.toml"
    file.write_text(
        f'[[tiers]]\nname = "disk"\nkind = "disk"\n{more}[tiers.options]\n'
        f'directories = ["{disk}"]\ndirectory_bytes = "64MiB"\n'
    )
    return file
