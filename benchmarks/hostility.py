"""What the hostile client of `hostile_client` does: every bound at once, from one process."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from benchmarks.rig import MIB
from kvd_client.companion import CompanionRefused
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, MAX_MESSAGE_BYTES
from kvd_proto.v1 import common_pb2, engine_pb2, events_pb2, operator_pb2
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    RawScheduler,
    RawWorker,
    group,
    identity,
    namespace,
    query,
)
from tests.control.raw_http2 import RawHttp2, message

# Of each more than a user may have, so that what is refused is part of it.
CONNECTIONS = 4200
STRANGERS = 160
TOOLS = 160
WATCHERS = 70
ENGINES = 6  # with a rank each, so with a mover
HALF_SESSIONS = 22
STEPPING_SESSIONS = 8
HALF_CALLS = 256
HALF_SAID = 80
SMALL_AT_ONCE = 64
FIRST_SECONDS = 3.0
MOST_OF_A_REASON = 100  # characters
ACCOUNTS = 512  # of a step, each with a store of its own: scopes, jobs, claims
SESSION = "/kvd.v1.EngineService/Session"
MISTAKES = (grpc.RpcError, OSError, CompanionRefused, AssertionError, queue.Empty, ValueError)


def largest_steps() -> list[engine_pb2.Step]:
    """Legal ones that take the longest to read, to check and to work off."""
    context = common_pb2.ReqContext(request_id="r")
    run = common_pb2.KeyRun(hashes=np.random.default_rng(5).bytes(32))
    values = context.__class__(request_id="r")
    while values.hints.ByteSize() < 16_000:
        values.hints.fields[format(len(values.hints.fields), "x")].SetInParent()
    hashes = np.random.default_rng(6).bytes(32 * 4096)
    transfer = common_pb2.TransferRun(hashes=hashes, engine_blocks=bytes(4 * 4096))
    store = engine_pb2.StoreJob(job_id=1, context=context, runs=[transfer])
    names = [f"{n:08x}" for n in range(16384)]
    requests = [
        engine_pb2.Touch(context=common_pb2.ReqContext(request_id=f"q{n}"), runs=[run])
        for n in range(1024)
    ]
    return [
        engine_pb2.Step(
            touches=[engine_pb2.Touch(context=context, runs=[run] * (MAX_KEYS_PER_MESSAGE // 1024))]
            * 1024
        ),
        engine_pb2.Step(touches=[engine_pb2.Touch(context=values, runs=[run])] * 300),
        engine_pb2.Step(touches=requests),
        engine_pb2.Step(stores=[store] * (MAX_KEYS_PER_MESSAGE // 4096)),
        engine_pb2.Step(released_leases=range(1, 16385)),
        engine_pb2.Step(preempted_request_ids=names, finished_request_ids=names),
    ]


class Hostility:
    """Takes and floods between `begin` and `end`; `done` counts what it was given."""

    def __init__(self, path: str, port: int) -> None:
        self.path, self.port = path, port
        self.done: Counter[str] = Counter()
        self._attacks = threading.Event()
        self._held = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []
        self._steps = largest_steps()
        self._lock = threading.Lock()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard := _hard_limit(), hard))

    def begin(self) -> None:
        """Take what can be taken, and go on with floods until `end`.

        What shuts the others of its user out, connections above all, comes after them.
        """
        self._attacks.set()
        self._start_all(
            ("engines with movers", self._take_engine, ENGINES),
            ("sessions with steps", self._step_on, STEPPING_SESSIONS),
            ("HTTP half said", self._half_said, 1),
            ("over the limit", self._send_too_much, 1),
            ("small calls", self._flood, 2),
        )
        time.sleep(FIRST_SECONDS)
        self._start_all(
            ("sessions with half messages", self._half_session, HALF_SESSIONS),
            ("half calls", self._half_calls, 4),
            ("tools and watchers", self._take_watchers, 1),
            ("gRPC connections", self._take_connections, 1),
            ("strangers", self._take_strangers, 1),
        )

    def _start_all(self, *kinds: tuple[str, Callable[[int], None], int]) -> None:
        for name, work, many in kinds:
            for number in range(many):
                self._start(name, work, number)

    def end(self) -> None:
        """Stop, and let everything go."""
        self._attacks.clear()
        self._let_go()  # what is waited for ends as well
        for thread in self._threads:
            thread.join(30)
        self._threads.clear()
        self._let_go()

    def _start(self, name: str, work: Callable[[int], None], number: int) -> None:
        def run() -> None:
            while self._attacks.is_set():
                try:
                    work(number)
                except MISTAKES as mistake:
                    why = (str(mistake).splitlines() or [""])[0]
                    refused = f"refused: {name}: {type(mistake).__name__} {why}"
                    self.done[refused[:MOST_OF_A_REASON]] += 1
                    time.sleep(0.2)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _let_go(self) -> None:
        with self._lock:
            held, self._held = self._held, contextlib.ExitStack()
        held.close()

    def _hold(self, each: Any) -> None:
        with self._lock:
            self._held.callback(_closed, each)

    def _wait(self) -> None:
        while self._attacks.is_set():
            time.sleep(0.1)

    # -- what is taken and held -------------------------------------------------------------

    def _take_engine(self, number: int) -> None:
        """A rank with its mover; then stores for one account after the other, never ready."""
        engine = RawEngine(self.path, identity=identity(f"engine{number}", os.urandom(16)))
        self._hold(engine)
        self.done["engines with movers"] += 1
        job = 0
        while self._attacks.is_set():
            stores = []
            for _ in range(ACCOUNTS):
                job += 1
                key = common_pb2.TransferRun(hashes=os.urandom(32), engine_blocks=bytes(4))
                account = common_pb2.ReqContext(request_id="r", account=f"{number}/{job}")
                stores.append(engine_pb2.StoreJob(job_id=job, context=account, runs=[key]))
            stores[-1].request_level = True
            engine.scheduler.step(stores=stores, end_step=True)
            self.done["steps of new accounts"] += 1

    def _half_session(self, number: int) -> None:
        caller = Caller(self.path, "SCHEDULER")
        self._hold(caller)
        raw = RawHttp2(self.path)
        self._hold(raw)
        stream = raw.begin(SESSION, caller.welcome.token)
        opening = engine_pb2.OpenSession(
            identity=identity(f"half{number}", os.urandom(16)),
            namespace=namespace(model=f"half{number}", groups=[group()] * 8),
            world_size=1,
        )
        content = engine_pb2.SessionRequest(open=opening).SerializeToString()
        raw.send(stream, message(content))
        raw.send(stream, message(bytes(MAX_MESSAGE_BYTES - 1000), MAX_MESSAGE_BYTES))
        raw.read(0.5)
        assert stream not in raw.reset, "the session was refused"
        self.done["sessions with half messages"] += 1
        self._wait()

    def _half_calls(self, _number: int) -> None:
        """Calls of which nothing but a half message ever comes, of both kinds."""
        caller = Caller(self.path, "SCHEDULER")
        self._hold(caller)
        methods = (SESSION, "/kvd.v1.EngineService/Lookup")
        for _ in range(HALF_CALLS // 64):
            raw = RawHttp2(self.path)
            self._hold(raw)
            for call in range(64):
                stream = raw.begin(methods[call % 2], caller.welcome.token)
                raw.send(stream, message(bytes(MAX_MESSAGE_BYTES - 1), MAX_MESSAGE_BYTES), 0.05)
                self.done["half calls"] += 1
                if not self._attacks.is_set():
                    return
        self._wait()

    def _take_connections(self, _number: int) -> None:
        held: list[RawHttp2] = []
        while self._attacks.is_set():
            for each in held:
                each.read(0.0)
            over = [each for each in held if each.is_over]
            for each in over:
                each.close()
            held = [each for each in held if not each.is_over]
            self.done["gRPC connections held"] = max(len(held), self.done["gRPC connections held"])
            with contextlib.suppress(OSError):  # closed before its first word
                while len(held) < CONNECTIONS and self._attacks.is_set():
                    held.append(RawHttp2(self.path))
            time.sleep(0.5)
        for each in held:
            each.close()

    def _take_strangers(self, _number: int) -> None:
        """Companion connections that say nothing; the daemon closes them after some seconds."""
        with contextlib.ExitStack() as stack:
            for _ in range(STRANGERS):
                each = socket.socket(socket.AF_UNIX)
                stack.callback(each.close)
                each.connect(f"{self.path}.companion")
                self.done["strangers"] += 1
            time.sleep(2.0)

    def _take_watchers(self, _number: int) -> None:
        with contextlib.ExitStack() as stack:
            request = message(events_pb2.WatchEventsRequest().SerializeToString())
            for number in range(TOOLS):
                try:
                    caller = Caller(self.path)
                except CompanionRefused:
                    self.done["refused: tools"] += 1
                    break
                stack.callback(caller.close)
                if number < WATCHERS:
                    raw = RawHttp2(self.path)
                    stack.callback(raw.close)
                    stream = raw.begin("/kvd.v1.EventService/WatchEvents", caller.welcome.token)
                    raw.send(stream, request)
                    self.done["watchers that don't read"] += 1
            self._wait()

    def _half_said(self, _number: int) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(HALF_SAID):
                each = socket.create_connection(("127.0.0.1", self.port), 5)
                stack.callback(each.close)
                each.sendall(b"GET /metrics HTTP/1.1\r\n")
                self.done["HTTP half said"] += 1
            time.sleep(1.0)

    # -- floods -----------------------------------------------------------------------------

    def _step_on(self, number: int) -> None:
        """The largest legal steps, one after the other."""
        session = RawScheduler(
            self.path,
            identity=identity(f"steps{number}", os.urandom(16)),
            namespace=namespace(model=f"steps{number}", groups=[group()] * 8),
        )
        self._hold(session)
        assert session.opened.session_id
        self.done["sessions with steps"] += 1
        while self._attacks.is_set():
            for template in self._steps:
                session.sequence += 1
                step = engine_pb2.Step()
                step.CopyFrom(template)
                step.sequence = session.sequence
                for store in step.stores:
                    session.highest_job += 1
                    store.job_id = session.highest_job
                session.send(step=step)
                while (answer := session.responses.get(timeout=60)) is not None:
                    if isinstance(answer, grpc.RpcError):
                        raise answer
                    if answer.WhichOneof("kind") in ("step", "refused"):
                        break
                self.done["largest steps"] += 1
                if not self._attacks.is_set():
                    return

    def _send_too_much(self, _number: int) -> None:
        with contextlib.closing(Caller(self.path)) as caller:
            call: Any = caller.channel.unary_unary("/kvd.v1.OperatorService/Status")
            with contextlib.suppress(grpc.RpcError):
                call(bytes(64 * MIB), metadata=caller.metadata, timeout=20)
            self.done["messages over the limit"] += 1

    def _flood(self, number: int) -> None:
        """Small calls, as many at once as one connection carries."""
        session = RawScheduler(
            self.path,
            identity=identity(f"flood{number}", os.urandom(16)),
            namespace=namespace(model=f"flood{number}"),
        )
        self._hold(session)
        lookup = engine_pb2.LookupRequest(session_id=session.id, queries=[query([1], 0)])
        while self._attacks.is_set():
            calls = [
                session.engine.Lookup.future(lookup, metadata=session.metadata, timeout=30)
                for _ in range(SMALL_AT_ONCE - 1)
            ]
            for each in calls:
                each.result()
            with contextlib.suppress(grpc.RpcError):
                session.operator.Status(
                    operator_pb2.StatusRequest(), metadata=session.metadata, timeout=30
                )
            self.done["small calls"] += SMALL_AT_ONCE


def _closed(each: RawEngine | RawScheduler | RawWorker | Caller | RawHttp2) -> None:
    with contextlib.suppress(*MISTAKES):
        each.close()


def _hard_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
