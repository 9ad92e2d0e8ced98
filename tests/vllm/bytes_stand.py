"""A stand with several cache groups, whose every read finds out whether the bytes are right.

A block that vLLM gives to a request is spoiled before the step's forward, where a model may write
first: so a block that is given away too early, or stored too late, shows. `audit` loads every block
that was ever stored. Blocks and a stand's groups have one memory, as vLLM lays it out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

from kvd_client.draft import BlockRun, JobDraft, StepDraft, request_context
from kvd_client.integrations.vllm.metadata import KvdConnectorMetadata
from kvd_client.scheduler import StepPlan
from tests.vllm.modelled_bytes import WORD_BITS, WORDS, GroupMemory, GroupShape, run_on
from tests.vllm.scheduler_stand import Stand, StandOptions

PATIENCE_SECONDS = 30.0
FIRST_AUDIT = 2**40  # vLLM's numbers of such jobs
AUDITED_AT_ONCE = 16
AUDIT_POLL_S = 0.001


@dataclass(slots=True)
class Computed:
    """What the worker knows of a request: how far it is, and its tables in the last step."""

    tokens: int
    tables: list[set[int]]
    states: list[int | None] = field(default_factory=list)  # where each group's state lies


def _require(says: str, is_right: Callable[..., bool], *what: Any) -> None:
    assert is_right(*what), says


class BytesStand(Stand):
    """One rank and these groups."""

    def __init__(
        self,
        model: str,
        transfer: dict[str, Any],
        groups: Sequence[tuple[Any, ...]],
        options: StandOptions,
    ) -> None:
        self.groups = [GroupShape(*figures) for figures in groups]
        self._computed: dict[str, Computed] = {}
        self._prompts: dict[bytes, list[int]] = {}  # by hash of a block: the tokens up to its end
        self.stored: dict[tuple[int, bytes], int] = {}  # kvd's group, hash -> engine blocks
        self.loaded = 0
        self._checks: list[tuple[str, Callable[[], bool]]] = []  # of what a step stores
        self.weights = 0  # how often they were updated
        super().__init__(model, transfer, options)
        storage = next(iter(self.caches.values())).untyped_storage()
        memory = torch.empty(0, dtype=torch.int64).set_(storage).numpy().view(np.uint64)
        self.blocks = memory[: options.num_blocks * WORDS].reshape(options.num_blocks, WORDS)
        self.memory = [GroupMemory(self.blocks, g, shape) for g, shape in enumerate(self.groups)]

    def make_layout(self) -> KVCacheConfig:
        cache = self.config.cache_config
        if any(shape.recurrent for shape in self.groups):
            cache.mamba_cache_mode = "align"
            cache.block_size = max(shape.tokens for shape in self.groups if shape.recurrent)
            cache.prefix_match_unit = min(16, *(shape.tokens for shape in self.groups))
        specs = [
            KVCacheGroupSpec([f"layers.{number}.attn"], shape.spec)
            for number, shape in enumerate(self.groups)
        ]
        block_bytes = WORDS * WORD_BITS // 8
        return get_kv_cache_config_from_groups(
            self.config, specs, self.options.num_blocks * block_bytes
        )

    # -- requests ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        super().add(request)
        self._note(self.scheduler.requests[request.request_id])

    def add_input(self, more: Request) -> None:
        """More of a request that is there already."""
        self.scheduler.add_request(more)

    def _note(self, request: Request) -> None:
        tokens = list(request.all_token_ids)
        for place, block_hash in enumerate(request.block_hashes):
            self._prompts.setdefault(bytes(block_hash), tokens[: (place + 1) * self.hash_tokens])

    def take_other_weights(self) -> None:
        """From now on the model is another one: no block of before is right any more."""
        self.weights += 1
        self.stored.clear()

    def watch(self, connection: Any) -> None:
        """Note all that this connection orders from now on."""
        send_step = connection.send_step

        def noted(step: Any) -> bool:
            for run in (run for job in step.stores for run in job.runs):
                width = len(run.engine_blocks) // len(run.block_hashes)
                self.stored.update({(run.group, bytes(h)): width for h in run.block_hashes})
                self._check_later(run, width)
            self.loaded += sum(len(run.block_hashes) for job in step.loads for run in job.runs)
            sent: bool = send_step(step)
            return sent

        connection.send_step = noted

    def _check_later(self, run: BlockRun, width: int) -> None:
        """As the step begins, or once it is computed, these must hold what they are stored as.

        A block that the step gives away is read before, one that it computes after.
        """
        if any(bytes(each) not in self._prompts for each in run.block_hashes):
            for request in self.scheduler.requests.values():  # some were given more input
                self._note(request)
        for place, block_hash in enumerate(run.block_hashes):
            blocks = list(run.engine_blocks[place * width : (place + 1) * width])
            prompt = self._prompts[bytes(block_hash)]
            _, numbers = run_on(prompt, len(prompt), self.weights)
            says = f"stored: group {run.group}, {len(prompt)} tokens, {blocks}"
            assert all(0 < block < len(self.blocks) for block in blocks), says
            self._checks.append((says, partial(self.memory[run.group].is_whole, blocks, numbers)))

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Of what this step stores: once as it begins, and once it is computed."""
        checks, self._checks = self._checks, []
        were_right = [False] * len(checks)

        def look() -> None:
            were_right[:] = [is_right() for _, is_right in checks]

        self.launch(look)
        yield
        for place, (says, is_right) in enumerate(checks):
            self.launch(partial(_require, says, lambda p, i: were_right[p] or i(), place, is_right))

    # -- the step ---------------------------------------------------------------------------

    def _finish_oldest(self) -> None:
        requests = list(self.scheduler.requests.values())
        super()._finish_oldest()
        for request in requests:
            self._note(request)

    def finish_steps(self) -> None:
        """Take the output of all that was scheduled ahead."""
        while self._outputs:
            self._finish_oldest()

    def _work(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        with self._checked():
            return self._compute(scheduled)

    def _compute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        orders = scheduled.kv_connector_metadata
        self.worker.handle_preemptions(orders)
        self._begin(scheduled)
        self._spoil_loaded(orders)
        names = list(scheduled.num_scheduled_tokens)
        steps = [self._prepare(name, scheduled.num_scheduled_tokens[name]) for name in names]
        for copy in scheduled.kv_cache_block_copies or ():
            self.launch(partial(self._copy, copy.dst_block_id, copy.src_block_id))
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as told,
        ):
            sampled = [
                self._forward(name, table, scheduled.num_scheduled_tokens[name])
                for name, table in zip(names, steps, strict=True)
            ]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def _begin(self, scheduled: SchedulerOutput) -> None:
        cached = scheduled.scheduled_cached_reqs
        counts = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        began = {name: count for name, count in counts if name in cached.resumed_req_ids}
        began |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for name, tokens in began.items():
            states: list[int | None] = [
                (tokens - 1) // shape.tokens if tokens else None for shape in self.groups
            ]
            self._computed[name] = Computed(tokens, [set() for _ in self.groups], states)

    def launch(self, what: Callable[[], None]) -> None:
        """What the device does next, after all that it was told before; here at once."""
        what()

    def _copy(self, to: int, source: int) -> None:
        self.blocks[to] = self.blocks[source]

    def _spoil(self, blocks: Sequence[int]) -> None:
        self.launch(partial(self._write_over, blocks, np.uint64(time.monotonic_ns())))

    def _write_over(self, blocks: Sequence[int], word: np.uint64) -> None:
        self.blocks[blocks] = word

    def _spoil_loaded(self, orders: KvdConnectorMetadata) -> None:
        """Blocks that loads were given, before these begin."""
        for name in orders.load_requests.values():
            status = self.connector.connector_scheduler._req_status[name]
            tables = self.scheduler.kv_cache_manager.get_blocks(name).blocks
            for shape, table in zip(self.groups, tables, strict=True):
                first = -(-status.num_locally_computed_tokens // shape.tokens)
                given = (b for b in table[first:] if not b.is_null and b.block_hash is None)
                self._spoil([block.block_id for block in given])

    def _prepare(self, name: str, _scheduled: int) -> list[list[int]]:
        """The request's tables; what is new in them and not computed yet holds anything."""
        known = self._computed[name]
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for place, (shape, table) in enumerate(zip(self.groups, tables, strict=True)):
            new = set(table[-(-known.tokens // shape.tokens) :]) - known.tables[place] - {0}
            self._spoil(sorted(new))
            known.tables[place] = set(table)
        return [list(table) for table in tables]

    def _forward(self, name: str, tables: list[list[int]], scheduled: int) -> list[int]:
        """Read what is there, write what is computed; the sampled token, if there is one."""
        request, known = self.scheduler.requests[name], self._computed[name]
        first, end = known.tokens, known.tokens + scheduled
        tokens, numbers = run_on(request.all_token_ids, end + 1, self.weights)
        for place, (memory, table) in enumerate(zip(self.memory, tables, strict=True)):
            says = f"{name}: group {place} of {first} tokens, and {scheduled}: {table}"
            if memory.shape.recurrent:
                before = known.states[place]
                known.states[place] = now = (end - 1) // memory.shape.tokens
                if before is not None:
                    of_before = table[before], numbers[first - 1]
                    self.launch(partial(_require, says, memory.is_state, *of_before))
                self.launch(partial(memory.write_state, table[now], numbers[end - 1]))
                continue
            attended = memory.shape.attended(first)
            self.launch(partial(_require, says, memory.are_right, table, numbers, attended))
            self.launch(partial(memory.write, table, numbers, range(first, end)))
        known.tokens = end
        return [] if request.is_prefill_chunk else [tokens[end]]

    # -- at rest ----------------------------------------------------------------------------

    def audit(self, connection: Any) -> int:
        """Load every block that was ever stored, and compare; how many there were."""
        keys, found = list(self.stored), 0
        for start in range(0, len(keys), AUDITED_AT_ONCE):
            part = keys[start : start + AUDITED_AT_ONCE]
            scheduling, first, jobs = self.connector.connector_scheduler, 1, {}
            for key in part:
                blocks = range(first, first + self.stored[key])
                jobs[next(scheduling._job_ids)] = (key, blocks)
                first = blocks.stop
            failed = self._load(connection, jobs)
            for job, ((group, block_hash), blocks) in jobs.items():
                if job in failed:
                    continue
                found += 1
                prompt = self._prompts[block_hash]
                _, numbers = run_on(prompt, len(prompt), self.weights)
                assert self.memory[group].is_whole(blocks, numbers), (group, len(prompt))
        return found

    def _load(self, connection: Any, jobs: dict[int, Any]) -> set[int]:
        """Run these loads, one block each; which of them found nothing."""
        drafts = []
        for job, ((group, block_hash), blocks) in jobs.items():
            run = BlockRun(group, 0, [block_hash], list(blocks))
            drafts.append(JobDraft(job, request_context(f"audit {job}", "", 0, ()), [run]))
        assert connection.send_step(
            StepDraft(loads=drafts, generation=connection.session.generation)
        )
        requests = {FIRST_AUDIT + job: str(job) for job in jobs}
        orders = KvdConnectorMetadata(
            load_jobs={}, store_jobs={}, plan=StepPlan(loads=tuple(jobs)), load_requests=requests
        )
        orders.owners = {job: FIRST_AUDIT + job for job in jobs}
        rank = self.worker.connector_worker
        rank.start_kv_transfers(orders)
        rank.prepare_store_kv(orders)
        ended, failed = set[str](), set[str]()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(ended) < len(jobs):
            assert time.monotonic() < deadline, "a load does not end"
            results = rank.get_transfer_results(set())
            ended |= results.finished_recving
            failed |= results.failed_recving
            time.sleep(AUDIT_POLL_S)
        rank.build_connector_worker_meta()
        return {int(name) for name in failed}

    def left(self) -> dict[str, Any]:
        """What the connector's tables still hold of what has ended."""
        scheduling = self.connector.connector_scheduler
        manager, rank = scheduling.manager, self.worker.connector_worker
        tables = {
            "requests": scheduling._req_status,
            "jobs": scheduling._jobs,
            "fences": scheduling._block_id_to_pending_jobs,
            "fences as lists": scheduling._fenced_lists,
            "being loaded": scheduling._chunks_being_loaded,
            "looks": scheduling._next_look,
            "renamed": scheduling._ended_before,
            "tracked": manager._live,
            "being stored": manager._stores._storing,
            "failed": manager._failed,
            "leaving": () if scheduling._device is None else scheduling._device.jobs,
            "the rank's jobs": rank._jobs,
            "their parts": rank._owners,
            "jobs sent": manager.steps.jobs._jobs,
            "parts of these": manager.steps.jobs._owners,
            "unanswered": manager._queue._unanswered,
            "released unanswered": manager._queue._released,
            "computed": scheduling._never_computed._computed,
            "sessions": scheduling._sessions._last,
            "prompts timed": scheduling._prompt_times._computing,
            "asked": scheduling._beside._asked,
        }
        return {name: table for name, table in tables.items() if table}
