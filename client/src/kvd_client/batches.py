"""Blocks moved in batches by an engine that is scheduler and only rank in one process.

Where `Scheduler` and `Worker` serve an engine in steps, this serves one that asks and waits: is
it there, bring these, keep these. Any thread may call. Nothing raises for an absent, killed, hung
or slow daemon: then nothing is found, and a store or load fails. ValueError is for keys and blocks
that no daemon would take. Every wait has a bound, and a load returns only when no copy can touch
its blocks any more.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from kvd_client.arguments import require_kind
from kvd_client.connection import SchedulerConnection, first_met
from kvd_client.draft import (
    BlockRun,
    JobDraft,
    QueryDraft,
    StepDraft,
    are_hashes,
    each_in_parts,
    wire_text,
)
from kvd_client.forks import keep_from_children
from kvd_client.identity import EngineIdentity, NamespaceFields
from kvd_client.lease_renewal import LeaseRenewal
from kvd_client.leased_answers import LeasedAnswers
from kvd_client.scheduler.hits import Flags, Statuses
from kvd_client.scheduler.lookup import ASK_AGAIN_MAX_S, KEYS_PER_CALL
from kvd_client.scheduler.plan import StepPlan
from kvd_client.scheduler.sent_jobs import REPORT_GRACE_S
from kvd_client.session import DaemonSession
from kvd_client.worker import GroupLayout, SharedMemory, Worker
from kvd_client.worker.worker import END_MOVER_TIMEOUT_S, POLL_MAX_S, POLL_S, POLL_SHARE
from kvd_proto.key_status import HIT, PENDING, RETRY, STATUS_BITS
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.limits import U32_MAX
from kvd_proto.v1 import common_pb2

log = logging.getLogger(__name__)

_RAISED = Exception, KeyboardInterrupt, SystemExit  # what handlers of signals raise

MAX_UNTOLD_REQUESTS = 256  # that are over; then the daemon is told without a step of other work
QUERIES_PER_CALL = 64  # each costs the daemon a fifth of a millisecond, whatever its size
FIRST_PAUSE = 10  # times POLL_S, before a question is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How long calls wait. Every `_s` is in seconds."""

    lookup_deadline_s: float = 0.5  # for an answer of the daemon's
    retry_deadline_s: float = 0.1  # while it says 'ask again'
    pending_deadline_s: float = 1.0  # for blocks that are being stored, or come up from a tier
    load_deadline_s: float = 5.0  # then the mover that still loads is ended
    store_deadline_s: float = 5.0  # then the store is given up
    lease_s: float = 10.0  # how long what was found and not loaded stays leased
    silent_after_s: float = 0.1  # a daemon silent for so long is left alone for a second


class SoughtKeys(NamedTuple):
    """Keys of one group to look for. `leading`: what follows the first miss is of no use."""

    group: int
    keys: Sequence[bytes]
    first_block: int = 0
    leading: bool = True


@dataclass(slots=True)
class AwaitedJob:
    """A job that some thread waits for."""

    generation: int  # of the session that it was sent in
    told_s: float | None = None  # when the daemon told of its end
    done: bool | None = None  # None: it has not ended


class BlockBatches:
    """Finds, loads and stores blocks of one namespace in this process's shared memory."""

    def __init__(
        self,
        socket_path: str,
        identity: EngineIdentity,
        namespace: NamespaceFields,
        options: BatchOptions | None = None,
    ) -> None:
        self.options = options or BatchOptions()
        self.account = namespace.account
        self._lock = threading.Lock()  # guards all that follows, and the worker
        self._numbers = itertools.count(1)
        self._jobs: dict[int, AwaitedJob] = {}
        self._finished: list[str] = []  # requests, to be told with the next step
        self._answers = LeasedAnswers(self._finished.append)
        self._lasting: set[str] = set()  # requests that go on after a store
        self._num_blocks: list[int] = []  # of the engine, by group
        self._resets = 0
        self._renewal = LeaseRenewal(self._renew)
        self._worker = Worker(
            socket_path,
            identity,
            flush_timeout_s=0.0,
            load_flush_timeout_s=0.0,
            load_deadline_s=self.options.load_deadline_s,
        )
        self._connection = SchedulerConnection(
            socket_path, identity, namespace, silent_after_s=self.options.silent_after_s
        )
        keep_from_children(self)

    def leave_to_parent(self) -> None:
        """In a forked process nothing is found, and stores and loads fail."""
        self._lock = threading.Lock()  # another thread may hold the one that there was

    def register(self, memories: Sequence[SharedMemory], groups: Sequence[GroupLayout]) -> None:
        """Offer the memory to the daemon, now and whenever it comes back. Returns at once."""
        self._worker.register(memories, groups)
        self._num_blocks = [group.num_blocks for group in groups]

    def wait_usable(self, timeout_s: float) -> bool:
        """Wait until the session is open and the memory registered; for start-up and tests."""
        deadline = time.monotonic() + timeout_s
        return self._connection.wait_usable(timeout_s) and self._worker.wait_registered(
            max(0.0, deadline - time.monotonic())
        )

    @property
    def is_usable(self) -> bool:
        return self._connection.session is not None

    @property
    def problem(self) -> str:
        """Why nothing can be found or stored; empty when it can."""
        return "" if self.is_usable else first_met(self._worker.problem, self._connection.problem)

    @property
    def refusals(self) -> dict[str, int]:
        """What the daemon would not do, by reason."""
        return dict(self._connection.refusals)

    def reset(self, epoch: str = "") -> None:
        """Forget all that was stored, as this engine sees it: move on to an epoch of its own.

        Engines that name the same `epoch` go on sharing. Waits `retry_deadline_s` for the daemon.
        """
        was_usable = self.is_usable
        self._resets += 1
        self._connection.reset_epoch(epoch)
        if was_usable:
            self._connection.wait_usable(self.options.retry_deadline_s)

    def close(self) -> None:
        """Take the memory back: returns when no copy can touch it any more.

        Under the lock: a load that began in between would be ended by nobody.
        """
        self._renewal.close()
        with self._lock:
            while not self._worker.unregister(END_MOVER_TIMEOUT_S):
                log.error("kvd: the daemon does not let go of the memory; waiting for it")
            self._worker.close()
        self._connection.close()

    # -- finding ----------------------------------------------------------------------------

    def find(self, wanted: Sequence[SoughtKeys]) -> list[Flags]:
        """Which of the keys can be loaded. They are leased for a while, so that they stay; those
        that there is no room to lease are found without.
        """
        for each in wanted:
            self._require_keys(each.group, each.keys, each.first_block)
        found = [np.zeros(len(each.keys), dtype=np.bool_) for each in wanted]
        session = self._connection.session
        if session is None:
            with self._lock:
                self._take_ends()
            return found
        asked = [self._worth_asking(session, each) for each in wanted]
        if not any(asked):
            return found
        wanted = [
            each._replace(keys=each.keys[:count]) for each, count in zip(wanted, asked, strict=True)
        ]
        request_id = self._new_request()
        try:
            answers = self._ask_patiently(request_id, wanted)
            for flags, each, statuses in zip(found, wanted, answers, strict=True):
                hits = (statuses == HIT) | (statuses == RETRY)
                if each.leading and not hits.all():
                    hits[int(np.argmin(hits)) :] = False
                flags[: len(hits)] = hits
            if self._claim(request_id, wanted, found):
                self._renewal.begin(session.lease_ttl_s)
        except BaseException:  # of a signal's handler: nobody hears what was found
            with self._lock:
                self._finished.append(request_id)
            raise
        return found

    def _worth_asking(self, session: DaemonSession, wanted: SoughtKeys) -> int:
        """How many of the keys, from the first on, may be there."""
        if session.page_hides_some or not wanted.keys:
            return len(wanted.keys)
        if wanted.leading and self._shows_ends(session, wanted):
            return len(wanted.keys)  # a gap is rare, and the daemon will tell of it
        present = session.present(wanted.group, self.account, wanted.keys)
        if present.all():
            return len(wanted.keys)
        if wanted.leading:
            return int(np.argmin(present))
        return int(np.flatnonzero(present)[-1]) + 1 if present.any() else 0

    def _shows_ends(self, session: DaemonSession, wanted: SoughtKeys) -> bool:
        """Whether the first and the last may be there: a look at all costs more than both."""
        ends = (wanted.keys[0], wanted.keys[-1])
        return all(session.shows(wanted.group, self.account, key) for key in ends)

    def _ask_patiently(self, request_id: str, wanted: Sequence[SoughtKeys]) -> list[Statuses]:
        """The statuses, asked for again while some may yet become hits."""
        began, pause = time.monotonic(), FIRST_PAUSE * POLL_S
        while True:
            answers = self._ask(request_id, wanted)
            waited = time.monotonic() - began
            if not any(
                self._may_become(each, statuses, waited)
                for each, statuses in zip(wanted, answers, strict=True)
            ):
                return answers
            with self._lock:  # what nobody loads keeps no other from a lease
                self._answers.make_room(sum(int((each == RETRY).sum()) for each in answers))
                self._send_locked(StepDraft())  # then what lies in a tier is brought up
            time.sleep(pause)
            pause = min(2 * pause, ASK_AGAIN_MAX_S)

    def _may_become(self, wanted: SoughtKeys, statuses: Statuses, waited_s: float) -> bool:
        """Whether it is worth while to ask again for what was no hit."""
        hits = statuses == HIT
        if hits.all():
            return False
        if wanted.leading:
            missed = np.flatnonzero(~hits)[:1]
            statuses = statuses[missed]
        may_retry = waited_s < self.options.retry_deadline_s and bool((statuses == RETRY).any())
        is_pending = waited_s < self.options.pending_deadline_s
        return may_retry or (is_pending and bool((statuses == PENDING).any()))

    def _ask(self, request_id: str, wanted: Sequence[SoughtKeys]) -> list[Statuses]:
        """One status for each key; misses from where the daemon does not answer in time.

        One call after the other: however much is asked, each answer has a deadline of its own.
        """
        answers = [np.zeros(len(each.keys), dtype=np.uint8) for each in wanted]
        for queries, part in self._queries(request_id, wanted):
            call = self._connection.start_lookup(queries)
            try:
                self._connection.gather([call], self.options.lookup_deadline_s)
                taken = self._connection.take_answers(call) if call else ()
                if taken is None:
                    self._connection.doubt([call], lambda: 0.0)
            finally:
                self._connection.give_up(call)
            if not taken:
                break
            for (number, first), answer in zip(part, taken, strict=False):
                statuses = np.frombuffer(answer.statuses, dtype=np.uint8) & np.uint8(STATUS_BITS)
                answers[number][first : first + len(statuses)] = statuses
        return answers

    def _queries(
        self, request_id: str, wanted: Sequence[SoughtKeys]
    ) -> list[tuple[list[QueryDraft], list[tuple[int, int]]]]:
        """The questions, in as many calls as they need, and of each whose keys it is about."""
        context = self._context(request_id)
        calls: list[tuple[list[QueryDraft], list[tuple[int, int]]]] = []
        room = 0
        for number, (group, keys, first_block, leading) in enumerate(wanted):
            first = 0
            while first < len(keys):
                if not room or len(calls[-1][0]) >= QUERIES_PER_CALL:
                    calls.append(([], []))
                    room = KEYS_PER_CALL
                part = keys[first : first + room]
                run = BlockRun(group, first_block + first, part)
                calls[-1][0].append(QueryDraft(context, run, lease_all=not leading))
                calls[-1][1].append((number, first))
                first, room = first + len(part), room - len(part)
        return calls

    def _context(self, request_id: str) -> common_pb2.ReqContext:
        return common_pb2.ReqContext(request_id=request_id, account=self.account)

    # -- leases -----------------------------------------------------------------------------

    def _claim(self, request_id: str, wanted: Sequence[SoughtKeys], found: Sequence[Flags]) -> bool:
        """Remember what is leased now, and for whom; whether that is anything."""
        mine: dict[int, dict[bytes, None]] = {}  # each key once, however often it was asked
        for each, flags in zip(wanted, found, strict=True):
            count = int(np.count_nonzero(flags))
            if count:
                keys = each.keys if count == len(each.keys) else compress(each.keys, flags)
                mine.setdefault(each.group, {}).update(dict.fromkeys(keys))
        leased = {group: list(keys) for group, keys in mine.items()}
        with self._lock:
            self._answers.add(request_id, leased)
            has_ended = self._answers.end_old(self.options.lease_s)
            if has_ended or len(self._finished) >= MAX_UNTOLD_REQUESTS:
                self._send_locked(StepDraft())  # one that only asks sends no other
            return bool(leased)

    def _renew(self) -> bool:
        """A step renews what is leased. False: nothing is."""
        with self._lock:
            has_ended = self._answers.end_old(self.options.lease_s)
            if (self._answers or has_ended) and self.is_usable:
                self._send_locked(StepDraft())
            return bool(self._answers)

    def _new_request(self) -> str:
        return f"batch-{next(self._numbers)}"

    # -- copies -----------------------------------------------------------------------------

    def load(self, runs: Sequence[BlockRun]) -> list[list[bool]]:
        """Bring blocks to their engine blocks; of each run, which have come.

        What has gone since it was found is missing, with all that follows it in its run, or in the
        part of the run that one job takes.
        """
        self._require_runs(runs)
        loaded: list[list[bool]] = [[] for _ in runs]
        parts = each_in_parts(runs)
        come = self._load_parts([part for _, part in parts]) if parts else []
        for (number, _), each in zip(parts, come, strict=True):
            loaded[number] += each
        return loaded

    def _load_parts(self, runs: Sequence[BlockRun]) -> list[list[bool]]:
        loaded = [
            [ok] * len(run.block_hashes) for run, ok in zip(runs, self._load(runs), strict=True)
        ]
        heads = self._left_of(runs, [n for n, come in enumerate(loaded) if not come[0]])
        for (number, head), ok in zip(heads.items(), self._load([*heads.values()]), strict=True):
            loaded[number][: len(head.block_hashes)] = [ok] * len(head.block_hashes)
        with self._lock:
            for run in runs:
                self._answers.note_loaded(run.group, run.block_hashes)
        return loaded

    def _left_of(self, runs: Sequence[BlockRun], failed: Sequence[int]) -> dict[int, BlockRun]:
        """Of runs that did not come, by their number: what is still there, where that is a part."""
        lost = [runs[number] for number in failed] if self.is_usable else []
        found = self.find([SoughtKeys(r.group, r.block_hashes, r.first_block) for r in lost])
        heads = {}
        for number, run, flags in zip(failed, lost, found, strict=False):
            left = int(np.count_nonzero(flags))
            if 0 < left < len(run.block_hashes):
                row = run.engine_blocks[: left * len(run.engine_blocks) // len(run.block_hashes)]
                heads[number] = BlockRun(run.group, run.first_block, run.block_hashes[:left], row)
        return heads

    def _load(self, runs: Sequence[BlockRun]) -> list[bool]:
        def begin(drafts: list[JobDraft]) -> bool:
            if not (drafts and self._begin(StepDraft(loads=drafts), drafts)):
                return False
            self._worker.start_loads(StepPlan(loads=tuple(draft.job_id for draft in drafts)))
            return True

        return self._see_through(runs, "", begin, deadline_s=None)

    def store(self, runs: Sequence[BlockRun], request_id: str = "") -> list[bool]:
        """Keep blocks; of each run, whether all of it can be found now.

        When this returns the engine blocks may be overwritten. What the daemon would not take, as
        it has to take a row back from others first, is offered again for `retry_deadline_s`, if no
        reset comes.
        Stores of one `request_id` are of one prompt, whose head stays longest, until `end_request`.
        """
        self._require_runs(runs)
        require_kind("request_id", request_id, str)
        told_id = wire_text(request_id)
        done, parts = [True] * len(runs), each_in_parts(runs)
        kept = self._store_parts([part for _, part in parts], told_id) if parts else []
        for (number, _), ok in zip(parts, kept, strict=True):
            done[number] &= ok
        return done

    def end_request(self, request_id: str) -> None:
        """Nothing more comes of it. The daemon hears that with the next step."""
        require_kind("request_id", request_id, str)
        told_id = wire_text(request_id)
        with self._lock:
            if told_id in self._lasting:
                self._lasting.remove(told_id)
                self._finished.append(told_id)

    def _store_parts(self, runs: Sequence[BlockRun], request_id: str) -> list[bool]:
        began, pause, resets = time.monotonic(), FIRST_PAUSE * POLL_S, self._resets
        stored = self._store(runs, request_id)
        while not all(stored) and self.is_usable and self._resets == resets:
            if time.monotonic() - began >= self.options.retry_deadline_s:
                break
            time.sleep(pause)
            pause = min(2 * pause, ASK_AGAIN_MAX_S)
            left = [number for number, done in enumerate(stored) if not done]
            again = self._store([runs[i] for i in left], request_id)
            for number, done in zip(left, again, strict=True):
                stored[number] = done
        return stored

    def _store(self, runs: Sequence[BlockRun], request_id: str = "") -> list[bool]:
        def begin(drafts: list[JobDraft]) -> bool:
            for draft in drafts:
                draft.request_level = True
            if not self._begin(StepDraft(stores=drafts), drafts):
                return False  # nobody has heard of the request, so nobody is told of its end
            self._lasting.update([request_id] if request_id else [])
            self._worker.finish_step(StepPlan(stores=tuple(draft.job_id for draft in drafts)))
            return True

        return self._see_through(runs, request_id, begin, self.options.store_deadline_s)

    def _drafts(self, runs: Sequence[BlockRun], request_id: str = "") -> list[JobDraft]:
        """Jobs with rising numbers, so they are to be sent before others. Called under the lock."""
        numbers = [next(self._numbers) for _ in runs]
        return [
            JobDraft(number, self._context(request_id or f"batch-{number}"), [run])
            for number, run in zip(numbers, runs, strict=True)
        ]

    def _begin(self, step: StepDraft, drafts: Sequence[JobDraft]) -> bool:
        """Order the step's jobs. Called under the lock."""
        session = self._connection.session
        if session is None:
            self._take_ends()
            return False
        step.generation = session.generation
        if not self._send_locked(step):
            return False
        self._jobs.update((draft.job_id, AwaitedJob(session.generation)) for draft in drafts)
        return True

    def _send_locked(self, step: StepDraft) -> bool:
        self._answers.end_old(self.options.lease_s)
        step.finished = self._finished.copy()
        is_sent = self._connection.send_step(step)
        self._finished.clear()  # told twice rather than never, where a signal's handler raises
        return is_sent

    def _see_through(
        self,
        runs: Sequence[BlockRun],
        request_id: str,
        begin: Callable[[list[JobDraft]], bool],
        deadline_s: float | None,
    ) -> list[bool]:
        """Order a job for each run, and as `_see_ends`. What a signal's handler raises meanwhile
        comes once all have ended, too: no copy goes on behind its back."""
        drafts: list[JobDraft] = []
        try:
            with self._lock:
                drafts += self._drafts(runs, request_id)
                if not begin(drafts):
                    return [False] * len(runs)
            return self._see_ends(drafts, deadline_s)
        except BaseException:
            self._leave(drafts, are_stores=deadline_s is not None)
            raise

    def _leave(self, drafts: Sequence[JobDraft], *, are_stores: bool) -> None:
        """Wait until no copy touches the blocks; stores are given up. Any may have begun.

        What a signal's handler raises now is dropped: one exception is on its way already.
        """
        job_ids = [draft.job_id for draft in drafts]
        touching, untold = True, not are_stores
        while touching:
            with suppress(*_RAISED), self._lock:
                if are_stores:
                    self._worker.flush_step(StepPlan(flush=tuple(job_ids)))
                elif untold:
                    self._worker.begin_again(job_ids)
                    untold = False
                self._take_ends()
                if not self._worker.wait(job_ids, 0.0):
                    self._end_requests(drafts)
                    for job_id in job_ids:
                        self._jobs.pop(job_id, None)
                    touching = False
            with suppress(*_RAISED):
                time.sleep(POLL_S)

    def _end_requests(self, drafts: Sequence[JobDraft]) -> None:
        """But for those that last. Called under the lock."""
        for draft in drafts:
            if draft.job_id in self._jobs and draft.context.request_id not in self._lasting:
                self._finished.append(draft.context.request_id)

    def _see_ends(self, drafts: Sequence[JobDraft], deadline_s: float | None) -> list[bool]:
        """Whether each job is done, once all have ended. At the deadline stores are given up;
        a load's deadline is the worker's, which ends the mover."""
        job_ids = [draft.job_id for draft in drafts]
        began = time.monotonic()
        while True:
            with self._lock:
                self._take_ends()
                jobs = {job_id: self._jobs[job_id] for job_id in job_ids if job_id in self._jobs}
                left = [job_id for job_id, job in jobs.items() if job.done is None]
                waited = time.monotonic() - began
                is_late = bool(left) and deadline_s is not None and waited > deadline_s
                if is_late:
                    self._worker.flush_step(StepPlan(flush=tuple(left)))  # they may be overwritten
                if is_late or not left:
                    self._end_requests(drafts)
                    done = [bool(self._jobs.pop(job_id).done) for job_id in jobs]
                    break
            time.sleep(min(max(POLL_S, waited * POLL_SHARE), POLL_MAX_S))
        if is_late:
            log.warning("kvd: %d stores have not ended in %.1f s", len(left), waited)
            self.notice_silence()
        return done

    def notice_silence(self) -> None:
        """Ask the daemon anything: one that is silent is left alone for a while."""
        if not self.is_usable:
            return
        self._ask(self._new_request(), [SoughtKeys(0, [bytes(self._hash_bytes)])])

    @property
    def _hash_bytes(self) -> int:
        return self._connection.namespace.hash_bytes

    def _require_runs(self, runs: Sequence[BlockRun]) -> None:
        """ValueError for what can't be said of blocks, before any of it is sent."""
        groups = self._connection.namespace.groups
        for run in runs:
            self._require_keys(run.group, run.block_hashes, run.first_block)
            wanted = len(run.block_hashes) * groups[run.group].blocks_per_block
            if len(run.engine_blocks) != wanted:
                raise ValueError(
                    f"engine_blocks has {len(run.engine_blocks)} numbers;"
                    f" {len(run.block_hashes)} keys of group {run.group} take {wanted}"
                )
            most = self._num_blocks[run.group] if self._num_blocks else NULL_ENGINE_BLOCK
            blocks = np.asarray(run.engine_blocks)
            wrong = blocks[(blocks < 0) | ((blocks >= most) & (blocks != NULL_ENGINE_BLOCK))]
            if len(wrong):
                raise ValueError(
                    f"engine_blocks has {wrong[0]}; group {run.group} has blocks 0..{most - 1}"
                )

    def _require_keys(self, group: int, keys: Sequence[bytes], first_block: int) -> None:
        """Keys lie side by side in a message: shorter ones beside longer ones would be others."""
        groups = len(self._connection.namespace.groups)
        if not 0 <= group < groups:
            raise ValueError(f"group is {group}, allowed are 0..{groups - 1}")
        if not are_hashes(keys, self._hash_bytes):
            raise ValueError(f"every block hash must have {self._hash_bytes} bytes, as `bytes`")
        last = U32_MAX - len(keys)
        if not 0 <= first_block <= last:
            raise ValueError(f"first_block is {first_block}, allowed are 0..{last}")

    def _take_ends(self) -> None:
        """Take note of what has ended. Called under the lock.

        Also where there is no session and nothing is awaited: a rank does not register again
        while the last words of too many registrations are not taken.
        """
        now = time.monotonic()
        awaited = {job_id for job_id, job in self._jobs.items() if job.done is None}
        ended = awaited - self._worker.wait(awaited, 0.0)
        reports = {r.job_id: r.done and not r.left for r in self._worker.get_finished().ended}
        for job_id in self._jobs.keys() & (ended | reports.keys()):
            self._jobs[job_id].done = reports.get(job_id, False)  # a signal may have lost one
        for job_id in self._jobs.keys() & {job_id for job_id, _ in self._connection.take_ended()}:
            self._jobs[job_id].told_s = now
        session = self._connection.session
        lost = [
            job_id
            for job_id, job in self._jobs.items()
            if job.done is None
            and (
                (job.told_s is not None and now - job.told_s > REPORT_GRACE_S)
                or (session is not None and job.generation != session.generation)
            )
        ]
        if lost:
            self._worker.write_off(lost)
