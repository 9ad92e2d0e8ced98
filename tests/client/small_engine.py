"""A small engine over the real client: its KV is numbers that follow from the block hashes.

One process plays scheduler and all ranks. The KV of a block in a layer is its hash, repeated
and salted with layer and rank, so every loaded byte can be checked.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_client import (
    EngineIdentity,
    Fragment,
    Group,
    GroupLayout,
    NamespaceFields,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerConnection,
    SchedulerOptions,
    SharedMemory,
    StepOutcome,
    StepPlan,
    Worker,
)
from kvd_client.connection import SILENT_AFTER_S
from kvd_client.worker.worker import FLUSH_TIMEOUT_S

TOKENS = 16
LAYERS = 4
FRAGMENT_BYTES = 1024
BLOCK_BYTES = LAYERS * FRAGMENT_BYTES
HASH_BYTES = 32
NUM_BLOCKS = 256


def block_hashes(prompt: str, count: int) -> list[bytes]:
    """Chained hashes of the prompt's blocks."""
    hashes: list[bytes] = []
    parent = prompt.encode()
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        hashes.append(parent)
    return hashes


def block_bytes(content: bytes, layer: int, rank: int) -> npt.NDArray[np.uint8]:
    """The KV of one engine block in one layer on one rank."""
    seed = [*content, layer, rank]
    return np.random.default_rng(seed).integers(0, 255, FRAGMENT_BYTES, dtype=np.uint8)


class Rank:
    """One rank's KV memory and its worker side."""

    def __init__(
        self, socket: str, identity: EngineIdentity, rank: int, world_size: int, flush_s: float
    ) -> None:
        self.rank = rank
        size = LAYERS * NUM_BLOCKS * FRAGMENT_BYTES
        self.fd = os.memfd_create("engine-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self.kv = np.frombuffer(self._map, dtype=np.uint8).reshape(
            LAYERS, NUM_BLOCKS, FRAGMENT_BYTES
        )
        self.worker = Worker(socket, identity, rank, world_size, flush_timeout_s=flush_s)
        fragments = [
            Fragment(0, layer * NUM_BLOCKS * FRAGMENT_BYTES, FRAGMENT_BYTES, FRAGMENT_BYTES)
            for layer in range(LAYERS)
        ]
        self.worker.register([SharedMemory(self.fd, 0, size)], [GroupLayout(NUM_BLOCKS, fragments)])

    def compute(self, block: int, content: bytes) -> None:
        for layer in range(LAYERS):
            self.kv[layer, block] = block_bytes(content, layer, self.rank)

    def holds(self, block: int, content: bytes) -> bool:
        return all(
            np.array_equal(self.kv[layer, block], block_bytes(content, layer, self.rank))
            for layer in range(LAYERS)
        )

    def close(self) -> None:
        self.worker.close()
        del self.kv
        self._map.close()
        os.close(self.fd)


# A loaded machine can keep a sound daemon from answering for longer than an engine should wait,
# and then the engine goes on without it, rightly. A test of what is stored and loaded waits.
PATIENCE_S = 20.0


class SmallEngine:
    """Runs requests whose blocks are numbered by the test.

    It waits for the daemon as long as it takes; one that is not `patient` has the client's own
    limits, and may miss what is there.
    """

    def __init__(
        self,
        socket: str,
        engine_id: str = "e0",
        world_size: int = 1,
        blocks_per_block: int = 1,
        patient: bool = True,
    ) -> None:
        self.width = blocks_per_block
        group = Group(
            tokens_per_block=TOKENS * blocks_per_block,
            shard_bytes=(BLOCK_BYTES,) * world_size,
            blocks_per_block=blocks_per_block,
        )
        identity = EngineIdentity(engine_id, os.urandom(16))
        namespace = NamespaceFields(
            model="small",
            kv_dtype="uint8",
            hash_algorithm="sha256-chain",
            hash_bytes=HASH_BYTES,
            parallel_shape=f"tp{world_size}",
            groups=(group,),
        )
        silent_s = PATIENCE_S if patient else SILENT_AFTER_S
        flush_s = PATIENCE_S if patient else FLUSH_TIMEOUT_S
        options = SchedulerOptions(lookup_give_up_s=PATIENCE_S) if patient else SchedulerOptions()
        self.connection = SchedulerConnection(socket, identity, namespace, world_size, silent_s)
        self.scheduler = Scheduler(self.connection, options)
        self.ranks = [
            self.make_rank(socket, identity, rank, world_size, flush_s)
            for rank in range(world_size)
        ]
        self.finished_loads: set[str] = set()
        self.failed_loads: set[str] = set()
        self.stored_blocks = 0

    def make_rank(
        self, socket: str, identity: EngineIdentity, rank: int, world_size: int, flush_s: float
    ) -> Rank:
        """For engines whose KV lies elsewhere."""
        return Rank(socket, identity, rank, world_size, flush_s)

    def wait_usable(self, seconds: float = 20.0) -> None:
        assert self.connection.wait_usable(seconds), (
            self.connection.problem,
            [rank.worker.problem for rank in self.ranks],
        )

    def step(
        self, *scheduled: ScheduledRequest, preempted: Sequence[str] = ()
    ) -> tuple[StepPlan, StepOutcome]:
        plan = self.scheduler.build_step(scheduled, preempted)
        for rank in self.ranks:
            rank.worker.start_step(plan)
            rank.worker.finish_step(plan)
        outcome = self.scheduler.update_from_workers(
            [rank.worker.get_finished() for rank in self.ranks]
        )
        self.finished_loads.update(outcome.finished_loads)
        self.failed_loads.update(outcome.failed_loads)
        self.stored_blocks += sum(len(stored.block_hashes) for stored in outcome.stored)
        return plan, outcome

    def step_until_idle(self, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while self.scheduler.has_pending_work():
            assert time.monotonic() < deadline, "jobs stay unreported"
            self.step()
            time.sleep(0.001)

    def arrive(
        self, request_id: str, prompt: str, count: int, more_tokens: int = 1, **params: Any
    ) -> list[bytes]:
        """A request of `count` whole blocks and some more tokens."""
        hashes = block_hashes(prompt, count)
        num_tokens = count * self.width * TOKENS + more_tokens
        self.scheduler.on_new_request(request_id, num_tokens, [hashes], RequestParams(**params))
        return hashes

    def contents(self, hashes: Sequence[bytes]) -> list[bytes]:
        """What is in each engine block of these blocks."""
        return [h + bytes([part]) for h in hashes for part in range(self.width)]

    def compute(self, table: Sequence[int], contents: Sequence[bytes]) -> None:
        for rank in self.ranks:
            for block, content in zip(table, contents, strict=True):
                rank.compute(block, content)

    def match(self, request_id: str, seconds: float = 20.0, computed: int = 0) -> int:
        """Tokens found, stepping while the answer is 'ask again'."""
        deadline = time.monotonic() + seconds
        ask = self.scheduler.get_num_new_matched_tokens
        while (found := ask(request_id, computed)) is None:
            assert time.monotonic() < deadline, "asked for ever"
            self.step()
        return found

    def store(self, request_id: str, prompt: str, count: int, first_block: int = 0) -> None:
        """Compute a prompt, let it be stored, finish it."""
        hashes = self.arrive(request_id, prompt, count)
        table = list(range(first_block, first_block + count * self.width))
        self.scheduler.update_state_after_alloc(request_id, [table], 0)
        self.compute(table, self.contents(hashes))
        self.step(ScheduledRequest(request_id, [table], len(table) * TOKENS))
        self.scheduler.request_finished(request_id, [table])
        self.step_until_idle()

    def load(self, request_id: str, prompt: str, count: int, first_block: int = 100) -> int:
        """Load what there is of a prompt; engine blocks loaded, every byte checked."""
        hashes = self.arrive(request_id, prompt, count)
        found = self.match(request_id)
        table = list(range(first_block, first_block + count * self.width))
        self.scheduler.update_state_after_alloc(request_id, [table], found)
        if found:
            self.step_until_loaded(request_id)
        loaded = found // TOKENS if request_id in self.finished_loads else 0
        self.check(table[:loaded], self.contents(hashes)[:loaded])
        self.scheduler.request_finished(request_id, [table])
        self.step()
        return loaded

    def check(self, table: Sequence[int], contents: Sequence[bytes]) -> None:
        for rank in self.ranks:
            for block, content in zip(table, contents, strict=True):
                assert rank.holds(block, content), f"wrong bytes in block {block}"

    def step_until_loaded(self, request_id: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while request_id not in self.finished_loads | self.failed_loads:
            assert time.monotonic() < deadline, "the load does not end"
            self.step()
            time.sleep(0.001)

    def close(self) -> None:
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.close()
        self.connection.close()
