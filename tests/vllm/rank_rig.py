"""Ranks of the connector over a real daemon, driven as vLLM drives them, without a model.

The test plays vLLM's scheduler: it chooses jobs and blocks, sends the step's message itself,
and hands each rank the step's metadata. KV is allocated and viewed by vLLM's own code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.worker.utils import allocate_kv_cache

from kvd_client.connection import SchedulerConnection
from kvd_client.draft import BlockRun, JobDraft, StepDraft, request_context
from kvd_client.identity import Group, NamespaceFields
from kvd_client.integrations.vllm.identity.namespace import engine_identity
from kvd_client.integrations.vllm.metadata import KvdConnectorMetadata
from kvd_client.integrations.vllm.rank.worker import KvdConnectorWorker
from kvd_client.integrations.vllm.spec import KvdOffloadingSpec
from kvd_client.scheduler import StepPlan
from kvd_proto.groups import GroupKind
from tests.daemon_process import DaemonProcess, is_alive

BLOCK_TOKENS = 32
KV_HEADS = 2
HEAD_SIZE = 16
LAYER_BYTES = 2 * KV_HEADS * BLOCK_TOKENS * HEAD_SIZE * 4  # of one block, in float32
NUM_BLOCKS = 32
PATIENCE_S = 20.0

Jobs = dict[int, bool]  # by kvd's job id: whether it was done


def attention(sliding_window: int = 0) -> FullAttentionSpec | SlidingWindowSpec:
    figures = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    if sliding_window:
        return SlidingWindowSpec(**figures, sliding_window=sliding_window)
    return FullAttentionSpec(**figures)


def cache_config(groups: int = 1, layers: int = 3) -> KVCacheConfig:
    """Groups of so many layers each, which overlay each other's bytes as vLLM has them."""
    size = layers * LAYER_BYTES * NUM_BLOCKS
    names = [[f"layer.{g}.{layer}" for layer in range(layers)] for g in range(groups)]
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=size,
                layers=group,
                layer_stride=LAYER_BYTES * NUM_BLOCKS,
                block_stride=LAYER_BYTES,
            )
            for group in names
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(group, attention(sliding_window=64 * g))
            for g, group in enumerate(names)
        ],
    )


def offloading_config(rank: int, world_size: int, **more: Any) -> OffloadingConfig:
    caches: KVCacheConfig = more.pop("caches")
    blocks_per_chunk = more.pop("blocks_per_chunk", 1)
    replicated = more.pop("replicated", False)
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=BLOCK_TOKENS,
                layer_names=tuple(group.layer_names),
                group_id=index,
            )
            for index, group in enumerate(caches.kv_cache_groups)
        ),
        worker_kv_bytes_per_block=LAYER_BYTES,
        enable_kv_cache_events=False,
        extra_config=more,
        engine_id="rig",
        model=OffloadingModelConfig(name="rig", dtype="float32"),
        cache=OffloadingCacheConfig(
            tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=blocks_per_chunk
        ),
        parallel=OffloadingParallelConfig(
            rank=rank,
            world_size=world_size,
            tp_size=world_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=0,
            is_parallelism_agnostic=False,
        ),
        replicated_layout=replicated,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )


def vllm_config(rank: int, world_size: int, instance: str, extra: dict[str, Any]) -> Any:
    """As much of vLLM's configuration as the rank side reads."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvdConnector",
            kv_role="kv_both",
            engine_id=instance,
            kv_connector_extra_config=extra,
        ),
        parallel_config=SimpleNamespace(
            rank=rank,
            world_size=world_size,
            tensor_parallel_size=world_size,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            data_parallel_rank=0,
        ),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: KV_HEADS * world_size, dtype=torch.float32
        ),
        cache_config=SimpleNamespace(kv_cache_layout="LBHNC", cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        attention_config=SimpleNamespace(backend=None),
        instance_id=instance,
    )


class Rank:
    """One rank: its KV tensors as vLLM makes them, and the connector's worker."""

    def __init__(self, rank: int, world_size: int, instance: str, **more: Any) -> None:
        self.caches: KVCacheConfig = more["caches"]
        config = offloading_config(rank, world_size, **more)
        settings = vllm_config(rank, world_size, instance, dict(config.extra_config))
        self.identity = engine_identity(settings)
        self.worker = KvdConnectorWorker(KvdOffloadingSpec(config), settings, self.caches)
        self.kv: dict[str, torch.Tensor] = {}
        self.memory = torch.empty(0)
        self.allocate()

    def allocate(self) -> None:
        """Make KV tensors in place of those before, as vLLM does at its start."""
        context = self.worker.get_mem_pool_context()
        assert context is not None
        with context:
            self.kv = allocate_kv_cache(
                self.caches, torch.device("cpu"), KVCacheLayout.LBHNC, [BLOCK_TOKENS] * 8
            )
        self.worker.register_kv_caches(self.kv)
        first = next(iter(self.kv.values()))
        self.memory = torch.empty(0, dtype=torch.int8).set_(first.untyped_storage())
        self.memory.random_(generator=torch.Generator().manual_seed(self.worker._rank))

    def block(self, group: int, block: int) -> torch.Tensor:
        """A copy of one block's bytes in all layers of its group."""
        names = self.caches.kv_cache_groups[group].layer_names
        if not names:
            return torch.empty(0, dtype=torch.int8)
        return torch.stack([self.kv[name][block].view(torch.int8) for name in names]).clone()

    def put(self, group: int, block: int, content: torch.Tensor) -> None:
        for name, layer in zip(
            self.caches.kv_cache_groups[group].layer_names, content, strict=True
        ):
            self.kv[name][block].view(torch.int8).copy_(layer)


class RankRig:
    """An engine's ranks and a scheduler connection in one process."""

    def __init__(self, socket: str, world_size: int = 1, **more: Any) -> None:
        settings: dict[str, Any] = {
            "socket_path": socket,
            "register_wait_s": PATIENCE_S,
            "flush_timeout_s": PATIENCE_S,
            "caches": cache_config(),
            "instance": "rig",
            **more,
        }
        caches: KVCacheConfig = settings["caches"]
        stages: Sequence[KVCacheConfig] = settings.pop("stages", [caches] * world_size)
        self.world_size = world_size
        self.width: int = settings.get("blocks_per_chunk", 1)
        self.ranks = [
            Rank(rank, world_size, **settings | {"caches": stage})
            for rank, stage in enumerate(stages)
        ]
        self.handshakes = [rank.worker.get_handshake_metadata() for rank in self.ranks]
        replicated = settings.get("replicated", False)
        shards = self.handshakes[:1] if replicated else self.handshakes
        groups = tuple(
            Group(
                tokens_per_block=BLOCK_TOKENS * self.width,
                shard_bytes=tuple(shake.shard_bytes[g] for shake in shards),
                kind=GroupKind.SLIDING_WINDOW if g else GroupKind.FULL_ATTENTION,
                blocks_per_block=self.width,
                sliding_window_tokens=64 * g,
            )
            for g in range(len(caches.kv_cache_groups))
        )
        namespace = NamespaceFields(
            model="rig",
            kv_dtype="float32",
            hash_algorithm="sha256",
            hash_bytes=32,
            groups=groups,
            parallel_shape=f"{world_size} {replicated}",
        )
        self.connection = SchedulerConnection(
            socket, self.ranks[0].identity, namespace, world_size, silent_after_s=PATIENCE_S
        )
        self._last_job = 0
        self.ended: list[Jobs] = [{} for _ in self.ranks]
        self.received: list[list[str]] = [[] for _ in self.ranks]
        self.failed: list[list[str]] = [[] for _ in self.ranks]

    def wait_usable(self) -> None:
        assert self.connection.wait_usable(PATIENCE_S), self.connection.problem

    # -- jobs -------------------------------------------------------------------------------

    def new_job(self) -> int:
        self._last_job += 1
        return self._last_job

    def draft(self, name: str, blocks: Sequence[int], group: int = 0) -> JobDraft:
        """A job on the kvd blocks `name-0`, `name-1`, …, in these engine blocks."""
        run = BlockRun(group, 0, keys(name, len(blocks) // self.width), list(blocks))
        return JobDraft(self.new_job(), request_context(name, "", 0, ()), [run])

    def send(self, loads: Sequence[JobDraft] = (), stores: Sequence[JobDraft] = ()) -> None:
        """Send a step's message with these jobs to the daemon."""
        assert self.connection.send_step(StepDraft(loads=list(loads), stores=list(stores)))

    def metadata(
        self,
        loads: Sequence[JobDraft] = (),
        stores: Sequence[JobDraft] = (),
        flush: Sequence[int] = (),
        **more: Any,
    ) -> KvdConnectorMetadata:
        """A step's orders to the ranks; a load is of the request that its job is named after."""
        load_ids, store_ids = ([job.job_id for job in jobs] for jobs in (loads, stores))
        plan = StepPlan(
            flush=tuple(flush),
            loads=tuple(load_ids),
            stores=tuple(job for job in store_ids if job not in flush),
            computed_stores=tuple(job for job in store_ids if job in flush),
        )
        requests = {vllm_job(job.job_id): job.context.request_id for job in loads}
        orders = KvdConnectorMetadata(
            load_jobs={}, store_jobs={}, plan=plan, load_requests=requests, **more
        )
        orders.owners = {each: vllm_job(each) for each in (*load_ids, *store_ids, *orders.refused)}
        return orders

    # -- the ranks' side of a step ----------------------------------------------------------

    def run(self, step: KvdConnectorMetadata | None = None) -> None:
        """One step on every rank, as vLLM's model runner takes it."""
        step = self.metadata() if step is None else step
        for rank in self.ranks:
            rank.worker.handle_preemptions(step)
            rank.worker.start_kv_transfers(step)
            rank.worker.prepare_store_kv(step)
        self.collect()

    def collect(self) -> None:
        """What vLLM asks of each rank at a step's end."""
        for number, rank in enumerate(self.ranks):
            results = rank.worker.get_transfer_results(set())
            assert results.failed_recving <= results.finished_recving
            assert not results.finished_sending
            self.received[number] += sorted(results.finished_recving)
            self.failed[number] += sorted(results.failed_recving)
            told = rank.worker.build_connector_worker_meta()
            if told is None:
                continue
            assert told.failed_jobs <= told.completed_jobs.keys()
            for job_id, count in told.completed_jobs.items():
                assert count == 1, f"job {job_id} was acknowledged {count} times at once"
                assert job_id + 1 not in self.ended[number], f"job {job_id} was told again"
                self.ended[number][job_id + 1] = job_id not in told.failed_jobs

    def run_until_ended(self, *jobs: JobDraft) -> None:
        """Empty steps until every rank has acknowledged these jobs."""
        deadline = time.monotonic() + PATIENCE_S
        wanted = {job.job_id for job in jobs}
        while any(wanted - ended.keys() for ended in self.ended):
            assert time.monotonic() < deadline, f"{wanted} of {self.ended}"
            self.run()
            time.sleep(0.001)

    def store(self, name: str, blocks: Sequence[int], group: int = 0) -> JobDraft:
        job = self.draft(name, blocks, group)
        self.send(stores=[job])
        self.run(self.metadata(stores=[job]))
        self.run_until_ended(job)
        return job

    def load(self, name: str, blocks: Sequence[int], group: int = 0) -> JobDraft:
        job = self.draft(name, blocks, group)
        self.send(loads=[job])
        self.run(self.metadata(loads=[job]))
        self.run_until_ended(job)
        return job

    def load_when_back(self, name: str, blocks: Sequence[int]) -> None:
        """Load as soon as session and ranks are there again; until then loads fail."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.wait_usable()
            if all(self.was_done(self.load(name, blocks))):
                return
            assert time.monotonic() < deadline, self.connection.problem

    def was_done(self, job: JobDraft) -> list[bool]:
        """Of each rank."""
        return [ended[job.job_id] for ended in self.ended]

    @staticmethod
    def kill_movers(pids: Sequence[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    @staticmethod
    def still_run(pids: Sequence[int]) -> list[int]:
        """Those that are neither gone nor, under a parent that hangs, dead but not yet buried."""
        return [pid for pid in pids if is_alive(pid)]

    def close(self) -> None:
        self.connection.close()
        for rank in self.ranks:
            rank.worker.shutdown()
        self.ranks.clear()


def keys(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}-{place}".encode()).digest() for place in range(count)]


def vllm_job(job_id: int) -> int:
    """The vLLM job that one of kvd's is, here."""
    return job_id - 1


def vllm_jobs(*jobs: JobDraft) -> set[int]:
    return {vllm_job(job.job_id) for job in jobs}


@contextlib.contextmanager
def rigs() -> Iterator[Callable[..., RankRig]]:
    """Starts rigs at a daemon, each an engine of its own; all end with the context.

    A rig is usable when it is here, unless its daemon `comes_late`.
    """
    made: list[RankRig] = []

    def start(
        daemon: DaemonProcess, world_size: int = 1, comes_late: bool = False, **more: Any
    ) -> RankRig:
        instance = f"rig-{os.getpid()}-{len(made)}"
        made.append(RankRig(daemon.socket, world_size, instance=instance, **more))
        if not comes_late:
            made[-1].wait_usable()
        return made[-1]

    try:
        yield start
    finally:
        for rig in made:
            rig.close()
