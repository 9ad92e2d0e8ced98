"""A scheduler side over the fake daemon, with a hand-moved clock and one step in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvd_client import (
    Group,
    GroupKind,
    JobReport,
    NamespaceFields,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerOptions,
    StepOutcome,
    StepPlan,
    WorkerReport,
)
from tests.client.fake_daemon import HASH_BYTES, FakeDaemon, hashes

TOKENS = 16
FULL = Group(tokens_per_block=TOKENS, shard_bytes=(64,))
WIDE = Group(tokens_per_block=4 * TOKENS, shard_bytes=(64,), blocks_per_block=4)
SLIDING = Group(
    tokens_per_block=TOKENS,
    shard_bytes=(64,),
    kind=GroupKind.SLIDING_WINDOW,
    sliding_window_tokens=2 * TOKENS,
)
RECURRENT = Group(tokens_per_block=4 * TOKENS, shard_bytes=(64,), kind=GroupKind.RECURRENT_STATE)


def namespace(*groups: Group) -> NamespaceFields:
    return NamespaceFields(
        model="m",
        kv_dtype="float32",
        hash_algorithm="sha256",
        hash_bytes=HASH_BYTES,
        groups=groups or (FULL,),
    )


class Rig:
    """Blocks of request `p` in group g have the hashes `p<g>-0`, `p<g>-1`, …"""

    def __init__(
        self,
        *groups: Group,
        options: SchedulerOptions | None = None,
        world_size: int = 1,
        store_threshold: int = 1,
    ) -> None:
        self.now = 100.0
        self.groups = groups or (FULL,)
        self.daemon = FakeDaemon(namespace(*self.groups), world_size)
        self.daemon.store_threshold = store_threshold
        self.world_size = world_size
        self.scheduler = Scheduler(self.daemon, options, lambda: self.now)

    def keys(self, prefix: str, num_tokens: int) -> list[list[bytes]]:
        return [
            hashes(f"{prefix}{g}-", num_tokens // group.tokens_per_block)
            for g, group in enumerate(self.groups)
        ]

    def holds(self, prefix: str, num_tokens: int, group: int = 0, status: int = 1) -> None:
        """The daemon has the first `num_tokens` of the prefix."""
        self.daemon.holds(self.keys(prefix, num_tokens)[group], status)

    def arrive(self, request_id: str, num_tokens: int, prefix: str = "p", **params: Any) -> None:
        context = RequestParams(**params)
        self.scheduler.on_new_request(
            request_id, num_tokens, self.keys(prefix, num_tokens), context
        )

    def ask(self, request_id: str, computed: int = 0, most: int | None = None) -> int | None:
        return self.scheduler.get_num_new_matched_tokens(request_id, computed, most)

    def allocate(self, request_id: str, tables: Sequence[Sequence[int]], external: int = 0) -> None:
        self.scheduler.update_state_after_alloc(request_id, tables, external)

    def step(
        self,
        *scheduled: tuple[str, Sequence[Sequence[int]], int],
        preempted: Iterable[str] = (),
        near_eviction: Iterable[tuple[int, int]] = (),
    ) -> StepPlan:
        entries = [ScheduledRequest(*entry) for entry in scheduled]
        return self.scheduler.build_step(entries, preempted, near_eviction)

    def begin_load(self, count: int) -> int:
        """Request `r` of `count` blocks loads its first three in blocks 0, 1, …; the job."""
        self.holds("p", 3 * TOKENS)
        self.arrive("r", count * TOKENS)
        assert self.ask("r") == 3 * TOKENS
        self.allocate("r", [blocks(0, count)], 3 * TOKENS)
        [job] = self.step().loads
        return job

    def report(self, *job_ids: int, done: bool = True, ranks: Iterable[int] = ()) -> StepOutcome:
        ended = tuple(JobReport(job_id, done) for job_id in job_ids)
        chosen = list(ranks) or range(self.world_size)
        return self.scheduler.update_from_workers([WorkerReport(r, ended) for r in chosen])

    def stored_hashes(self) -> list[bytes]:
        """What the last step asked the daemon to store."""
        return [h for job in self.daemon.last_step.stores for run in job.runs for h in run[2]]


def blocks(first: int, count: int) -> list[int]:
    """`count` engine block ids from `first` on."""
    return list(range(first, first + count))
