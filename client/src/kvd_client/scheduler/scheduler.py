"""The engine-neutral scheduler side: what an engine's scheduler calls, in this order.

on arrival                  on_new_request
when it has room for one    get_num_new_matched_tokens, allocate, update_state_after_alloc
once in every step          build_step (hand the plan to every worker), update_from_workers
at a request's end          request_finished

One thread. Nothing raises for an absent, slow or broken daemon: that is a miss. ValueError
means that the engine broke a rule named in a docstring.

A request that would load what another one is loading waits for that load and then finds the
blocks on the device (`share_loads` of the options). docs/engine-behaviours.md lists what an
engine may rely on, with the test that proves it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvd_client.arguments import require_kind, require_whole
from kvd_client.draft import (
    JobDraft,
    StepDraft,
    are_hashes,
    in_parts,
    read_only_from,
    request_context,
    wire_text,
)
from kvd_client.scheduler.device import DeviceBlocks
from kvd_client.scheduler.doubts import Doubts
from kvd_client.scheduler.fences import Fences
from kvd_client.scheduler.found import count_found
from kvd_client.scheduler.hand_offs import HandOffQueue
from kvd_client.scheduler.jobs import JobTable, Load
from kvd_client.scheduler.loads import load_runs
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.matching import Matcher
from kvd_client.scheduler.offers import BlockOffer, BlockTables, OfferPlanner
from kvd_client.scheduler.outcomes import JobEnds
from kvd_client.scheduler.params import RequestParams, SchedulerOptions, StoreMode
from kvd_client.scheduler.plan import (
    ScheduledRequest,
    StepOutcome,
    StepPlan,
    StoredKeys,
    WorkerReport,
)
from kvd_client.scheduler.request import Request
from kvd_client.scheduler.stats import SchedulerStats
from kvd_client.scheduler.store_pause import StorePause
from kvd_client.scheduler.stores import StoreQueue
from kvd_client.session import Connection, SessionView
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, U32_MAX

log = logging.getLogger(__name__)


class Scheduler:
    """The scheduler side of one engine. ValueError for options that don't suit the namespace."""

    def __init__(
        self,
        connection: Connection,
        options: SchedulerOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options or SchedulerOptions()
        require_kind("options", self.options, SchedulerOptions)
        self._connection = connection
        self._namespace = connection.namespace
        self._groups = connection.namespace.groups
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._jobs = JobTable(connection.world_size)
        self._pause = StorePause(clock)
        self._queue = LookupQueue(connection, self._namespace, self.options, clock)
        self._matcher = Matcher(connection, self.options, self._jobs, self._queue, clock)
        self._offers = OfferPlanner(self._namespace, self.options)
        self._stores = StoreQueue(self._namespace, self._jobs, self._queue, self._matcher.tally)
        self._hand_offs = HandOffQueue(self._jobs, self.options)
        self._device = DeviceBlocks(self._groups)
        self._fences = Fences(self._groups, self._jobs, self._device, self.options.null_block)
        self._doubts = Doubts(connection, self._requests)
        self._ends = JobEnds(
            self._jobs, self._queue, self._fences, self.options, self._requests, self._doubts
        )
        # Collected for the next step.
        self._step = StepDraft()
        self._finished_offers: list[BlockOffer] = []
        self._ending: set[str] = set()  # whose end it says
        # Of the step that is being run.
        self._step_tokens = 0
        self._step_began_s = 0.0

    # -- arrival and lookup -----------------------------------------------------------------

    def on_new_request(
        self,
        request_id: str,
        num_tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        context: RequestParams | None = None,
    ) -> None:
        """A request has arrived: its lookup leaves at once, unanswered.

        `block_hashes[g]` has one hash, of `hash_bytes` bytes, for each whole kvd block of group g
        that is known. The lists are kept, not copied, until a step brings others or the request
        ends: the engine may append to them, and must not change them otherwise. A request id that
        is known already begins anew, its former blocks held while they are loaded.
        """
        require_kind("request_id", request_id, str)
        require_whole("num_tokens", num_tokens, 0, U32_MAX)
        params = context or RequestParams()
        require_kind("context", params, RequestParams)
        if len(block_hashes) != len(self._groups):
            raise ValueError(f"{len(block_hashes)} lists of hashes for {len(self._groups)} groups")
        # The ends at once, whether there is a daemon or not; all are looked at before they leave.
        length = self._namespace.hash_bytes
        for group, each in enumerate(block_hashes):
            if len(each) and not are_hashes((each[0], each[-1]), length):
                raise ValueError(
                    f"block_hashes[{group}] must have hashes of {length} bytes each, as `bytes`"
                )
        if request_id in self._requests:
            self.request_finished(request_id, [()] * len(self._groups))
        account = self._namespace.account if params.account is None else params.account
        account = wire_text(account)
        extras = [("kv_transfer_params", params.kv_transfer_params), ("hints", params.hints)]
        message = request_context(request_id, account, params.priority, extras)
        if params.load_tiers is not None:
            read_only_from(message, params.load_tiers)
        request = Request(request_id, num_tokens, block_hashes, params, account, message)
        request.request_level = params.request_level
        request.next_store = [0] * len(self._groups)
        request.offered = [0] * len(self._groups)
        request.seen_blocks = [0] * len(self._groups)
        self._requests[request_id] = request
        self._enter_session()
        if request_id not in self._ending:
            self._queue.arrive(request)

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int, max_new_tokens: int | None = None
    ) -> int | None:
        """Tokens that can be loaded beyond the `num_computed_tokens` on the device.

        None: not known yet, ask again in the next step. At least one token of the request is
        left to compute. Waits at most once in a step, for milliseconds, for all requests.
        `max_new_tokens` bounds the answer where the engine must, as by what layers that it
        keeps to itself still have.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0
        require_whole("num_computed_tokens", num_computed_tokens, 0, U32_MAX)
        if max_new_tokens is not None:
            require_whole("max_new_tokens", max_new_tokens, -U32_MAX, U32_MAX)
        self._enter_session()
        # An earlier one's end, which has not left yet, would end its leases; and an outcome that
        # names it must mean one load.
        is_followed = request_id in self._ending or request_id in self._ends.loading_ended
        if is_followed and not request.params.skip_lookup:
            return None
        request.max_hit_tokens = None
        if max_new_tokens is not None:
            request.max_hit_tokens = num_computed_tokens + max(0, max_new_tokens)
        found = self._matcher.match(request, num_computed_tokens)
        if found is None:
            return None
        request.hit_tokens = found
        return found - num_computed_tokens

    def update_state_after_alloc(
        self, request_id: str, block_ids: BlockTables, num_external_tokens: int
    ) -> None:
        """The engine gave the request its blocks; `block_ids` is the whole table by group.

        With `num_external_tokens` > 0 these tokens are loaded, asynchronously: the request
        must wait, its blocks untouched, until an outcome names it as finished or failed.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.loading_job:
            raise ValueError(f"request {request_id} is loading already")
        require_whole("num_external_tokens", num_external_tokens, 0, U32_MAX)
        self._fences.cover(request, block_ids)
        if not request.params.skip_lookup:
            count_found(
                self._step.lookups,
                request,
                self._namespace,
                num_external_tokens,
                tells_prompt=self._connection.tells_prompts,
            )
        if not num_external_tokens:
            self._queue.release(request)
            return
        hit_tokens = request.computed_tokens + num_external_tokens
        if hit_tokens > request.hit_tokens or hit_tokens % self._namespace.boundary_tokens:
            raise ValueError(f"request {request_id}: {num_external_tokens} tokens were not found")
        sizes = [len(table) for table in block_ids]
        least = [-(-hit_tokens // group.engine_block_tokens) for group in self._groups]
        if len(sizes) != len(least) or any(
            size < need for size, need in zip(sizes, least, strict=True)
        ):
            raise ValueError(f"request {request_id}: its tables have {sizes} blocks, not {least}")
        self._begin_load(request, block_ids, hit_tokens)

    def _begin_load(self, request: Request, tables: BlockTables, hit_tokens: int) -> None:
        runs = load_runs(self._groups, request, tables, hit_tokens, self.options.null_block)
        parts, generation = in_parts(runs), request.lookup.generation
        drafts = [JobDraft(self._jobs.next_id(), request.context, part) for part in parts]
        load = Load(drafts[0].job_id, {draft.job_id for draft in drafts})
        try:
            for draft in drafts:
                self._jobs.begin(draft, request, generation, load)
            request.loading_job = load.first_job
            self._step.loads += drafts
            if not request.request_level:
                request.next_store = [-(-hit_tokens // g.tokens_per_block) for g in self._groups]
            self._queue.release(request)  # the step's message names loads before released leases
        except BaseException:  # of a signal's handler: nothing is loaded
            request.loading_job = 0
            for job_id in self._jobs.begun_after(load.first_job - 1):
                self._jobs.drop(job_id)
            raise

    # -- the step ---------------------------------------------------------------------------

    def build_step(
        self,
        scheduled: Iterable[ScheduledRequest],
        preempted: Iterable[str] = (),
        near_eviction: Iterable[tuple[int, int]] = (),
    ) -> StepPlan:
        """Send the step's one message and give the plan for every worker.

        Call it exactly once in every step, also an empty one, after all allocation. Preempted
        requests have lost their blocks; a request whose load is in flight can't be among them.
        `near_eviction` lists (group, engine block) for lazy mode.

        Where a signal's handler raises there is no plan, and no block may be written before a later
        call has given one: it flushes for both. Loads of the step fail.
        """
        if isinstance(preempted, str):  # whose letters are no requests
            raise ValueError(f"preempted is {preempted!a}, needed is a list of request ids")  # noqa: TRY004
        session = self._enter_session()
        self._ends.told(self._connection.take_ended(), self._clock())
        for request_id in preempted:
            self._preempt(request_id)
        self._pace_of_step()
        computed_offers: list[BlockOffer] = []
        for entry in scheduled:
            computed_offers += self._advance(entry)
        # Taken only now: the step may have been refused for a table.
        offers, self._finished_offers = self._finished_offers + computed_offers, []
        has_run, self._step_began_s = self._step_tokens > 0, self._clock()
        if self.options.store_mode is StoreMode.LAZY:
            offers += self._device.near_eviction(near_eviction)
        step, last_job, flush = self._step, self._jobs.last_id, tuple[int, ...]()
        try:
            self._step = StepDraft()
            self._ending.clear()
            step.loads = [draft for draft in step.loads if draft.job_id in self._jobs]
            step.released_leases += self._queue.released_leases
            self._queue.released_leases = []
            new, computed = self._submit(step, offers, session)
            self._hand_offs.put_into(step)
            step.generation = None if session is None else session.generation
            was_sent = self._connection.send_step(step)
            self._hand_offs.have_left()
            if not was_sent:
                self._step.lookups.add(step.lookups)
                self._take_back(step)
                new, computed = [], []
            self._queue.step_ended(was_sent, has_run=has_run)
            flush = self._fences.due(computed)
            self._fences.told()
            loads = tuple(job.job_id for job in step.loads) if was_sent else ()
            forget = self._ends.take_forget()
            return StepPlan(flush, loads, tuple(new), tuple(computed), forget)
        except BaseException:  # what a signal's handler raises
            if step is not self._step:
                self._unsay(step, last_job, flush)
            raise

    def _unsay(self, step: StepDraft, last_job: int, flush: Iterable[int]) -> None:
        """No worker will hear of this step, so nothing is copied; the daemon may have heard of it.

        Its jobs fail. The next step says once more what has ended, and its plan flushes as much.
        """
        self._step.released_leases += step.released_leases
        self._step.preempted += step.preempted
        self._step.finished += step.finished
        self._ending.update(step.finished)
        self._step.lookups.add(step.lookups)
        loads = [draft.job_id for draft in step.loads if draft.job_id in self._jobs]
        self._fences.flush(job_id for job_id in flush if job_id in self._jobs)
        self._ends.fail(loads + self._jobs.begun_after(last_job))

    def _pace_of_step(self) -> None:
        """The step before has run: what it computed, in the time that it took."""
        self._queue.pace.sample(self._clock() - self._step_began_s, self._step_tokens)
        self._step_tokens = 0

    def _enter_session(self) -> SessionView | None:
        """The session that takes steps; what belonged to an earlier one is given up."""
        session = self._connection.open_session
        if session is not None and session.generation != self._jobs.generation:
            self._pause.end()
            self._queue.session_lost()
            self._step.released_leases.clear()
            self._jobs.enter(session.generation)
            self._ends.enter_session()
        return session

    def _submit(
        self, step: StepDraft, offers: list[BlockOffer], session: SessionView | None
    ) -> tuple[list[int], list[int]]:
        if session is None:
            self._take_back(step)
            return [], []
        if self._pause.is_on:
            return [], []
        keys = sum(len(run.block_hashes) for load in step.loads for run in load.runs)
        # All loads leave: their leases do so with the same step.
        room = max(0, MAX_KEYS_PER_MESSAGE - keys)
        return self._stores.submit(offers, session, step, room)

    def _take_back(self, step: StepDraft) -> None:
        self._ends.fail(step.job_ids())
        step.loads, step.stores = [], []

    def _advance(self, entry: ScheduledRequest) -> list[BlockOffer]:
        """Fence the request's new blocks and offer its computed ones. Mostly there are none."""
        request_id, tables, computed_tokens, block_hashes = entry
        request = self._requests.get(request_id)
        if request is None:
            return []
        if type(computed_tokens) is not int or not 0 <= computed_tokens <= U32_MAX:
            require_whole("num_computed_tokens_after", computed_tokens, 0, U32_MAX)
            computed_tokens = int(computed_tokens)  # numpy's unsigned ones wrap
        if block_hashes is not None:
            request.hashes = block_hashes
        before = max(request.computed_after, request.hit_tokens)
        self._step_tokens += max(0, computed_tokens - before)
        # Known first: a signal's handler may raise between the two.
        request.known_hashes = tuple(map(len, request.hashes))
        request.computed_after = computed_tokens
        if request.seen_blocks != [len(table) for table in tables]:
            self._fences.cover(request, tables)
        if computed_tokens < request.offer_at:
            return []
        offers = self._offers.computed(request, tables, computed_tokens)
        if offers and self.options.store_mode is StoreMode.LAZY and not request.request_level:
            self._device.note(offers)
            for offer in offers:
                offer.dealt_with(len(offer.block_hashes))
            return []
        return offers

    def _preempt(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.loading_job:
            raise ValueError(f"request {request_id} is loading and can't be preempted")
        self._fences.flush(request.store_jobs)
        self._step.preempted.append(request_id)
        self._queue.forget(request)
        request.begin_again([group.tokens_per_block for group in self._groups])

    # -- ends -------------------------------------------------------------------------------

    def update_from_workers(self, reports: Iterable[WorkerReport]) -> StepOutcome:
        """Take what the workers say. Each job counts once all ranks have spoken.

        Reports of jobs from before a reset, or said twice, are ignored.
        """
        self._pace_of_step()
        reports = list(reports)
        self._pause.take(reports)
        self._ends.report(reports)
        return self._ends.take_outcome()

    def request_finished(
        self, request_id: str, block_ids: BlockTables, num_computed_tokens: int | None = None
    ) -> bool:
        """The request has ended or was aborted; call it before its blocks are freed.

        Its last computed blocks are stored with the next step (and handed off once that is done,
        where `do_remote_decode` asks for it); the engine may free them now:
        who gets them next waits for their stores (the plan's flush). True: a load may still
        write them, so hold them until an outcome names the request.

        `num_computed_tokens` counts the tokens whose KV is right, which is never that of the
        last token sampled. Without it the last block may go unstored that accepted drafts filled.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._queue.forget(request)
        self._step.finished.append(request_id)
        self._ending.add(request_id)
        if request.loading_job or self._ends.will_name(request_id):
            self._ends.loading_ended.add(request_id)
            return True
        self._fences.require_tables(request, block_ids)
        if num_computed_tokens is not None:
            require_whole("num_computed_tokens", num_computed_tokens, 0, U32_MAX)
        tables = [list(table) for table in block_ids]
        self._doubts.request_ends(request)
        offers, held = self._offers.final(request, tables, num_computed_tokens)
        for offer in offers:
            self._fences.require_blocks(request, offer.group, offer.engine_blocks)
        if self.options.store_mode is StoreMode.EAGER or request.request_level:
            self._finished_offers += offers
        else:
            self._device.note(offers)
        if request.request_level:
            self._hand_offs.add(request, held)
        return False

    def has_pending_work(self) -> bool:
        """Whether the engine must take another step, if only an empty one.

        True while a job is unreported or something waits to be sent, so that the last
        request's blocks are not lost, and a prefill's not evicted before they are handed off.
        """
        return bool(
            len(self._jobs)
            or self._finished_offers
            or self._hand_offs
            or self._ends.has_news
            or self._step.finished
        )

    def reset_cache(self) -> None:
        """Go on in a new epoch of this engine's own; other engines keep theirs.

        What is in flight is flushed by the next plan and counts for nothing; a load in flight
        fails. A live request stores nothing more until it is computed anew, because its KV is
        of before the reset.
        """
        self._connection.reset_epoch()
        self._fences.flush(self._jobs.invalidate())
        self._finished_offers.clear()
        self._hand_offs.clear()
        self._doubts.clear()
        self._device.clear()
        for request in self._requests.values():
            self._queue.forget(request)
            request.awaited_load = 0
            request.stores_end = any(request.seen_blocks)

    def take_events(self) -> list[StoredKeys]:
        """Blocks stored since the last call. Only drains."""
        return self._ends.take_events()

    @property
    def lookups_given_up(self) -> Mapping[str, int]:
        """Since the beginning: lookups whose requests are computed all the same, by `GivenUp`."""
        return self._queue.given_up

    def take_stats(self) -> SchedulerStats:
        """Delays and counts since the last call, for the engine's metrics."""
        return self._matcher.tally.take()
