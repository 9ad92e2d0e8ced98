"""The verbs one by one, each a call that waits for its answer.

An engine wants `SchedulerConnection`, which waits for nothing and survives any daemon. Here a
refusal and an absent daemon are raised as they come (grpc.RpcError, CompanionRefused, OSError).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import grpc

from kvd_client.daemon import greeted
from kvd_client.draft import BlockRun, JobDraft
from kvd_client.identity import EngineIdentity, NamespaceFields
from kvd_proto.v1 import (
    common_pb2,
    companion_pb2,
    engine_pb2,
    engine_pb2_grpc,
    events_pb2,
    operator_pb2,
)
from kvd_proto.v1.events_pb2_grpc import EventServiceStub
from kvd_proto.v1.operator_pb2_grpc import OperatorServiceStub

CALL_TIMEOUT_S = 30.0


class Found(NamedTuple):
    """Answer to a lookup: a status byte for each key, and the lease taken; 0 = none."""

    statuses: bytes
    lease_id: int


class VerbSession:
    """An open session with the daemon at `socket_path`, and every verb on it. One caller."""

    def __init__(
        self,
        socket_path: str,
        identity: EngineIdentity,
        namespace: NamespaceFields,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.blocking_calls = 0
        self._timeout_s = timeout_s
        self._sequence = 0
        self._last_job_id = 0
        self._outgoing: SimpleQueue[engine_pb2.SessionRequest | None] = SimpleQueue()
        self._incoming: SimpleQueue[engine_pb2.SessionResponse | None] = SimpleQueue()
        self._held = contextlib.ExitStack()
        role, program = companion_pb2.PEER_ROLE_SCHEDULER, f"kvd-client {identity.engine_id} verbs"
        daemon = self._held.enter_context(greeted(socket_path, role, program, timeout_s))
        self.metadata, self._channel = daemon.metadata, daemon.channel
        self._engine = engine_pb2_grpc.EngineServiceStub(self._channel)
        self._operator = OperatorServiceStub(self._channel)
        opening = engine_pb2.OpenSession(
            identity=identity.to_proto(), namespace=namespace.to_proto(), world_size=1
        )
        self._outgoing.put(engine_pb2.SessionRequest(open=opening))
        self._stream = self._engine.Session(iter(self._outgoing.get, None), metadata=self.metadata)
        self._reader = threading.Thread(target=self._read, name="kvd-verbs", daemon=True)
        self._reader.start()
        opened = self._await("opened").opened
        self.session_id = opened.session_id
        self.namespace_id = opened.namespace_id
        self.store_threshold = max(1, opened.store_threshold)
        self.epoch = opened.epoch.epoch

    # -- the session ------------------------------------------------------------------------

    def wait_usable(self) -> None:
        """Return when every rank has registered."""
        self._await("ranks_ready")

    def reset_cache(self, epoch: str) -> None:
        """Go on in an epoch of this name, where nothing is stored yet."""
        reset = engine_pb2.ResetCache(sequence=self._next(), epoch=epoch)
        self._outgoing.put(engine_pb2.SessionRequest(reset_cache=reset))
        self.epoch = self._await("epoch").epoch.epoch

    def close(self) -> None:
        """Say goodbye, and end."""
        self._outgoing.put(engine_pb2.SessionRequest(close=engine_pb2.CloseSession()))
        self._outgoing.put(None)
        self._reader.join(self._timeout_s)
        self._stream.cancel()
        self._held.close()

    def _read(self) -> None:
        try:
            for response in self._stream:
                if not response.HasField("jobs_ended"):  # Flush tells that as well
                    self._incoming.put(response)
        except grpc.RpcError:
            pass  # whoever waits is told by the end below
        self._incoming.put(None)

    def _await(self, kind: str) -> engine_pb2.SessionResponse:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                response = self._incoming.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise TimeoutError(f"no {kind} from the daemon") from None
            if response is None:
                raise ConnectionResetError(f"the session ended before {kind}")
            if response.HasField("refused"):
                raise ValueError(f"{response.refused.reason}: {response.refused.message}")
            if response.WhichOneof("kind") == kind:
                return response

    def next_job_id(self) -> int:
        """A number for a job; no two of the session are the same."""
        self._last_job_id += 1
        return self._last_job_id

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    # -- verbs ------------------------------------------------------------------------------

    def lookup(
        self, context: common_pb2.ReqContext, runs: Sequence[BlockRun], *, lease: bool = False
    ) -> list[Found]:
        """One answer a run; with `lease` all hits are held until it is released."""
        mode = engine_pb2.LEASE_MODE_ALL if lease else engine_pb2.LEASE_MODE_UNSPECIFIED
        queries = [engine_pb2.Query(context=context, run=run.to_keys(), lease=mode) for run in runs]
        request = engine_pb2.LookupRequest(session_id=self.session_id, queries=queries)
        answers = self._call(self._engine.Lookup, request).answers
        return [Found(answer.statuses, answer.lease_id) for answer in answers]

    def prepare_store(self, job: JobDraft) -> engine_pb2.JobVerdict:
        request = engine_pb2.PrepareStoreRequest()
        job.put_store_into(request.job)
        verdict: engine_pb2.JobVerdict = self._numbered(self._engine.PrepareStore, request).verdict
        return verdict

    def prepare_load(self, job: JobDraft) -> engine_pb2.JobVerdict:
        request = engine_pb2.PrepareLoadRequest()
        job.put_into(request.job)
        verdict: engine_pb2.JobVerdict = self._numbered(self._engine.PrepareLoad, request).verdict
        return verdict

    def complete_load(self, context: common_pb2.ReqContext) -> None:
        self._numbered(self._engine.CompleteLoad, engine_pb2.CompleteLoadRequest(context=context))

    def touch(self, context: common_pb2.ReqContext, runs: Sequence[BlockRun]) -> None:
        message = engine_pb2.Touch(context=context, runs=[run.to_keys() for run in runs])
        self._numbered(self._engine.Touch, engine_pb2.TouchRequest(touch=message))

    def release_leases(self, lease_ids: Sequence[int]) -> None:
        request = engine_pb2.ReleaseLeaseRequest(lease_ids=lease_ids)
        self._numbered(self._engine.ReleaseLease, request)

    def end_step(self, preempted: Sequence[str] = (), finished: Sequence[str] = ()) -> None:
        request = engine_pb2.EndStepRequest(
            preempted_request_ids=preempted, finished_request_ids=finished
        )
        self._numbered(self._engine.EndStep, request)

    def flush(self, job_ids: Sequence[int]) -> list[engine_pb2.JobEnded]:
        """Wait until these jobs have ended, and say how."""
        deadline_ms = int(self._timeout_s * 1000)
        request = engine_pb2.FlushRequest(
            session_id=self.session_id, job_ids=job_ids, deadline_ms=deadline_ms
        )
        return list(self._call(self._engine.Flush, request).jobs)

    # -- the operator's ---------------------------------------------------------------------

    def status(self) -> operator_pb2.StatusResponse:
        answer: operator_pb2.StatusResponse = self._call(
            self._operator.Status, operator_pb2.StatusRequest()
        )
        return answer

    def clear(self) -> None:
        """Remove every block of the namespace. For operators."""
        request = operator_pb2.ClearRequest(namespace_id=self.namespace_id)
        self._call(self._operator.Clear, request)

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        """Limit a tenant's bytes from now on. For operators."""
        request = operator_pb2.SetQuotaRequest(tenant=tenant, quota_bytes=quota_bytes)
        self._call(self._operator.SetQuota, request)

    def watch(self) -> ChangeTail:
        """The cache's changes from now on; close it before the session."""
        request = events_pb2.WatchEventsRequest()
        stream = EventServiceStub(self._channel).WatchEvents(request, metadata=self.metadata)
        return ChangeTail(stream, self._timeout_s)

    def _numbered(self, method: Callable[..., Any], request: Any) -> Any:
        request.session_id = self.session_id
        request.sequence = self._next()
        return self._call(method, request)

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        self.blocking_calls += 1
        return method(request, timeout=self._timeout_s, metadata=self.metadata)


class ChangeTail:
    """The ordered changes of all namespaces, kept until they are taken."""

    def __init__(self, stream: Any, timeout_s: float) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._events: list[events_pb2.CacheEvent] = []
        self._reached = -1
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="kvd-changes", daemon=True)
        self._reader.start()
        self.take(0)  # the snapshot is there, so nothing from here on is missed

    def take(self, sequence: int) -> list[events_pb2.CacheEvent]:
        """What came since the last call, the change of this number included: waits for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._reached >= sequence, self._timeout_s
            )
            if self._reached < sequence:
                raise TimeoutError(f"no change {sequence} from the daemon")
            taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        self._stream.cancel()
        self._reader.join(self._timeout_s)

    def _read(self) -> None:
        try:
            for response in self._stream:
                if response.snapshot and not response.snapshot_end:
                    continue
                with self._changed:
                    if not response.snapshot:
                        self._events += response.events
                    self._reached = response.sequence
                    self._changed.notify_all()
        except grpc.RpcError:
            pass  # whoever waits is told by the end below
        with self._changed:
            self._ended = True
            self._changed.notify_all()
