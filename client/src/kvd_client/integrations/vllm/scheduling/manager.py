"""The scheduler side's offloading manager: vLLM's verbs, answered without a call for each.

A request's lookup leaves when it arrives and is answered for all its blocks at once; verbs are
then answered on the spot from that answer, the leases it took, the index page and its header.
What they decide goes to the daemon in one message at the step's end. Nothing here raises for an
absent, slow or broken daemon: that is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.draft import BlockRun
from kvd_client.integrations.vllm.events import DeviceResets, KvEvents
from kvd_client.integrations.vllm.options import KvdOptions
from kvd_client.integrations.vllm.scheduling.lazy import LeavingJob, Near
from kvd_client.integrations.vllm.scheduling.lookups import Prompt, RequestLookups
from kvd_client.integrations.vllm.scheduling.requests import (
    OffloadGroup,
    TrackedRequest,
    by_group,
    track,
)
from kvd_client.integrations.vllm.scheduling.steps import StepJobs, StepSender
from kvd_client.integrations.vllm.scheduling.stores import (
    BlocksSpec,
    IsWhole,
    OfferedBlocks,
    StorePlanner,
    nothing,
)
from kvd_client.integrations.vllm.stats import (
    FAILED_LOADS,
    FAILED_STORES,
    NO_ROOM,
    REMOVALS,
    STORES_SKIPPED,
    KvdStats,
)
from kvd_client.scheduler.found import count_found
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.pace import TokenPace
from kvd_client.scheduler.request import GivenUp, Knowledge, LookupState
from kvd_client.session import Connection, SessionView
from kvd_proto.groups import GroupKind


class KvdManager(OffloadingManager):
    """vLLM's offloading manager over kvd. Until `open`, and without a daemon, all is a miss."""

    def __init__(
        self,
        config: OffloadingConfig,
        options: KvdOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        per_block, per_hash = config.cache.blocks_per_chunk, config.cache.tokens_per_hash
        self.groups = {
            group.group_id: OffloadGroup(
                index,
                group.group_id,
                group.tokens_per_block * per_block,
                group.tokens_per_block * per_block // per_hash,
                per_block,
            )
            for index, group in enumerate(config.groups)
        }
        self.stats = KvdStats()
        self.steps: StepSender | None = None
        self.watched: KvEvents | None = None
        self.device_resets: DeviceResets | None = None
        self.offloading_config = config
        self.connect_options = options
        self.stores_lazily = options.stores_lazily
        self._account = options.account
        self._clock = clock
        self._options = options.scheduler_options()
        self._min_load_tokens = options.min_load_tokens
        self._connection: Connection | None = None
        self._queue: LookupQueue | None = None
        self._lookups = RequestLookups(self.groups, clock)
        self._stores = StorePlanner(self.groups, self.stats)
        self._live: dict[str, TrackedRequest] = {}
        self._failed: set[OffloadKey] = set()
        self._events: list[OffloadingEvent] | None = [] if config.enable_kv_cache_events else None

    # -- connection -------------------------------------------------------------------------

    def open(self, connection: Connection) -> None:
        """Use this connection from now on; once, before any request is tracked."""
        self._connection = connection
        self._queue = LookupQueue(connection, connection.namespace, self._options, self._clock)
        # With full attention alone vLLM loads whole prompts, and computes the last token anew.
        groups = connection.namespace.groups
        is_full = all(g.kind is GroupKind.FULL_ATTENTION and not g.drafter for g in groups)
        self._queue.spare_tokens = 0 if is_full else 1
        self.steps = StepSender(connection, self._options, self._clock)
        self.stats.watch_lookups(self._queue.given_up)

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> Connection | None:
        return self._connection

    def enter_session(self) -> SessionView | None:
        """The session to ask. What belonged to an earlier one is given up."""
        session = self._enter_open_session()
        return None if session is None or self._connection is None else self._connection.session

    def _enter_open_session(self) -> SessionView | None:
        """The session that takes stores, likewise."""
        if self._connection is None or self.steps is None or self._queue is None:
            return None
        session = self._connection.open_session
        if session is not None and self.steps.enter(session.generation):
            self._queue.session_lost()
        return session

    # -- requests and lookups ---------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        tracked = track(req_context, len(self.groups), self._account)
        req_context.set_state(tracked)
        self._live[req_context.req_id] = tracked
        return RequestOffloadingContext(policy=tracked.policy)

    def arrive(self, req_context: ReqContext, prompt: Prompt) -> None:
        """Ask for the request's blocks; nobody waits for the answer."""
        request = self.tracked(req_context).request
        request.hashes, request.num_tokens, _ = prompt
        if self._is_too_short(prompt):
            return
        if self.enter_session() is not None and self._queue is not None:
            self._queue.arrive(request)

    def begin_lookup(self, req_context: ReqContext, prompt: Prompt) -> Knowledge:
        """Bring what is known of the request's blocks up to date. May wait, once in a step."""
        tracked = self.tracked(req_context)
        tracked.request.num_tokens = prompt.num_tokens
        tracked.request.computed_tokens = prompt.computed_tokens
        self.begin_anew(req_context)
        if self._queue is None or self._is_too_short(prompt):
            return Knowledge.NOTHING
        if self.enter_session() is None:
            self._queue.give_up(tracked.request, GivenUp.NO_SESSION)
            return Knowledge.NOTHING
        return self._lookups.begin(tracked, prompt, self._queue)

    def _is_too_short(self, prompt: Prompt) -> bool:
        """Whether all that could be found of it, but a token, is less than is worth a load."""
        least = self._min_load_tokens
        return bool(least) and prompt.num_tokens - prompt.computed_tokens <= least

    def worth_loading(self, hit_tokens: int | None) -> int | None:
        """So many tokens, or none where they are fewer than is worth a load."""
        return 0 if hit_tokens is not None and hit_tokens < self._min_load_tokens else hit_tokens

    def missed_page(self, req_context: ReqContext) -> bool:
        """Whether the page, and nothing else, says that no whole block of the request is of use.

        A tail shorter than a block is looked for all the same.
        """
        lookup = self.tracked(req_context).request.lookup
        return lookup.state is LookupState.KNOWN and lookup.missed_page

    def begin_anew(self, req_context: ReqContext) -> None:
        """The request has no engine blocks yet: all that it computes will be of now."""
        request = self.tracked(req_context).request
        request.stores_end = False
        request.next_store = [0] * len(self.groups)

    def end_stores(self, req_context: ReqContext) -> None:
        """Nothing of the request is stored from now on, unless it begins anew."""
        self.tracked(req_context).request.stores_end = True

    def end_lookup(self, req_context: ReqContext, hit_tokens: int | None) -> bool:
        """VLLM has decided; None: it puts the request off. False: it must be put off after all."""
        tracked = self.tracked(req_context)
        if hit_tokens is None:
            if self._queue is not None:
                self._lookups.defer(tracked, self._queue)
            return True
        blocks = self._lookups.settle(tracked, hit_tokens)
        if not blocks or self.steps is None:
            return True
        return self._stores.budget.holds_load(blocks, self.steps.jobs.free)

    def hit_run(self, req_context: ReqContext, group: int, stretch: range) -> int | None:
        """Leading blocks of a stretch that can be loaded; None: doubtful, ask again."""
        return self._lookups.hit_run(self.tracked(req_context), group, stretch)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """What `begin_lookup` found out of one key; before that, or without a session, a miss."""
        session = self.enter_session()
        if session is None or self._queue is None:
            return LookupResult.MISS
        return self._lookups.one(self.tracked(req_context), key, session, self._queue)

    def was_brought_up(self, req_context: ReqContext) -> bool:
        """Whether a tier brought up any of what the request's lookup found."""
        return bool(self.tracked(req_context).request.lookup.sources)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return self._lookups.source(self.tracked(req_context), key)

    def on_request_finished(self, req_context: ReqContext) -> None:
        tracked = self.tracked(req_context)
        self._live.pop(req_context.req_id, None)
        if tracked.has_ended or self._queue is None or self.steps is None:
            return
        tracked.has_ended = True
        self._queue.forget(tracked.request)
        self.steps.draft.finished.append(req_context.req_id)
        if tracked.policy is OffloadPolicy.REQUEST_LEVEL:
            self.steps.hand_off(tracked)

    def begin(self, req_context: ReqContext, external_tokens: int) -> None:
        """VLLM has begun a request, and loads so many of its tokens: tell the daemon.

        One that loads nothing needs no lease, of what the device has or what another connector
        loads: it would keep it for as long as it decodes.
        """
        request = self.tracked(req_context).request
        if not external_tokens and self._queue is not None:
            self._queue.release(request)
        if self.steps is not None and self._connection is not None and request.num_tokens:
            namespace = self._connection.namespace
            count_found(
                self.steps.draft.lookups,
                request,
                namespace,
                external_tokens,
                tells_prompt=self._connection.tells_prompts,
            )

    # -- loads and stores -------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """The blocks stay pinned by the lookup's lease until the step's message pins the load."""
        keys = list(keys)
        self._stores.budget.take_load(len(keys))
        if self._queue is not None:
            self._queue.release(self.tracked(req_context).request)
        return BlocksSpec(keys, list(by_group(keys)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to do: pins end when every rank's copy is known to have ended."""

    def fail_load(self, tracked: TrackedRequest) -> None:
        """A load of the request has failed: it is computed, or looked up once more."""
        if self._queue is not None:
            self._queue.load_failed(tracked.request)
        self.stats.counts[FAILED_LOADS] += 1

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self.steps is None:
            return
        context = self.tracked(req_context).request.context
        for group, hashes in by_group(list(keys)):
            run = BlockRun(self.groups[group].index, 0, hashes)
            self.steps.draft.touches.append((context, run))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """What of these to store. None: no room now.

        Without a daemon nothing is stored, which is final: offered again, it would cost time.
        """
        planned = self.prepare_blocks(list(keys), None, req_context)
        if planned is None:
            self.stats.counts[NO_ROOM] += 1
        return planned

    def prepare_blocks(
        self,
        keys: list[OffloadKey],
        parts: list[tuple[int, list[bytes]]] | None,
        req_context: ReqContext,
    ) -> PrepareStoreOutput | None:
        """`prepare_store`; `parts`: the keys' hashes by vLLM's group number, where they are known.

        The lists are kept. What finds no room is not counted: who asks offers it with
        `prepare_store` then.
        """
        tracked = self.tracked(req_context)
        session = self._enter_open_session()
        if session is None or self.steps is None or tracked.request.stores_end:
            return nothing()
        if self.steps.pause.is_on:
            return nothing()  # as without a daemon
        if self.stores_lazily and tracked.policy is OffloadPolicy.CHUNK_LEVEL:
            return nothing()  # later, when they leave the device
        if self.steps.is_full:
            return None
        offer = OfferedBlocks(tracked, req_context, keys, parts)
        planned = self._stores.plan(offer, session, self._is_admitted)
        if planned is not None and self._stores.kept_out:
            self.stats.counts[STORES_SKIPPED] += len(self._stores.kept_out)
            self._sight(tracked, req_context)
        return planned

    def _sight(self, tracked: TrackedRequest, req_context: ReqContext) -> None:
        """Have the reuse filter count, once for each request, what it does not let in yet."""
        fresh = []
        for key in self._stores.kept_out:
            group, block = get_offload_group_idx(key), self.block_of(key, req_context)
            if block >= tracked.kept_out.get(group, 0):
                tracked.kept_out[group] = block + 1
                fresh.append(key)
        self.touch(fresh, req_context)

    def prepare_leaving(self, near: Near, number: int) -> LeavingJob | None:
        """A job that stores what of these the daemon lacks; it may be empty. None: not now.

        What the daemon has becomes young there: the device used it until now.
        """
        session = self._enter_open_session()
        if session is None or self.steps is None or self.steps.is_full or self.steps.pause.is_on:
            return None
        places = {key: block for block, key in reversed(near)}  # a key may lie in two
        keys = sorted(places, key=get_offload_group_idx)
        planned = self._stores.plan_leaving(keys, self._account, session)
        if planned is None:
            return None
        wanted, there = planned
        tracked = track(ReqContext(f"kvd-leaving-{number}"), len(self.groups), self._account)
        for group, hashes in by_group(there):
            run = BlockRun(self.groups[group].index, 0, hashes)
            self.steps.draft.touches.append((tracked.request.context, run))
        self.steps.draft.finished.append(tracked.request.request_id)
        blocks = [places[key] for key in wanted]
        runs: list[BlockRun] = []
        first = 0
        for group, hashes in by_group(wanted):
            rows = blocks[first : first + len(hashes)]
            runs.append(BlockRun(self.groups[group].index, 0, hashes, rows))
            first += len(hashes)
        return LeavingJob(tracked, wanted, blocks, runs, cut=set(keys).difference(wanted, there))

    def end_leaving(self, job: LeavingJob, *, failed: bool, left: bool) -> set[OffloadKey]:
        """Every rank has spoken of it; which of its blocks are not stored."""
        if failed:
            self.fail_stores(job.tracked, job.keys)
        elif left:
            self.leave_stores(job.tracked, job.keys)
        self._stores.ended(job.keys)
        stored = [key for key in job.keys if key not in self._failed]
        self._announce(stored)
        return set(job.keys).difference(stored)

    @property
    def cut(self) -> list[tuple[str, set[OffloadKey]]]:
        """Whose blocks the step leaves out, for there was room for those before them only."""
        return self._stores.cut

    def leave_out_gaps(self, is_whole: IsWhole) -> None:
        """Ask this before any block is stored; without it all of them are whole."""
        self._stores.is_whole = is_whole

    def expect_stores(self, keys: list[OffloadKey]) -> None:
        """The step will offer these, request by request: probe for them together."""
        session = self._enter_open_session()
        if session is not None:
            self._stores.probe(keys, self._account, session)

    def _is_admitted(self, tracked: TrackedRequest, group: int, block: int) -> bool:
        return self._queue is None or self._queue.admitted(tracked.request, group, block)

    def block_of(self, key: OffloadKey, req_context: ReqContext) -> int:
        """Which block of its request in its group the key names."""
        return self._stores.block_of(key, req_context)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._stores.ended(keys)
        if success and self._events is not None:
            self._announce([key for key in keys if key not in self._failed])

    def _announce(self, stored: list[OffloadKey]) -> None:
        if stored and self._events is not None:
            follows = self.watched is not None
            self._events.append(
                OffloadingEvent(stored, Medium.CPU, removed=False, removal_expected=follows)
            )

    def is_being_stored(self, key: OffloadKey) -> bool:
        """Whether a store of the block is on its way."""
        return self._stores.is_storing(key)

    def fail_stores(self, tracked: TrackedRequest, keys: Collection[OffloadKey]) -> bool:
        """VLLM will complete these as if they were stored, and they were not.

        True: offer them again.
        """
        self._failed.update(keys)
        self.stats.counts[FAILED_STORES] += len(keys)
        request = tracked.request
        if tracked.has_ended:
            return False
        return request.store_attempt_failed(self._options)

    def leave_stores(
        self, tracked: TrackedRequest, keys: Collection[OffloadKey]
    ) -> set[OffloadKey]:
        """A store left some of these to another engine's: those that the page lacks, by now not
        stored, and worth another offer if that one fails. Without a session nothing is known of
        them: none counts as stored, and none is offered again.
        """
        session = self._enter_open_session()
        if session is None:
            self._failed.update(keys)
            return set()
        missing: set[OffloadKey] = set()
        for key in keys:
            group = self.groups[get_offload_group_idx(key)].index
            if not session.shows(group, tracked.request.account, get_offload_block_hash(key)):
                missing.add(key)
        self._failed.update(missing)
        return missing if session.store_threshold <= 1 else set()

    def forget_failures(self) -> set[OffloadKey]:
        """VLLM has completed them; which blocks these were."""
        failed, self._failed = self._failed, set()
        return failed

    # -- the step and the life --------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        preempted = context.preempted_req_ids
        if not preempted or self._queue is None or self.steps is None:
            return
        self.steps.draft.preempted += preempted
        for request_id in preempted:
            tracked = self._live.get(request_id)
            if tracked is not None:
                self._queue.forget(tracked.request)

    @property
    def pace(self) -> TokenPace:
        """What computing a token takes; says what a hit is worth waiting for."""
        return TokenPace() if self._queue is None else self._queue.pace

    def send_step(self, jobs: StepJobs, *, has_run: bool = True) -> tuple[bool, list[int]]:
        """Send the step's message: whether its jobs will run, and which earlier ones are lost.

        `has_run`: the step computes something.
        """
        self._stores.next_step()
        if self._queue is None or self.steps is None:
            return False, []
        session = self._enter_open_session()
        self.steps.draft.released_leases += self._queue.released_leases
        self._queue.released_leases = []
        lost, before = self.steps.lost_jobs(), self.steps.sent_s
        was_sent = self.steps.send(jobs, session)
        self._queue.step_ended(self.steps.sent_s != before, has_run=has_run)
        return was_sent, lost

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return ()
        events, self._events = self._events, []
        was_reset = self.device_resets is not None and self.device_resets.take()
        if self.watched is not None:
            if was_reset:
                self.watched.say_again()
            events = self.watched.pass_on(events)
            evicted = (event for event in events if event.removed and event.medium is Medium.CPU)
            self.stats.counts[REMOVALS] += sum(len(event.keys) for event in evicted)
        return events

    def has_pending_work(self) -> bool:
        """Whether a step would tell the daemon something: without a daemon the engine may rest."""
        if self.steps is None or self._connection is None or self._connection.session is None:
            return False
        return self.steps.has_pending_work

    def reset_cache(self) -> None:
        """Go on in a new epoch of this engine's own; other engines keep theirs.

        A live request stores nothing more until it begins anew: its KV is of before.
        """
        self._stores.clear()
        self._failed.clear()
        for tracked in self._live.values():
            tracked.request.stores_end = True
            if self._queue is not None:
                self._queue.forget(tracked.request)
        if self._connection is not None and self.steps is not None:
            self._connection.reset_epoch()
            self.steps.clear()
        if self.watched is not None:
            self.watched.forget()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self.stats.take()

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        return [{}]

    def shutdown(self) -> None:
        if self.watched is not None:
            self.watched.close()
        close = getattr(self._connection, "close", None)
        if close is not None:
            close()

    def tracked(self, req_context: ReqContext) -> TrackedRequest:
        """The request's record; begun now where vLLM never announced it."""
        tracked = req_context.get_state(TrackedRequest)
        if tracked is None:
            self.on_new_request(req_context)
            tracked = req_context.get_state(TrackedRequest)
        assert tracked is not None
        return tracked
