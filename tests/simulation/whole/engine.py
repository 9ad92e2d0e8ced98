"""An engine that speaks the protocol by itself: draws wide, checks every byte, misbehaves.

Most of its verbs go straight to the driver; some go over its stream as messages, also twice, out
of order, or as nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.control.access.peers import Role
from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.events import JobKind, JobStatus, LeaseMode
from kvd.core.keys import JobId, RequestId, SessionId
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.v1 import engine_pb2 as pb
from tests.simulation.whole import messages
from tests.simulation.whole.daemon import Stream
from tests.simulation.whole.drawn import (
    BLOCKS,
    CHAINS,
    DONE,
    HIT,
    LONGEST,
    Found,
    Job,
    batch,
    hash_of,
    key_of,
)
from tests.simulation.whole.movers import SimMover
from tests.simulation.whole.ranks import Engine, Wish
from tests.simulation.whole.raw_wish import RawWish


@dataclass(eq=False)
class RawEngine(Engine):
    """Its verbs are drawn, and so are its blocks."""

    excused: Callable[[RawEngine, Found], bool] = lambda _engine, _found: False
    is_eager: bool = False  # it stores and loads as soon as a rank has registered

    # -- its life -----------------------------------------------------------------------------

    def start(self) -> None:
        """The processes begin: new memory, nothing known."""
        if self.starts == 0:
            self._stream: Stream | None = None
            self._session: SessionId | None = None
            self.is_ready = False
            self.requests: list[str] = []
            self.jobs: dict[int, Job] = {}
            self.stores_done = self.last_job = self.sequence = self.pressed = 0
            self.sent: dict[int, pb.SessionRequest] = {}
            self.answers: dict[int, bytes] = {}
            self.told: set[tuple[int, int]] = set()  # of one daemon: jobs and movers
        super().start()
        self.free = [list(range(BLOCKS)) for _ in self.model.widths]
        self.jobs.clear()
        self.found.clear()
        self.requests.clear()

    @property
    def session(self) -> SessionId | None:
        return self._session

    @property
    def stream(self) -> Stream | None:
        return self._stream

    @property
    def has_session(self) -> bool:
        return self.session is not None and self.is_ready

    def open_session(self) -> None:
        """Ask for one, unless that is under way or done."""
        if self._stream is None or self._stream.is_cut:
            self._open()

    def _open(self) -> None:
        assert self.daemon is not None
        self._lose_session()
        if self.scheduler is None or self.scheduler.ended:
            self.scheduler = self.daemon.greet(self.model.uid, Role.SCHEDULER, "sim")
        stream = self._stream = Stream(self.daemon, self.scheduler, lambda m: self._hear(stream, m))
        opening = pb.OpenSession(
            identity=self.identity,
            namespace=self.model.fields,
            world_size=len(self.model.ranks),
            epoch=self.epoch,
            own_epoch=bool(self.epoch),
        )
        stream.send(pb.SessionRequest(open=opening))

    def rank_is_here(self, rank: int, mover: SimMover) -> None:
        if self.is_eager and self.session is not None:
            self._use_at_once()

    def _use_at_once(self) -> None:
        """Not waiting for the word that its ranks are ready."""
        try:
            self.random.choice([self.store, self._load])()
        except KvdError as error:
            self.journal(f"refused {error.reason}")

    def forget_session(self) -> None:
        """Stream and scheduler are no more."""
        self.scheduler = self._stream = None
        self._lose_session()

    def lose_daemon(self) -> None:
        """The daemon is gone with its movers: every open job has failed."""
        self.forget_session()
        super().lose_daemon()
        for number in list(self.jobs):
            self._fail(number)
        self.told.clear()

    def _lose_session(self) -> None:
        self._session = None
        self.is_ready = False
        self.found.clear()
        self.sequence = 0
        self.sent.clear()
        self.answers.clear()

    def lose_stream(self) -> None:
        """Only the connection breaks; it comes back."""
        if self._stream is not None:
            self._stream.cut()
        self._lose_session()

    # -- news ---------------------------------------------------------------------------------

    def _hear(self, stream: Stream, message: pb.SessionResponse) -> None:
        if stream is not self.stream:
            return
        kind = message.WhichOneof("kind")
        if kind == "opened":
            self._session = SessionId(message.opened.session_id)
            if message.opened.epoch.epoch != self.epoch:
                raise AssertionError("a session in another epoch than was asked for")
        elif kind == "ranks_ready":
            self.is_ready = True
        elif kind == "rank_lost":
            self.is_ready = False
        elif kind == "epoch":
            if message.epoch.epoch:
                self.epoch = message.epoch.epoch
        elif kind == "step":
            self._hear_again(message.step)

    def _hear_again(self, reply: pb.StepReply) -> None:
        """A step that was sent twice is answered twice the same (I11)."""
        body = reply.SerializeToString(deterministic=True)
        before = self.answers.setdefault(reply.sequence, body)
        assert body == before, f"step {reply.sequence} was answered in two ways"

    def look(self) -> None:
        """Read the boards; bury the movers that have ended."""
        for number, job in list(self.jobs.items()):
            for rank, mover in list(job.waiting.items()):
                if not mover.is_alive:
                    self._read(mover)
                    if number in self.jobs and rank in job.waiting:
                        self.acknowledge(number, rank, JobStatus.FAILED)
        for rank, mover in list(self.movers.items()):
            self._read(mover)
            if not mover.is_alive:
                del self.movers[rank]

    def _read(self, mover: SimMover) -> None:
        while mover.board:
            record = mover.board.popleft()
            name = (record.job_id, int(mover.mover))
            assert name not in self.told, f"a board tells twice of job {record.job_id}"
            self.told.add(name)
            job = self.jobs.get(record.job_id)
            # A board tells also of jobs that were given up with an earlier registration.
            waiting = job.waiting.items() if job is not None else ()
            for rank in [rank for rank, each in waiting if each is mover]:
                self.acknowledge(record.job_id, rank, JobStatus(record.status))

    def acknowledge(self, number: int, rank: int, status: JobStatus) -> None:
        job = self.jobs[number]
        del job.waiting[rank]
        job.failed |= status not in DONE
        if job.kind is JobKind.LOAD:
            loading = self.memory[rank].loading[job.group]
            for block in (b for row in job.blocks for b in row):
                if loading.get(block) == number:
                    del loading[block]
            if status is JobStatus.DONE and job.is_checked:
                self._check(job, rank)
        if not job.waiting:
            self._end(number, job)

    def rank_has_failed(self, rank: int) -> None:
        for number, job in list(self.jobs.items()):
            if rank in job.waiting:
                self.acknowledge(number, rank, JobStatus.FAILED)

    def _fail(self, number: int) -> None:
        for rank in list(self.jobs[number].waiting):
            self.acknowledge(number, rank, JobStatus.FAILED)

    def _end(self, number: int, job: Job) -> None:
        del self.jobs[number]
        if not job.failed:
            if job.kind is JobKind.STORE:
                self.stores_done += 1
            else:
                self.loads_done += 1
        taken = {b for row in job.blocks for b in row if b < BLOCKS}
        self.free[job.group] += sorted(taken)

    def _check(self, job: Job, rank: int) -> None:
        """I1: every block that was loaded has its bytes."""
        memory = self.memory[rank]
        for key, row in zip(job.keys, job.blocks, strict=True):
            for place, block in enumerate(row):
                if block == NULL_ENGINE_BLOCK:
                    continue
                wanted = self.content(job.group, rank, job.epoch, job.account, key, place)
                assert memory.read(job.group, block) == wanted, (
                    f"{self.name}: wrong bytes loaded for {key.hex()} on rank {rank} (I1)"
                )

    def content(
        self, group: int, rank: int, epoch: str, account: str, key: bytes, place: int
    ) -> int:
        """What this block's part is, by all that it may depend on."""
        shard = self.model.ranks[rank]
        owner = f"{self.name}.{self.starts}" if self.model.fields.unshared else ""
        return self.meanings.of(self.model.name, owner, epoch, account, group, shard, key, place)

    # -- what it does -------------------------------------------------------------------------

    def act(self) -> None:
        """One step: read boards, then do something at random."""
        self.look()
        if not self.usable:
            if self.daemon is not None:
                self.connect(self.daemon)
            return
        dice = self.random.random()
        try:
            for most, what in _HABITS:
                if dice < most:
                    what(self)
                    return
        except KvdError as error:
            self.journal(f"refused {error.reason}")
            if error.reason == "UNKNOWN_SESSION":
                self._lose_session()

    def keys(self, account: str, count: int | None = None) -> list[bytes]:
        """Of a prompt: chains share their first blocks."""
        random = self.random
        chain, length = random.randrange(1, CHAINS), random.randrange(1, LONGEST + 1)
        keys = [
            key_of(chain, place, account) for place in range(length if count is None else count)
        ]
        if random.random() < 0.2:
            keys += random.choices(keys, k=2)  # repeated
        return keys

    def context(self) -> ev.RequestContext:
        random = self.random
        if self.requests and random.random() < 0.2:
            name = random.choice(self.requests)  # once more
        else:
            name = f"{self.name}-{random.randrange(10_000)}"
            self.requests = [*self.requests[-20:], name]
        return ev.RequestContext(RequestId(name), random.choice(["", "", "", "salt"]))

    def _look_up(self) -> None:
        random = self.random
        queries, named = [], []
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            context, group = self.context(), random.randrange(len(self.model.widths))
            keys = self.keys(context.account)
            mode = random.choice([LeaseMode.PREFIX, LeaseMode.PREFIX, LeaseMode.ALL])
            queries.append(ev.Query(context, group, batch(keys), mode))
            named.append(keys)
        answers = self.call(ev.LookupRequested(self.session_id, tuple(queries)))
        for query, keys, answer in zip(queries, named, answers, strict=True):
            hits = [key for key, s in zip(keys, answer.statuses, strict=True) if s & 3 == HIT]
            self.journal(f"lookup {''.join(str(s & 3) for s in answer.statuses)}")
            if answer.lease is not None:
                run = len(hits)
                if query.lease is LeaseMode.PREFIX:
                    run = next(
                        (i for i, s in enumerate(answer.statuses) if s & 3 != HIT), len(keys)
                    )
                    hits = keys[:run]
                account, request = query.context.account, query.context.request
                until = self.loop.now + 1.7
                self.journal(f"lease {answer.lease} of {request} until {until:.2f}")
                self.found.append(
                    Found(
                        query.group, hits, account, answer.lease, until, request, self.loop.now_ns()
                    )
                )

    @property
    def session_id(self) -> SessionId:
        assert self.session is not None, "it is not connected"
        return self.session

    def call(self, event: ev.Event) -> Any:
        assert self.daemon is not None
        return self.daemon.driver.call(event)

    def _load(self) -> None:
        """What was found; what is promised must be had. Or what nobody has looked for."""
        if self.random.random() < 0.15:
            self._load_unasked()
            return
        if not self.found:
            self._look_up()
        if not self.found:
            return
        found = self.found.pop(self.random.randrange(len(self.found)))
        context = ev.RequestContext(RequestId(found.request), found.account)
        accepted = self.start_job(JobKind.LOAD, found.group, found.keys, context)
        if accepted is not None and self.loop.now < found.until and self.usable:
            reason, ok = accepted
            allowed = ("RANKS_MISSING", "QUEUE_FULL", "DRAINING", "LIMIT_EXCEEDED")
            assert ok or reason in allowed or self.excused(self, found), (
                f"a load under lease {found.lease} is refused: {reason} (I3)"
            )
        if self.random.random() < 0.7:
            self.call(ev.LeasesReleased(self.session_id, (found.lease,)))

    def _load_unasked(self) -> None:
        """Keys that it may be storing at this moment, or that nobody has."""
        for job in self.jobs.values():
            if job.kind is JobKind.STORE and job.epoch == self.epoch:
                group, keys, account = job.group, job.keys, job.account
                break
        else:
            group, account = self.random.randrange(len(self.model.widths)), ""
            keys = self.keys(account)
        context = ev.RequestContext(RequestId("unasked"), account)
        self.start_job(JobKind.LOAD, group, list(dict.fromkeys(keys)), context)

    def store(self) -> None:
        context, group = self.context(), self.random.randrange(len(self.model.widths))
        keys = self.keys(context.account)
        self.start_job(JobKind.STORE, group, keys, context)

    def start_job(
        self, kind: JobKind, group: int, keys: list[bytes], context: ev.RequestContext
    ) -> tuple[str, bool] | None:
        width, random = self.model.widths[group], self.random
        blocks = self.take(group, len(keys), width)
        if blocks is None:
            return None
        self.last_job += 1
        number = self.last_job
        job = self.note_job(number, Job(kind, group, keys, blocks, self.epoch, context.account, {}))
        if kind is JobKind.STORE:
            self.compute(job)
        array = np.array(blocks, dtype=np.uint32).reshape(len(keys), width)
        run = ev.Run(group, batch(keys), array)
        ready = random.random() < 0.95 or self.is_plain
        early = ready and random.random() < 0.5
        if early:
            self.say_ready(number)
        if kind is JobKind.LOAD:
            event: Any = ev.LoadRequested(self.session_id, JobId(number), context, (run,))
        else:
            whole = random.random() < 0.3
            event = ev.StoreRequested(self.session_id, JobId(number), context, (run,), whole)
        verdict = self._order(number, event)
        if ready and not early and number in self.jobs:
            self.loop.outside(random.random() * 0.01, self.say_ready, number)
        return verdict

    def _order(self, number: int, event: Any) -> tuple[str, bool]:
        """Have the driver take the job; it ends by the boards, whatever is answered."""
        assert self.daemon is not None
        driver = self.daemon.driver
        try:
            if isinstance(event, ev.LoadRequested):
                verdict = driver.load(event)
            else:
                task = self.loop.create_task(driver.store(event))
                until = max(self.loop.now, self.loop.stalled_until)
                self.loop.run_until(until + 1.0, task.done)
                verdict = task.result()
        except KvdError as error:
            self.journal(f"job {number} broke {error.reason}")
            return error.reason, False
        self.journal(f"job {number} {verdict.kind.name} {verdict.accepted} {verdict.reason}")
        return verdict.reason, verdict.accepted

    def take(self, group: int, count: int, width: int) -> list[list[int]] | None:
        free = self.free[group]
        if len(free) < count * width:
            return None
        taken = [free.pop() for _ in range(count * width)]
        rows = [taken[i : i + width] for i in range(0, len(taken), width)]
        if width > 1 and self.random.random() < 0.1:
            free.append(rows[0][0])
            rows[0][0] = NULL_ENGINE_BLOCK
        return rows

    def note_job(self, number: int, job: Job) -> Job:
        self.jobs[number] = job
        job.waiting = dict(self.movers)
        if job.kind is JobKind.LOAD:
            for rank in job.waiting:
                loading = self.memory[rank].loading[job.group]
                loading.update((block, number) for row in job.blocks for block in row)
        return job

    def compute(self, job: Job) -> None:
        for rank, memory in enumerate(self.memory):
            for key, row in zip(job.keys, job.blocks, strict=True):
                for place, block in enumerate(row):
                    if block != NULL_ENGINE_BLOCK:
                        content = self.content(job.group, rank, job.epoch, job.account, key, place)
                        memory.write(job.group, block, content)

    def say_ready(self, number: int) -> None:
        job = self.jobs.get(number)
        for mover in list(job.waiting.values()) if job is not None else ():
            if self.is_plain or self.random.random() < 0.97:
                mover.mark_ready(JobId(number))

    def _end_step(self) -> None:
        self.call(ev.StepEnded(self.session_id))

    def _end_requests(self) -> None:
        if self.requests:
            name = self.random.choice(self.requests)
            self.found = [each for each in self.found if each.request != name]
            self.call(ev.RequestsEnded(self.session_id, (RequestId(name),)))

    def _release(self) -> None:
        if self.found:
            found = self.found.pop(self.random.randrange(len(self.found)))
            self.call(ev.LeasesReleased(self.session_id, (found.lease,)))

    def _touch(self) -> None:
        context, group = self.context(), self.random.randrange(len(self.model.widths))
        keys = self.keys(context.account)
        self.call(ev.Touched(self.session_id, context, group, batch(keys)))

    def _hand_off(self) -> None:
        context, group = self.context(), self.random.randrange(len(self.model.widths))
        keys = self.keys(context.account)
        lasting_ns = self.random.randrange(1, 60_000) * 1_000_000
        self.call(ev.HandOffRequested(self.session_id, context, group, batch(keys), lasting_ns))

    def press(self) -> None:
        """Store on and on, so that the others have to be served beside it."""
        for group in range(len(self.model.widths)):
            self.pressed += 1
            chain = 2_000_000 + hash_of(self.name) * 1_000 + self.pressed
            keys = [key_of(chain, 10 + place, "") for place in range(LONGEST)]
            context = ev.RequestContext(RequestId("press"))
            self.start_job(JobKind.STORE, group, keys, context)

    def wish(self) -> Wish:
        return RawWish(self)

    def leave(self) -> None:
        """Whoever begins jobs at random leaves them as they are."""

    def session_epoch(self, epoch: str) -> None:
        """Its cache is reset: from now on it is in an epoch of its own."""
        self.found.clear()
        self.call(ev.EpochChanged(self.session_id, epoch))
        self.epoch = epoch


_HABITS: list[tuple[float, Callable[[RawEngine], None]]] = [
    (0.30, RawEngine._look_up),
    (0.55, RawEngine.store),
    (0.72, RawEngine._load),
    (0.80, RawEngine._end_step),
    (0.85, RawEngine._end_requests),
    (0.88, RawEngine._release),
    (0.91, RawEngine._touch),
    (0.93, RawEngine._hand_off),
    (1.01, messages.send_step),
]
