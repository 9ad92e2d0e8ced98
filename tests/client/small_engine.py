"""The toy engine over kvd's own client: every byte of its KV follows from its block's key.

It plays a scheduler and its ranks, and takes a step only when told to. Tests of the client have
it in their own process. Those that kill it have it in another (tests/faults/probe_engine.py).
Tests of GPUs give it other memory, and benchmarks (benchmarks/rig.py) time what it does.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd_client import (
    EngineIdentity,
    Group,
    NamespaceFields,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerConnection,
    SchedulerOptions,
    StepOutcome,
    StepPlan,
    Worker,
)
from kvd_client.connection import SILENT_AFTER_S
from kvd_client.worker.worker import FLUSH_TIMEOUT_S, LOAD_DEADLINE_S
from tests.client.content import HASH_BYTES, TOKENS, Words, block_hashes, block_words
from tests.client.kv_memory import HOST, GpuMemory, HostMemory, KvMemory

IDLE_S = 0.001
WAIT_S = 30.0  # for whatever it is that ends
# A loaded machine can keep a sound daemon from answering for longer than an engine should wait,
# and then the engine goes on without it, rightly. A test of what is stored and loaded waits.
PATIENCE_S = 20.0
PATIENT = SchedulerOptions(lookup_give_up_s=PATIENCE_S)


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is, and how long it waits for its daemon."""

    engine_id: str = "e0"
    world_size: int = 1
    ranks: Sequence[int] | None = None  # those that this process plays; all
    width: int = 1  # engine blocks in a block
    num_blocks: int = 256
    block_bytes: int = 4096  # of an engine block on each rank
    layers: int = 2
    memory: str = HOST  # or a kind of GPU memory, of tests.gpu.device_memory.KINDS
    model: str = "small"
    salt: str = ""  # another one has other bytes under the same keys
    tenant: str = ""
    unshared: bool = False
    silent_after_s: float = PATIENCE_S
    flush_timeout_s: float = PATIENCE_S
    load_deadline_s: float = LOAD_DEADLINE_S
    options: SchedulerOptions = PATIENT

    def namespace(self) -> NamespaceFields:
        """One group of full attention, with a shard for each rank."""
        group = Group(
            tokens_per_block=TOKENS * self.width,
            shard_bytes=(self.block_bytes,) * self.world_size,
            blocks_per_block=self.width,
        )
        return NamespaceFields(
            model=self.model,
            kv_dtype="uint64",
            hash_algorithm="sha256-chain",
            hash_bytes=HASH_BYTES,
            parallel_shape=f"tp{self.world_size}",
            tenant=self.tenant,
            groups=(group,),
            unshared=self.unshared,
        )


# The client's own limits, by which an engine may miss what is there.
IMPATIENT: dict[str, Any] = {
    "silent_after_s": SILENT_AFTER_S,
    "flush_timeout_s": FLUSH_TIMEOUT_S,
    "options": SchedulerOptions(),
}


class Rank:
    """One rank's KV memory and its worker side."""

    def __init__(self, rank: int, worker: Worker, kv: KvMemory) -> None:
        self.rank, self.worker, self.kv = rank, worker, kv

    def close(self) -> None:
        self.worker.close()
        self.kv.close()


class SmallEngine:
    """Runs requests whose blocks are numbered by the test."""

    def __init__(self, socket: str, engine_id: str = "e0", **changes: Any) -> None:
        self.settings = settings = EngineSettings(engine_id, **changes)
        self.width = settings.width
        identity = EngineIdentity(engine_id, os.urandom(16))
        self.connection = SchedulerConnection(
            socket, identity, settings.namespace(), settings.world_size, settings.silent_after_s
        )
        self.scheduler = Scheduler(self.connection, settings.options)
        played = range(settings.world_size) if settings.ranks is None else settings.ranks
        self.ranks = [self.make_rank(socket, identity, rank) for rank in played]
        self.finished_loads: set[str] = set()
        self.failed_loads: set[str] = set()
        self.stored: list[bytes] = []  # the keys of blocks that were reported as stored
        self._held: list[StepPlan] = []  # their halves are not said to be ready yet

    def make_rank(self, socket: str, identity: EngineIdentity, rank: int) -> Rank:
        """One rank, registered."""
        settings = self.settings
        kv = self.make_memory()
        worker = Worker(
            socket,
            identity,
            rank,
            settings.world_size,
            flush_timeout_s=settings.flush_timeout_s,
            load_deadline_s=settings.load_deadline_s,
        )
        kv.register(worker)
        return Rank(rank, worker, kv)

    def make_memory(self) -> KvMemory:
        """A rank's."""
        settings = self.settings
        shape = (settings.num_blocks, settings.block_bytes, settings.layers)
        if settings.memory == HOST:
            return HostMemory(f"kv-{settings.engine_id}", *shape)
        return GpuMemory(*shape, settings.memory)

    def wait_usable(self, seconds: float = WAIT_S) -> None:
        """Until scheduler and ranks may begin jobs: the scheduler hears of it a moment before."""
        are_there = self.connection.wait_usable(seconds) and all(
            rank.worker.wait_registered(seconds) for rank in self.ranks
        )
        problems = [rank.worker.problem for rank in self.ranks]
        assert are_there, (self.connection.problem, problems)

    # -- steps ------------------------------------------------------------------------------

    def step(
        self,
        *scheduled: ScheduledRequest,
        preempted: Sequence[str] = (),
        hold: bool = False,
        overwrite: Callable[[], None] | None = None,
    ) -> tuple[StepPlan, StepOutcome]:
        """One step. `hold`: the workers don't hear of its jobs before `ready`.

        `overwrite` is what the step does to its blocks. A store of an earlier step may still read
        them, so it comes once what the plan flushes has ended; with `hold` that is the test's care.
        """
        plan = self.scheduler.build_step(scheduled, preempted)
        if hold:
            self._held.append(plan)
            if overwrite is not None:
                overwrite()
        else:
            self._work(plan, overwrite)
        outcome = self.scheduler.update_from_workers(
            [rank.worker.get_finished() for rank in self.ranks]
        )
        self.finished_loads.update(outcome.finished_loads)
        self.failed_loads.update(outcome.failed_loads)
        for stored in outcome.stored:
            self.stored += stored.block_hashes
        return plan, outcome

    def ready(self) -> None:
        """Say ready for all that was held back."""
        held, self._held = self._held, []
        for plan in held:
            self._work(plan)

    def _work(self, plan: StepPlan, overwrite: Callable[[], None] | None = None) -> None:
        for rank in self.ranks:
            rank.worker.flush_step(plan)
        if overwrite is not None:
            overwrite()
        for rank in self.ranks:
            rank.worker.start_loads(plan)
            rank.worker.finish_step(plan)

    def step_until_idle(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.scheduler.has_pending_work():
            assert time.monotonic() < deadline, "jobs stay unreported"
            self.step()
            time.sleep(IDLE_S)

    def step_until_loaded(self, request_id: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while request_id not in self.finished_loads | self.failed_loads:
            assert time.monotonic() < deadline, f"the load does not end: {self.connection.problem}"
            self.step()
            time.sleep(IDLE_S)

    # -- requests ---------------------------------------------------------------------------

    def arrive(
        self, request_id: str, prompt: str, count: int, more_tokens: int = 1, **params: Any
    ) -> list[bytes]:
        """A request of `count` whole blocks and some more tokens; their keys."""
        hashes = block_hashes(prompt, count)
        num_tokens = count * self.width * TOKENS + more_tokens
        self.scheduler.on_new_request(request_id, num_tokens, [hashes], RequestParams(**params))
        return hashes

    def match(self, request_id: str, computed: int = 0) -> int:
        """Tokens found, stepping while the answer is 'ask again'."""
        deadline = time.monotonic() + WAIT_S
        ask = self.scheduler.get_num_new_matched_tokens
        while (found := ask(request_id, computed)) is None:
            assert time.monotonic() < deadline, "asked for ever"
            self.step()
            time.sleep(IDLE_S)
        return found

    def prefill(
        self, request_id: str, prompt: str, count: int, first_block: int = 0, hold: bool = False
    ) -> list[int]:
        """A request whose blocks are computed in one step, which begins to store them; its table.

        It still runs.
        """
        hashes = self.arrive(request_id, prompt, count)
        table = self.table(count, first_block)
        self.scheduler.update_state_after_alloc(request_id, [table], 0)
        scheduled = ScheduledRequest(request_id, [table], len(table) * TOKENS)
        contents = self.contents(hashes)
        self.step(scheduled, hold=hold, overwrite=lambda: self.compute(table, contents))
        return table

    def start_load(
        self, request_id: str, tokens: int, table: Sequence[int], hold: bool = False
    ) -> None:
        """Submit the load of so many tokens that were found, into wiped blocks of the table."""

        def wipe() -> None:
            for rank in self.ranks:
                rank.kv.wipe(table[0], tokens // TOKENS)

        self.scheduler.update_state_after_alloc(request_id, [table], tokens)
        self.step(hold=hold, overwrite=wipe)

    def store(self, request_id: str, prompt: str, count: int, first_block: int = 0) -> None:
        """Compute a prompt, let it be stored, finish it."""
        table = self.prefill(request_id, prompt, count, first_block)
        self.scheduler.request_finished(request_id, [table])
        self.step_until_idle()

    def load(self, request_id: str, prompt: str, count: int, first_block: int = 100) -> int:
        """Load what there is of a prompt; engine blocks loaded, every byte checked."""
        hashes = self.arrive(request_id, prompt, count)
        found = self.match(request_id)
        table = self.table(count, first_block)
        self.start_load(request_id, found, table)
        if found:
            self.step_until_loaded(request_id)
        loaded = found // TOKENS if request_id in self.finished_loads else 0
        self.check(table[:loaded], self.contents(hashes)[:loaded])
        self.scheduler.request_finished(request_id, [table])
        self.step()
        return loaded

    # -- blocks -----------------------------------------------------------------------------

    def table(self, count: int, first_block: int) -> list[int]:
        """The engine blocks of so many blocks, one behind the other."""
        return list(range(first_block, first_block + count * self.width))

    def contents(self, hashes: Sequence[bytes]) -> list[bytes]:
        """What is in each engine block of these blocks, in short: the seed of its bytes."""
        if self.width == 1:
            return list(hashes)
        parts = range(self.width)
        return [hashlib.sha256(h + bytes([part])).digest() for h in hashes for part in parts]

    def words(self, rank: Rank, content: bytes) -> Words:
        """What an engine block with this content holds on a rank."""
        salted = hashlib.sha256(self.settings.salt.encode() + content).digest()
        seed = salted if self.settings.salt else content
        return block_words(seed, rank.rank, self.settings.block_bytes)

    def compute(self, table: Sequence[int], contents: Sequence[bytes]) -> None:
        for rank in self.ranks:
            for block, content in zip(table, contents, strict=True):
                rank.kv.write(block, self.words(rank, content))

    def wrong(self, table: Sequence[int], contents: Sequence[bytes]) -> list[int]:
        """The places in the table of blocks that don't hold what they should on every rank."""
        return [
            place
            for place, (block, content) in enumerate(zip(table, contents, strict=True))
            if not all(
                np.array_equal(rank.kv.read(block), self.words(rank, content))
                for rank in self.ranks
            )
        ]

    def check(self, table: Sequence[int], contents: Sequence[bytes]) -> None:
        wrong = self.wrong(table, contents)
        assert not wrong, f"wrong bytes in blocks {[table[place] for place in wrong]}"

    def close(self) -> None:
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.close()
        self.connection.close()
