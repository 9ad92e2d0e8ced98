"""The scheduler process's connection: one held session, one reader thread, no waiting.

The engine's thread only puts messages into a queue and reads what has come. A background
thread finds the daemon, holds the session, and finds it again after 50 to 200 ms when it is
lost (`backoff.py`: later where sessions break again and again). Serialising happens on gRPC's own
writer thread.

A daemon that is absent, hung or slow looks the same to the engine: no session, so no hits and
no stores. A daemon that says nothing for longer than the lookups that wait for it are worth, and
for `silent_after_s` at least, is left alone for SILENCE_S and then tried once more; for twice as
long each time that it stays silent. Its first word ends that.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import grpc

from kvd_client.arguments import (
    require_kind,
    require_path,
    require_seconds,
    require_text,
    require_whole,
)
from kvd_client.backoff import NOT_CONNECTED, Backoff, error_of, problem_of
from kvd_client.companion import CompanionSocket
from kvd_client.daemon import greeted
from kvd_client.draft import QueryDraft, StepDraft
from kvd_client.forks import FORKED, keep_from_children
from kvd_client.identity import EngineIdentity, NamespaceFields
from kvd_client.lookup_calls import LookupCalls
from kvd_client.messages import messages_of
from kvd_client.outgoing import Message, as_is, lookup_bytes, serialised, step_bytes
from kvd_client.session import DaemonSession, QueryAnswer
from kvd_proto import layout
from kvd_proto.limits import MAX_EPOCH_BYTES, MAX_RANKS
from kvd_proto.v1 import common_pb2, companion_pb2, engine_pb2

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0  # the daemon may wait for an earlier engine's movers to end
SILENT_AFTER_S = 0.1  # a lookup unanswered for so long: the daemon may hang
SILENCE_S = 1.0
MAX_SILENCE_S = 32.0
MAX_QUEUED_MESSAGES = 1024
CAPABILITIES = (
    "request-level-store",
    "epochs",
    "quiet",  # ends are read from the boards
    "prompts",
)
CLOSED = "this connection is closed"
UNANSWERED = "the daemon does not answer; it is left alone for a while"
UNCONFIRMED = "waiting for the daemon to confirm the reset"
UNSENDABLE = "UNSENDABLE"  # our own word among the daemon's: a job that no message can carry
SESSION_METHOD = f"/{engine_pb2.DESCRIPTOR.services_by_name['EngineService'].full_name}/Session"
MAX_REMEMBERED_STEPS = MAX_QUEUED_MESSAGES  # of which a refusal may still come


class SentStep(NamedTuple):
    """What a refusal of a step would mean."""

    job_ids: tuple[int, ...]
    is_refused_whole: bool  # and can be, without what it says of ends
    ends: StepDraft  # all that it said but its orders, and single requests


def first_met(*problems: str) -> str:
    """The first of these that an attempt has met; that none has ended yet, where there is none."""
    return next((each for each in problems if each not in ("", NOT_CONNECTED)), NOT_CONNECTED)


class SchedulerConnection:
    """An engine's connection to the daemon: it holds a session whenever there is a daemon.

    Never raises for a daemon that is absent, hung or refuses: `problem` then says why. Calls
    come from one thread, the engine's scheduler; `blocking_calls` counts how often it waited,
    `waited_s` how long.
    """

    def __init__(
        self,
        socket_path: str,
        identity: EngineIdentity,
        namespace: NamespaceFields,
        world_size: int = 1,
        silent_after_s: float = SILENT_AFTER_S,
    ) -> None:
        layout.require_ordered_stores()
        require_kind("identity", identity, EngineIdentity)
        require_kind("namespace", namespace, NamespaceFields)
        require_whole("world_size", world_size, 1, MAX_RANKS)
        require_seconds("silent_after_s", silent_after_s)
        self.namespace = namespace
        self.world_size = world_size
        self.blocking_calls = 0
        self.waited_s = 0.0  # in them
        self._problem = NOT_CONNECTED
        self.refusals: collections.Counter[str] = collections.Counter()  # by reason
        self._silent_after_s = silent_after_s
        self._socket_path = require_path("socket_path", socket_path)
        self._identity = identity
        self._epoch = ""
        self._changed = threading.Condition()
        self._session: DaemonSession | None = None
        self._outgoing: SimpleQueue[Message | None] | None = None
        self._call: grpc.Call | None = None
        self._sequence = 0
        self._steps: dict[int, SentStep] = {}  # the last ones, by sequence
        self.tells_prompts = False
        self._generation = 0
        self._unserved_since_s = time.monotonic()
        self._lookups = LookupCalls()
        self._heard_s = 0.0  # when the daemon last said something
        self._ended: list[tuple[int, bool]] = []
        self._silent_until = 0.0
        self._silence_s = SILENCE_S  # the next time
        self._backoff = Backoff()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-session", daemon=True)
        keep_from_children(self)
        self._thread.start()

    def leave_to_parent(self) -> None:
        """In a forked process there is no session, now or later."""
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._closing.set()
        self._call = None
        self._lose_session()
        self._problem = FORKED

    # -- what the scheduler side asks -------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why there is no session, or what was refused last; empty when all is well."""
        session = self._session
        if self._problem or self.session is not None:
            return self._problem
        if session is None:
            return CLOSED
        return UNANSWERED if session.is_usable else UNCONFIRMED

    @property
    def session(self) -> DaemonSession | None:
        session = self._session
        if session is None or not session.is_usable:
            return None
        if self._silent_until and time.monotonic() < self._silent_until:
            return None
        return session

    @property
    def open_session(self) -> DaemonSession | None:
        session = self._session
        if session is None or not session.is_usable:
            return None
        was_silent_before = self._silence_s > 2 * SILENCE_S  # the next one's length
        return self.session if was_silent_before else session

    @property
    def sessions(self) -> int:
        """Sessions opened so far."""
        return self._generation

    def wait_usable(self, timeout_s: float) -> bool:
        """Wait until the session is open and every rank registered; for start-up and tests.

        False at the timeout, and as soon as this connection is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing.is_set() or self.session is not None, timeout_s
            )
            return self.session is not None

    def start_lookup(self, queries: Sequence[QueryDraft]) -> int:
        with self._changed:
            outgoing = self._outgoing
            if outgoing is None:
                return 0
            lookups = self._lookups
            if not lookups.is_leaving and not self._put(partial(self._next_lookup, outgoing)):
                return 0
            return lookups.start(queries, time.monotonic())

    def _next_lookup(self, outgoing: SimpleQueue[Message | None]) -> bytes | None:
        """The message of the lookup that leaves now, on this stream; None: none does."""
        with self._changed:
            if outgoing is not self._outgoing:
                return None  # what waits now waits for another session's stream
            shared, others_wait = self._lookups.leave()
            if others_wait:
                self._put(partial(self._next_lookup, outgoing))
        if shared is None:
            return None
        body = lookup_bytes(shared)
        if body is None:
            with self._changed:
                self._lookups.take_reply(engine_pb2.LookupReply(call_id=shared.number))
                self._changed.notify_all()
            raise ValueError("a lookup can't be said; its requests miss")
        return body

    def gather(self, call_ids: Sequence[int], deadline_s: float) -> None:
        with self._changed:
            lookups = self._lookups
            if not lookups.waits_for(call_ids):
                return
            self.blocking_calls += 1
            began = time.monotonic()
            self._changed.wait_for(lambda: not lookups.waits_for(call_ids), deadline_s)
            self.waited_s += time.monotonic() - began

    def doubt(self, call_ids: Sequence[int], patience_s: Callable[[], float]) -> None:
        # Busy is not silent: whoever answers others will come to us.
        with self._changed:
            now = time.monotonic()
            silence_s = now - max(self._lookups.oldest_s(call_ids), self._heard_s)
        if silence_s <= self._silent_after_s or silence_s <= patience_s():
            return
        with self._changed:
            self._silent_until = now + self._silence_s
            self._silence_s = min(2 * self._silence_s, MAX_SILENCE_S)

    def is_prompt(self, heard_within_s: float, unanswered_s: float) -> bool:
        now = time.monotonic()
        with self._changed:
            silent_s, waited_s = now - self._heard_s, now - self._lookups.sent_since_s
        return silent_s <= heard_within_s and waited_s <= unanswered_s

    def take_answers(self, call_id: int) -> tuple[QueryAnswer, ...] | None:
        with self._changed:
            return self._lookups.take_answers(call_id)

    def give_up(self, call_id: int) -> None:
        with self._changed:
            self._lookups.give_up(call_id)

    def send_step(self, step: StepDraft) -> bool:
        with self._changed:
            session = self._session
            if session is None or step.generation not in (None, session.generation):
                return False
            stray_leases = self._lookups.stray_leases
            step.released_leases += stray_leases
            self._lookups.close_open()
            is_sent = all(self._put(self._step_message(part)) for part in messages_of(step))
            # Told twice rather than never, where a signal's handler raises.
            del stray_leases[:]
            return is_sent

    def _step_message(self, step: StepDraft) -> Message:
        """The step, which is numbered and remembered as it leaves. Called under the lock.

        Not before: where a signal's handler raises amid a call, no number is used up or used twice.
        """
        outgoing = self._outgoing
        job_ids = tuple(step.job_ids())
        # Of a step with both, the daemon may have begun loads before a hand-off made it refuse.
        is_whole = step.has_orders and not (step.loads and step.hand_offs)
        sent = SentStep(job_ids, is_whole, step.to_remember())

        def message() -> bytes | None:
            with self._changed:
                if outgoing is not self._outgoing:
                    return None  # its session is gone
                self._sequence += 1
                sequence = self._sequence
                self._steps[sequence] = sent
                if len(self._steps) > MAX_REMEMBERED_STEPS:
                    del self._steps[next(iter(self._steps))]
            body, left_out = step_bytes(step, sequence)
            if left_out:
                with self._changed:
                    self._fail(left_out, UNSENDABLE)
            return body

        return message

    def _reset_message(self) -> Message:
        """A reset of the cache, numbered as a step is. Called under the lock.

        It names the epoch that is wanted as it leaves: the only one whose confirmation counts.
        """
        outgoing = self._outgoing

        def message() -> bytes | None:
            with self._changed:
                if outgoing is not self._outgoing or not self._epoch:
                    return None
                self._sequence += 1
                reset = engine_pb2.ResetCache(sequence=self._sequence, epoch=self._epoch)
            return engine_pb2.SessionRequest(reset_cache=reset).SerializeToString()

        return message

    def _fail(self, job_ids: Sequence[int], reason: str) -> None:
        """These never reached the daemon, or it would not have them. Called under the lock."""
        self._ended += [(job_id, False) for job_id in job_ids]
        self.refusals[reason] += len(job_ids)

    def take_ended(self) -> list[tuple[int, bool]]:
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def reset_epoch(self, epoch: str = "") -> None:
        """Move on to a new epoch of this engine's own, also after a reconnect.

        Until the daemon has confirmed it there is no usable session. Engines that name the same
        `epoch`, of at most 64 bytes, come to the same one. ValueError, and nothing changed, for
        one that no daemon takes.
        """
        epoch = epoch or os.urandom(16).hex()
        require_text("epoch", epoch, MAX_EPOCH_BYTES)
        with self._changed:
            session = self._session
            if session is not None:
                self._lookups.close_open()
                # First: a signal's handler may raise in between, and without it nobody confirms.
                self._put(self._reset_message())
            self._epoch = epoch
            if session is not None:
                session.enter_epoch(epoch, ())

    def close(self) -> None:
        """Say goodbye and end the thread. Leases end now, submitted copies may still finish."""
        self._closing.set()
        goodbye = engine_pb2.SessionRequest(close=engine_pb2.CloseSession())
        self._put(goodbye.SerializeToString)
        outgoing = self._outgoing  # the session's thread may take it away meanwhile
        if outgoing is not None:
            outgoing.put(None)
        with self._changed:
            self._changed.notify_all()  # who waits for a session gets none
        self._thread.join(timeout=0.5)
        self._cancel()
        self._thread.join(timeout=2.0)

    # -- the session's thread ---------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._end_attempt(error_of(self._hold_session)))

    def _end_attempt(self, error: Exception | None) -> float:
        """Say why there is no session any more; the pause before the next attempt."""
        if error is None:
            self._note("the daemon ended the session")
        else:
            self._note(problem_of(error, self._socket_path), error)
        self._lose_session()
        return self._backoff.after(error)

    def _hold_session(self) -> None:
        program = f"kvd-client {self._identity.engine_id}"
        with greeted(self._socket_path, companion_pb2.PEER_ROLE_SCHEDULER, program) as daemon:
            self._backoff.meet()
            outgoing: SimpleQueue[Message | None] = SimpleQueue()
            opening = engine_pb2.SessionRequest(open=self._opening())
            outgoing.put(opening.SerializeToString)
            session = daemon.channel.stream_stream(
                SESSION_METHOD,
                request_serializer=as_is,
                response_deserializer=engine_pb2.SessionResponse.FromString,
            )
            call = session(serialised(outgoing), metadata=daemon.metadata)
            self._call = call
            if self._closing.is_set():  # `close` has looked too early
                call.cancel()
            timer = threading.Timer(OPEN_TIMEOUT_S, call.cancel)
            timer.daemon = True
            try:
                timer.start()
                for response in call:
                    timer.cancel()
                    self._receive(response, daemon.companion, outgoing)
            finally:
                timer.cancel()
                outgoing.put(None)
                call.cancel()
                self._call = None

    def _opening(self) -> engine_pb2.OpenSession:
        return engine_pb2.OpenSession(
            identity=self._identity.to_proto(),
            namespace=self.namespace.to_proto(),
            world_size=self.world_size,
            capabilities=CAPABILITIES,
            epoch=self._epoch,
            own_epoch=bool(self._epoch),
            unserved_seconds=time.monotonic() - self._unserved_since_s,
        )

    def _receive(
        self,
        response: engine_pb2.SessionResponse,
        companion: CompanionSocket,
        outgoing: SimpleQueue[Message | None],
    ) -> None:
        kind = response.WhichOneof("kind")
        if kind == "opened":
            self._open(response.opened, companion, outgoing)
            return
        with self._changed:
            self._silent_until = 0.0
            self._silence_s = SILENCE_S
            self._heard_s = time.monotonic()
            session = self._session
            if kind == "lookup":
                self._take_lookup(response.lookup)
            elif kind == "ranks_ready" and session is not None:
                session.ranks_ready = True
                self._problem = ""
            elif kind == "rank_lost" and session is not None:
                session.ranks_ready = False
                self._problem = f"rank {response.rank_lost.rank}: {response.rank_lost.reason}"
            elif kind == "epoch" and session is not None:
                if response.epoch.epoch == self._epoch:
                    session.enter_epoch(response.epoch.epoch, response.epoch.group_seeds)
            elif kind == "jobs_ended":
                for job in response.jobs_ended.jobs:
                    self._ended.append((job.job_id, job.status == common_pb2.JOB_STATUS_DONE))
                    self.refusals.update([job.reason] if job.reason else [])
            elif kind == "recording":
                self.tells_prompts = response.recording.prompts
            elif kind == "refused":
                self._take_refusal(response.refused)
            self._changed.notify_all()

    def _take_lookup(self, reply: engine_pb2.LookupReply) -> None:
        """Called under the lock."""
        if reply.reason:
            self.refusals[reply.reason] += 1
            self._backoff.warn("kvd", f"lookup refused: {reply.reason} {reply.message}", None)
        self._lookups.take_reply(reply)

    def _take_refusal(self, refused: engine_pb2.StepRefused) -> None:
        """Nothing of that step was applied: its jobs fail, what it said of ends is said again.

        Called under the lock.
        """
        is_step = refused.reason != "UNKNOWN_MESSAGE"
        what = "step" if is_step else "message"
        self._note(f"{what} refused: {refused.reason} {refused.message}")
        self.refusals[refused.reason] += 1
        if not is_step:
            return  # a daemon of an earlier release does without it
        sent = self._steps.pop(refused.sequence, None)
        is_lost = refused.reason in ("UNKNOWN_SESSION", "SEQUENCE_GAP")
        if is_lost or sent is None or not sent.is_refused_whole:
            self._cancel()  # we don't know what the daemon knows: begin anew
            return
        self._ended += [(job_id, False) for job_id in sent.job_ids]
        self._lookups.close_open()
        self._put(self._step_message(sent.ends))

    def _open(
        self,
        opened: engine_pb2.SessionOpened,
        companion: CompanionSocket,
        outgoing: SimpleQueue[Message | None],
    ) -> None:
        self._generation += 1
        session = DaemonSession(self._generation, opened, self.namespace.hash_bytes)
        session.map_page(companion.get_page(session.namespace_id))
        log.info("kvd session %d open, namespace %s", session.session_id, session.fingerprint)
        with self._changed:
            self._problem = "waiting for every rank to register"
            self._backoff.hold()
            self._sequence = 0
            self._steps.clear()
            self._silent_until = 0.0
            self._session, self._outgoing = session, outgoing
            if self._epoch and self._epoch != session.epoch:
                # The cache was reset while the session was being opened.
                session.enter_epoch(self._epoch, ())
                outgoing.put(self._reset_message())
            self._changed.notify_all()

    def _lose_session(self) -> None:
        with self._changed:
            if self._session is not None:
                self._unserved_since_s = time.monotonic()
            self._session = self._outgoing = None
            self.tells_prompts = False
            self._lookups.clear()
            self._ended.clear()
            self._changed.notify_all()

    def _put(self, message: Message) -> bool:
        outgoing = self._outgoing
        if outgoing is None:
            return False
        if outgoing.qsize() >= MAX_QUEUED_MESSAGES:
            # Messages are numbered, so none may be left out: the whole session must go.
            self._note("the daemon takes no messages; session given up")
            self._lose_session()
            self._cancel()
            return False
        outgoing.put(message)
        return True

    def _cancel(self) -> None:
        call = self._call
        if call is not None:
            with contextlib.suppress(Exception):
                call.cancel()

    def _note(self, problem: str, error: Exception | None = None) -> None:
        if not self._closing.is_set():
            self._backoff.warn("kvd", problem, error)
            self._problem = problem
