"""The verbs of a session: one code path for parts of a Step and for unary calls.

A unary verb is a Step with that one part. A step is validated whole before any of it is
applied, so a refused one has changed nothing; then its parts are applied in the order of the
fields, each sequence number once, yielding between pieces so that other sessions get on.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from kvd.control import convert
from kvd.control.access.peers import Peer
from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.errors import JobNotRising, KvdError, SequenceGap, UnknownSession
from kvd.core.keys import JobId, LeaseId, NamespaceId, RequestId, SessionId
from kvd.core.spec import NamespaceSpec
from kvd.core.told import ToldRequest
from kvd.runtime.batching import PIECE_IDS, PIECE_KEYS, PIECE_TOLD, stores_together
from kvd.runtime.driver import Driver
from kvd.runtime.joint_stores import store_together
from kvd.runtime.recorder import Recorder, RequestRecord
from kvd.runtime.told_lookups import MAX_COUNTED, LookupFigures, ToldLookups
from kvd.runtime.turns import Pace
from kvd_proto.limits import (
    MAX_PARTS_PER_STEP,
    MAX_PROMPT_BLOCKS,
    MAX_REQUESTS_TOLD,
    MAX_RUNS,
    MAX_STRING_BYTES,
)
from kvd_proto.v1 import common_pb2
from kvd_proto.v1 import engine_pb2 as pb

REMEMBERED_ANSWERS = 64  # of each session, for messages that are sent again
REMEMBERED_BYTES = 256 * 1024  # of those, encoded; the last one may pass it

# Of a pace: a touch and a load, whatever their size, and keys that take as long as a unit. To let
# others in costs as much as a small touch, so it is done after some of them.
TOUCH_UNITS = 8
LOAD_UNITS = 22
KEYS_A_UNIT = 8

MutatingAnswer = pb.StepReply | pb.EpochOpened
Apply = Callable[[], Awaitable[MutatingAnswer]]


class SequenceBook:
    """Applies each mutating message of a session once, in order."""

    def __init__(self) -> None:
        self.applied = 0
        self._answers: OrderedDict[int, MutatingAnswer | KvdError] = OrderedDict()
        self._bytes = 0

    def admit(self, sequence: int) -> bool:
        """True for the next number, which is used up by this; False for an old one."""
        if sequence == self.applied + 1:
            self.applied = sequence
            return True
        if 1 <= sequence <= self.applied:
            return False
        raise SequenceGap(f"sequence {sequence} came where {self.applied + 1} was due", "sequence")

    def remember(self, sequence: int, answer: MutatingAnswer | KvdError) -> None:
        """Keep the answer for a repetition; the oldest are forgotten."""
        self._answers[sequence] = answer
        self._bytes += _bytes_of(answer)
        while len(self._answers) > REMEMBERED_ANSWERS or (
            self._bytes > REMEMBERED_BYTES and len(self._answers) > 1
        ):
            _, oldest = self._answers.popitem(last=False)
            self._bytes -= _bytes_of(oldest)

    def answer_again(self, sequence: int) -> MutatingAnswer:
        """What the first one was answered; without verdicts where that is forgotten."""
        answer = self._answers.get(sequence, pb.StepReply(sequence=sequence))
        if isinstance(answer, KvdError):
            raise copy.copy(answer)  # the kept one would gather the frames of every repetition
        return answer


def _bytes_of(answer: MutatingAnswer | KvdError) -> int:
    return 0 if isinstance(answer, KvdError) else answer.ByteSize()


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

    @property
    def in_log(self) -> dict[str, int | str]:
        """Whom lines of it are about."""
        return {
            "user": self.peer.uid,
            "tenant": self.spec.tenant,
            "engine": self.engine_id,
            "session": self.id,
            "namespace": self.namespace,
        }


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
    lookups: LookupFigures | None
    told: tuple[ToldRequest, ...]
    released: tuple[LeaseId, ...]
    ended: tuple[RequestId, ...]
    end_step: bool


async def step_parts(live: LiveSession, step: pb.Step, pace: Pace) -> StepParts:
    """Check every part of the step; InvalidArgument names the first that is wrong."""
    convert.check_count(len(step.touches), MAX_PARTS_PER_STEP, "touches")
    convert.check_count(len(step.loads), MAX_PARTS_PER_STEP, "loads")
    convert.check_count(len(step.stores), MAX_PARTS_PER_STEP, "stores")
    convert.check_count(len(step.hand_offs), MAX_PARTS_PER_STEP, "hand_offs")
    budget = convert.KeyBudget()
    touches: list[ev.Touched] = []
    for touch in step.touches:
        await pace.spend(_units(touch))
        touches += convert.touch_events(live.id, touch, live.spec, budget)
    loads: list[ev.LoadRequested] = []
    for load in step.loads:
        await pace.spend(_units(load))
        loads.append(convert.load_event(live.id, load, live.spec, budget))
    stores: list[ev.StoreRequested] = []
    for store in step.stores:
        await pace.spend(_units(store))
        stores.append(convert.store_event(live.id, store, live.spec, budget))
    hand_offs: list[ev.HandOffRequested] = []
    for hand_off in step.hand_offs:
        await pace.spend(_units(hand_off))
        hand_offs += convert.hand_off_events(live.id, hand_off, live.spec, budget)
    preempted, finished = step.preempted_request_ids, step.finished_request_ids
    return StepParts(
        touches=tuple(touches),
        loads=tuple(loads),
        stores=tuple(stores),
        hand_offs=tuple(hand_offs),
        lookups=convert.lookup_figures(step),
        told=convert.told_requests(step, live.spec),
        released=convert.lease_ids(step.released_leases),
        ended=(
            *await convert.request_ids(preempted, "preempted_request_ids", pace),
            *await convert.request_ids(finished, "finished_request_ids", pace),
        ),
        end_step=step.end_step,
    )


def _units(part: pb.Touch | pb.LoadJob | pb.StoreJob | pb.HandOff) -> int:
    """What it takes to look at a part of a step, in a pace's units."""
    return min(len(part.runs), MAX_RUNS) + convert.context_units(part.context)


class Verbs:
    """Brings the checked parts of a message to the driver."""

    def __init__(self, driver: Driver, told: ToldLookups, recorder: Recorder) -> None:
        self._driver = driver
        self._told = told
        self._recorder = recorder

    async def lookup(self, live: LiveSession, messages: Sequence[pb.Query]) -> list[pb.Answer]:
        """Answers in the order of the queries. Not numbered: it may be asked again."""
        queries = await convert.queries(messages, live.spec, self._pace(live))
        answers = await self._driver.lookup(live.id, queries)
        return [convert.answer_message(answer) for answer in answers]

    async def complete_load(
        self, live: LiveSession, sequence: int, context: common_pb2.ReqContext
    ) -> None:
        """End the leases of a request that has what it loaded; numbered like a step."""

        async def apply() -> pb.StepReply:
            request = convert.request_context(context).request
            await self._release(live, self._driver.machine.leases_of(live.id, request))
            return pb.StepReply(sequence=sequence)

        await self._once(live, sequence, apply)

    async def step(self, live: LiveSession, step: pb.Step) -> pb.StepReply:
        """Apply the step once; a repeated number gets the first one's answer."""

        async def apply() -> pb.StepReply:
            parts = await step_parts(live, step, self._pace(live))
            if self._recorder.is_on:
                self._record(live, step)
            return await self._apply(live, step.sequence, parts)

        answer = await self._once(live, step.sequence, apply)
        return answer if isinstance(answer, pb.StepReply) else pb.StepReply(sequence=step.sequence)

    def _record(self, live: LiveSession, step: pb.Step) -> None:
        """Of each request that began, its whole prompt."""
        width = live.spec.hash_bytes
        epoch = self._driver.machine.epoch_of(live.id)
        fields = self._driver.pool.namespace_fields(live.namespace)
        block_tokens = int(fields.get("tokens_per_block", "1"))
        for told in islice(step.requests, MAX_REQUESTS_TOLD):
            hashes = told.prompt_hashes[: width * MAX_PROMPT_BLOCKS]
            if len(hashes) % width:
                continue
            account = told.account[:MAX_STRING_BYTES]
            self._recorder.put(
                RequestRecord(
                    self._driver.clock.now_ns(),
                    live.namespace,
                    epoch,
                    account,
                    min(told.prompt_tokens, MAX_COUNTED),
                    width,
                    hashes,
                    bool(hashes) or told.prompt_tokens < block_tokens,
                )
            )

    async def reset_cache(self, live: LiveSession, reset: pb.ResetCache) -> pb.EpochOpened:
        """Move the session to its own new epoch, once."""

        async def apply() -> pb.EpochOpened:
            epoch = convert.epoch_name(reset.epoch, least=1)
            return convert.epoch_message(self._driver.call(ev.EpochChanged(live.id, epoch)))

        answer = await self._once(live, reset.sequence, apply)
        return answer if isinstance(answer, pb.EpochOpened) else pb.EpochOpened()

    async def refuse(self, live: LiveSession, sequence: int, error: KvdError) -> None:
        """Raise the error for a message that could not be read; its number is used up."""

        async def apply() -> MutatingAnswer:
            raise error

        await self._once(live, sequence, apply)

    def _pace(self, live: LiveSession) -> Pace:
        return Pace(self._driver.turns, live.peer.uid)

    async def _once(self, live: LiveSession, sequence: int, apply: Apply) -> MutatingAnswer:
        """Apply unless the number is old. A caller that gives up doesn't stop it half-way.

        One that gives up before its turn leaves the line, and has used up no number: what stands
        there is bounded as calls are.
        """
        await live.turn.acquire()
        applying = asyncio.ensure_future(self._in_turn(live, sequence, apply))
        applying.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(applying)
        finally:
            del applying  # a refusal in it holds on to this frame, and so to the message

    async def _in_turn(self, live: LiveSession, sequence: int, apply: Apply) -> MutatingAnswer:
        """The turn is the session's; it ends with this."""
        try:
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
        finally:
            live.turn.release()

    async def _release(self, live: LiveSession, leases: tuple[LeaseId, ...]) -> None:
        for some in _cut(leases):
            self._driver.call(ev.LeasesReleased(live.id, some))
            await self._breathe_after(live, some)

    async def _apply(self, live: LiveSession, sequence: int, parts: StepParts) -> pb.StepReply:
        driver = self._driver
        for start in range(0, len(parts.told), PIECE_TOLD):
            told = parts.told[start : start + PIECE_TOLD]
            driver.call(ev.RequestsTold(live.id, told, live.engine_id))
            if len(told) == PIECE_TOLD:
                await driver.let_others_in(live.id)
        pace = self._pace(live)
        for touch in parts.touches:
            await self._touch(touch, pace)
        reply = pb.StepReply(sequence=sequence)
        used: set[int] = set()
        for load in parts.loads:
            reply.verdicts.append(self._begin_load(live, load, used))
            await pace.spend(LOAD_UNITS + sum(len(run.keys) for run in load.runs) // KEYS_A_UNIT)
        for stores in stores_together(parts.stores):
            reply.verdicts.extend(await self._begin_stores(live, stores, used))
        live.last_job = max(live.last_job, *used, 0)
        for hand_off in parts.hand_offs:
            await self._hand_off(hand_off)
        await self._release(live, parts.released)
        for requests in _cut(parts.ended):
            await self._end(live, requests)
        if parts.lookups is not None:
            self._told.add(live.namespace, live.spec.tenant, parts.lookups)
        if parts.end_step:
            driver.call(ev.StepEnded(live.id))
        return reply

    async def _end(self, live: LiveSession, requests: tuple[RequestId, ...]) -> None:
        left = self._driver.call(ev.RequestsEnded(live.id, requests))
        while left:
            await self._driver.let_others_in(live.id)
            left = self._driver.call(ev.RequestsEnded(live.id, left))
        await self._breathe_after(live, requests)

    async def _breathe_after(self, live: LiveSession, piece: Sequence[object]) -> None:
        if len(piece) == PIECE_IDS:
            await self._driver.let_others_in(live.id)

    async def _touch(self, touch: ev.Touched, pace: Pace) -> None:
        for start in range(0, len(touch.keys), PIECE_KEYS):
            keys = touch.keys[start : start + PIECE_KEYS]
            first = touch.first_block + start
            self._driver.call(replace(touch, keys=keys, first_block=first))
            await pace.spend(TOUCH_UNITS + len(keys) // KEYS_A_UNIT)

    async def _hand_off(self, hand_off: ev.HandOffRequested) -> None:
        for start in range(0, len(hand_off.keys), PIECE_KEYS):
            self._driver.call(replace(hand_off, keys=hand_off.keys[start : start + PIECE_KEYS]))
            await self._driver.let_others_in(hand_off.session)

    def _require_rising(
        self, live: LiveSession, job: JobId, kind: ev.JobKind, used: set[int]
    ) -> None:
        """Raise JobNotRising for an id of an earlier message or of this one, which its ranks hear.

        Within a message ids may come in any order. The core itself refuses that of a live job.
        """
        is_twice = job in used
        taken = job <= live.last_job or is_twice
        used.add(job)
        if taken and job not in self._driver.jobs.live(live.id):
            late = f"comes after job {live.last_job}"
            said = "is twice in one message" if is_twice else late
            error = JobNotRising(f"job {job} {said}", "job_id")
            self._driver.refuse(live.id, job, kind, error)
            raise error

    async def _begin_stores(
        self, live: LiveSession, stores: Sequence[ev.StoreRequested], used: set[int]
    ) -> list[pb.JobVerdict]:
        """Verdicts in the order of the stores."""
        said: dict[JobId, act.Verdict] = {}
        fresh = [store for store in stores if store.job > live.last_job and store.job not in used]
        if len(fresh) > 1 and len({store.job for store in fresh}) == len(fresh):
            said = await store_together(self._driver, fresh)
            used.update(said)
        return [
            convert.verdict_message(said[store.job])
            if store.job in said
            else await self._begin_store(live, store, used)
            for store in stores
        ]

    def _begin_load(
        self, live: LiveSession, load: ev.LoadRequested, used: set[int]
    ) -> pb.JobVerdict:
        try:
            self._require_rising(live, load.job, ev.JobKind.LOAD, used)
            return convert.verdict_message(self._driver.load(load))
        except KvdError as error:
            return _refused_alone(load.job, ev.JobKind.LOAD, error)

    async def _begin_store(
        self, live: LiveSession, store: ev.StoreRequested, used: set[int]
    ) -> pb.JobVerdict:
        try:
            self._require_rising(live, store.job, ev.JobKind.STORE, used)
            verdict = convert.verdict_message(await self._driver.store(store))
        except KvdError as error:
            verdict = _refused_alone(store.job, ev.JobKind.STORE, error)
        await self._driver.let_others_in(live.id)
        return verdict


def _refused_alone(job: JobId, kind: ev.JobKind, error: KvdError) -> pb.JobVerdict:
    """Refuse what clashes with the session's state, and nothing else of an ordered, half-applied
    step. That the session is over concerns all of it, and is raised.
    """
    if isinstance(error, UnknownSession):
        raise error
    return convert.refusal_message(job, kind, error)


Id = TypeVar("Id")


def _cut(ids: tuple[Id, ...]) -> Iterator[tuple[Id, ...]]:
    """The ids in pieces of at most PIECE_IDS."""
    for start in range(0, len(ids), PIECE_IDS):
        yield ids[start : start + PIECE_IDS]


def _retrieve(applying: asyncio.Future[MutatingAnswer]) -> None:
    # Where the caller gave up nobody else takes the refusal out.
    if not applying.cancelled():
        applying.exception()
