"""The verbs of a session: one code path for parts of a Step and for unary calls.

A unary verb is a Step with that one part. A step is validated whole before any of it is
applied, so a refused one has changed nothing; then its parts are applied in the order of the
fields, each sequence number once, yielding between pieces so that other sessions get on.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from kvd.control import convert
from kvd.control.peers import Peer
from kvd.core import events as ev
from kvd.core.errors import JobNotRising, KvdError, SequenceGap, UnknownSession
from kvd.core.keys import JobId, LeaseId, NamespaceId, RequestId, SessionId
from kvd.core.spec import NamespaceSpec
from kvd.driver import Driver
from kvd.pieces import PIECE_KEYS, let_others_in
from kvd_proto.v1 import common_pb2
from kvd_proto.v1 import engine_pb2 as pb

REMEMBERED_ANSWERS = 64  # of each session, for messages that are sent again

MutatingAnswer = pb.StepReply | pb.EpochOpened
Apply = Callable[[], Awaitable[MutatingAnswer]]


class SequenceBook:
    """Applies each mutating message of a session once, in order."""

    def __init__(self) -> None:
        self.applied = 0
        self._answers: OrderedDict[int, MutatingAnswer | KvdError] = OrderedDict()

    def admit(self, sequence: int) -> bool:
        """True for the next number, which is used up by this; False for an old one."""
        if sequence == self.applied + 1:
            self.applied = sequence
            return True
        if 1 <= sequence <= self.applied:
            return False
        raise SequenceGap(f"sequence {sequence} came where {self.applied + 1} was due", "sequence")

    def remember(self, sequence: int, answer: MutatingAnswer | KvdError) -> None:
        """Keep the answer for a repetition; the oldest is forgotten."""
        self._answers[sequence] = answer
        if len(self._answers) > REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)

    def answer_again(self, sequence: int) -> MutatingAnswer:
        """What the first one was answered; without verdicts where that is forgotten."""
        answer = self._answers.get(sequence, pb.StepReply(sequence=sequence))
        if isinstance(answer, KvdError):
            raise answer
        return answer


@dataclass(slots=True, eq=False)
class LiveSession:
    """What control knows of one open session."""

    id: SessionId
    namespace: NamespaceId
    spec: NamespaceSpec
    peer: Peer
    engine_id: str
    world_size: int
    book: SequenceBook = field(default_factory=SequenceBook)
    last_job: int = 0  # the highest id that a message named
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # mutating messages go one by one


class Sessions:
    """Open sessions by id."""

    def __init__(self) -> None:
        self.by_id: dict[SessionId, LiveSession] = {}

    def of(self, peer: Peer, session: int) -> LiveSession:
        """The peer's own session; UnknownSession for any other."""
        live = self.by_id.get(SessionId(session))
        if live is None or live.peer is not peer:
            raise UnknownSession(f"the caller has no open session {session}", "session_id")
        return live


@dataclass(frozen=True, slots=True, eq=False)
class StepParts:
    """A validated step."""

    touches: tuple[ev.Touched, ...]
    loads: tuple[ev.LoadRequested, ...]
    stores: tuple[ev.StoreRequested, ...]
    hand_offs: tuple[ev.HandOffRequested, ...]
    completed: tuple[JobId, ...]
    released: tuple[LeaseId, ...]
    ended: tuple[RequestId, ...]
    end_step: bool
    about: ev.RequestContext | None = None  # whose jobs were completed


def step_parts(live: LiveSession, step: pb.Step) -> StepParts:
    """Check every part of the step; InvalidArgument names the first that is wrong."""
    convert.check_count(len(step.touches), convert.MAX_TOUCHES_PER_STEP, "touches")
    convert.check_count(len(step.loads), convert.MAX_JOBS_PER_STEP, "loads")
    convert.check_count(len(step.stores), convert.MAX_JOBS_PER_STEP, "stores")
    convert.check_count(len(step.hand_offs), convert.MAX_HAND_OFFS_PER_STEP, "hand_offs")
    budget = convert.KeyBudget()
    touches = [convert.touch_events(live.id, t, live.spec, budget) for t in step.touches]
    return StepParts(
        touches=tuple(touch for several in touches for touch in several),
        loads=tuple(convert.load_event(live.id, j, live.spec, budget) for j in step.loads),
        stores=tuple(convert.store_event(live.id, j, live.spec, budget) for j in step.stores),
        hand_offs=tuple(
            run
            for hand_off in step.hand_offs
            for run in convert.hand_off_events(live.id, hand_off, live.spec, budget)
        ),
        completed=(
            *convert.job_ids(step.completed_loads, "completed_loads"),
            *convert.job_ids(step.completed_stores, "completed_stores"),
        ),
        released=convert.lease_ids(step.released_leases, "released_leases"),
        ended=(
            *convert.request_ids(step.preempted_request_ids, "preempted_request_ids"),
            *convert.request_ids(step.finished_request_ids, "finished_request_ids"),
        ),
        end_step=step.end_step,
    )


class Verbs:
    """Takes validated parts to the driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def lookup(self, live: LiveSession, messages: Sequence[pb.Query]) -> list[pb.Answer]:
        """Answers in the order of the queries. Not numbered: it may be asked again."""
        queries = convert.queries(messages, live.spec)
        answers = await self._driver.lookup(live.id, queries)
        return [convert.answer_message(answer) for answer in answers]

    async def step(
        self, live: LiveSession, step: pb.Step, about: common_pb2.ReqContext | None = None
    ) -> pb.StepReply:
        """Apply the step once; a repeated number gets the first one's answer.

        `about` is the request of an acknowledgement, where it names one.
        """

        async def apply() -> pb.StepReply:
            parts = step_parts(live, step)
            if about is not None and about.ByteSize():
                parts = replace(parts, about=convert.request_context(about))
            return await self._apply(live, step.sequence, parts)

        answer = await self._once(live, step.sequence, apply)
        return answer if isinstance(answer, pb.StepReply) else pb.StepReply(sequence=step.sequence)

    async def reset_cache(self, live: LiveSession, reset: pb.ResetCache) -> pb.EpochOpened:
        """Move the session to its own new epoch, once."""

        async def apply() -> pb.EpochOpened:
            epoch = convert.epoch_name(reset.epoch, least=1)
            token = self._driver.next_token()
            return convert.epoch_message(self._driver.call(ev.EpochChanged(token, live.id, epoch)))

        answer = await self._once(live, reset.sequence, apply)
        return answer if isinstance(answer, pb.EpochOpened) else pb.EpochOpened()

    async def _once(self, live: LiveSession, sequence: int, apply: Apply) -> MutatingAnswer:
        """Apply unless the number is old. A caller that gives up doesn't stop it half-way."""
        applying = asyncio.ensure_future(self._in_turn(live, sequence, apply))
        applying.add_done_callback(_retrieve)
        return await asyncio.shield(applying)

    async def _in_turn(self, live: LiveSession, sequence: int, apply: Apply) -> MutatingAnswer:
        async with live.turn:
            if not live.book.admit(sequence):
                return live.book.answer_again(sequence)
            try:
                answer = await apply()
            except KvdError as error:
                # A copy: the raised one holds on to frames, and so to the message.
                live.book.remember(sequence, copy.copy(error))
                raise
            live.book.remember(sequence, answer)
            return answer

    async def _apply(self, live: LiveSession, sequence: int, parts: StepParts) -> pb.StepReply:
        driver = self._driver
        for touch in parts.touches:
            await self._touch(touch)
        reply = pb.StepReply(sequence=sequence)
        used: set[int] = set()
        for load in parts.loads:
            reply.verdicts.append(await self._load(live, load, used))
        for store in parts.stores:
            reply.verdicts.append(await self._store(live, store, used))
        live.last_job = max(live.last_job, *used, 0)
        for hand_off in parts.hand_offs:
            await self._hand_off(hand_off)
        if parts.completed:
            driver.call(ev.JobsCompleted(live.id, parts.completed, parts.about))
        if parts.released:
            driver.call(ev.LeasesReleased(live.id, parts.released))
        if parts.ended:
            driver.call(ev.RequestsEnded(live.id, parts.ended))
        if parts.end_step:
            driver.call(ev.StepEnded(live.id))
        return reply

    async def _touch(self, touch: ev.Touched) -> None:
        for start in range(0, len(touch.keys), PIECE_KEYS):
            keys = touch.keys[start : start + PIECE_KEYS]
            self._driver.call(ev.Touched(touch.session, touch.context, touch.group, keys))
            await let_others_in()

    async def _hand_off(self, hand_off: ev.HandOffRequested) -> None:
        for start in range(0, len(hand_off.keys), PIECE_KEYS):
            self._driver.call(replace(hand_off, keys=hand_off.keys[start : start + PIECE_KEYS]))
            await let_others_in()

    def _require_rising(
        self, live: LiveSession, job: JobId, kind: ev.JobKind, used: set[int]
    ) -> None:
        """Raise JobNotRising for an id of an earlier message or of this one, which its ranks hear.

        Within a message ids may come in any order. The core itself refuses that of a live job.
        """
        taken = job <= live.last_job or job in used
        used.add(job)
        if taken and job not in self._driver.jobs.live(live.id):
            error = JobNotRising(f"job {job} comes after job {live.last_job}", "job_id")
            self._driver.refuse(live.id, job, kind, error)
            raise error

    async def _load(
        self, live: LiveSession, load: ev.LoadRequested, used: set[int]
    ) -> pb.JobVerdict:
        event = ev.LoadRequested(
            self._driver.next_token(), load.session, load.job, load.context, load.runs
        )
        try:
            self._require_rising(live, load.job, ev.JobKind.LOAD, used)
            verdict = convert.verdict_message(self._driver.load(event))
        except UnknownSession:
            raise
        except KvdError as error:
            verdict = convert.refusal_message(load.job, ev.JobKind.LOAD, error.reason)
        await let_others_in()
        return verdict

    async def _store(
        self, live: LiveSession, store: ev.StoreRequested, used: set[int]
    ) -> pb.JobVerdict:
        # A job that clashes with the session's state is refused alone, so that the rest of an
        # ordered, half-applied step is not lost with it.
        try:
            self._require_rising(live, store.job, ev.JobKind.STORE, used)
            verdict = convert.verdict_message(await self._driver.store(store))
        except UnknownSession:
            raise
        except KvdError as error:
            verdict = convert.refusal_message(store.job, ev.JobKind.STORE, error.reason)
        await let_others_in()
        return verdict


def _retrieve(applying: asyncio.Future[MutatingAnswer]) -> None:
    # Where the caller gave up nobody else takes the refusal out.
    if not applying.cancelled():
        applying.exception()
