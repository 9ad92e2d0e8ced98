"""vLLM's real scheduler, connector and worker hooks around a model that computes nothing.

`Stand.step` does what vLLM's engine loop does for one rank: schedule, the worker's connector
hooks (by vLLM's own mixin), sampled tokens, update. With asynchronous scheduling a step's output
is taken after the next one is scheduled. Only what runs on the scheduler thread is timed.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

LAYER = "model.layers.0.self_attn.attn"
HEAD_SIZE = 8
VOCABULARY = 32_000
IDLE_SECONDS = 0.001  # what vLLM's loop sleeps after a step that computed nothing
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEAD_SIZE,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 131_072,
    "vocab_size": VOCABULARY,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class StandOptions:
    """How large the engine is, and how it steps; sizes in tokens, engine blocks and seconds."""

    block_tokens: int = 16
    num_blocks: int = 16_384
    max_requests: int = 256
    step_tokens: int = 8192
    longest: int = 16_384  # request
    asynchronous: bool = True
    model_seconds: float = 0.005
    policy: Literal["fcfs", "priority"] = "fcfs"
    longest_chunk: int = 0  # of a prompt beside other requests; 0: no bound


@dataclass
class Timing:
    """Seconds on the scheduler thread, one number a step."""

    add: list[float] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    on_cpu: float = 0.0  # seconds of the three that the thread really ran
    worker: list[float] = field(default_factory=list)  # the connector's hooks, beside the model

    @property
    def total(self) -> float:
        """All that the scheduler thread did, for vLLM's own scheduling and for the connector."""
        return sum(self.add) + sum(self.schedule) + sum(self.update)


@dataclass
class Taken:
    """What a run of steps did, from vLLM's own books."""

    timing: Timing = field(default_factory=Timing)
    steps: int = 0
    computed_tokens: int = 0
    storing_steps: dict[int, int] = field(default_factory=dict)  # step -> store jobs begun in it
    load_jobs: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)  # not computed, by request


def write_model(folder: Path) -> str:
    """A model's configuration without weights, in `folder`; its path for vLLM."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


class Stand:
    """One engine of one rank and one full-attention group, without a model."""

    def __init__(
        self, model: str, transfer: dict[str, Any], options: StandOptions | None = None
    ) -> None:
        self.options = options or StandOptions()
        self.config = _vllm_config(model, transfer, self.options)
        self.layout = layout = self.make_layout()
        self.config.cache_config.num_gpu_blocks = layout.num_blocks
        init_none_hash(sha256)
        self._block_tokens, self.hash_tokens = resolve_kv_cache_block_sizes(layout, self.config)
        self._hasher = get_request_block_hasher(self.hash_tokens, sha256)
        with set_current_vllm_config(self.config):
            self._join_ranks(model)
            self.caches = self._start_worker(layout)
            self.scheduler = self._make_scheduler(layout)
        self.worker = get_kv_transfer_group()
        self._introduce()
        self._outputs: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.taken = Taken()
        self.profiler: cProfile.Profile | None = None  # sees what is timed, nothing else

    def make_layout(self) -> KVCacheConfig:
        """The engine's cache groups in its memory; may adjust the configuration to them."""
        return _kv_cache_config(self.options)

    @property
    def connector(self) -> Any:
        """The scheduler's connector."""
        return self.scheduler.connector

    def _join_ranks(self, model: str) -> None:
        """As each worker does at start, here the only one."""
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{model}/rendezvous",
            backend="gloo",
        )
        initialize_model_parallel()

    def _start_worker(self, layout: KVCacheConfig) -> dict[str, torch.Tensor]:
        """The worker's connector first, then its memory, as in a GPU worker."""
        ensure_kv_transfer_initialized(self.config, layout)
        worker = get_kv_transfer_group()
        with worker.get_mem_pool_context() or contextlib.nullcontext():
            caches: dict[str, torch.Tensor] = allocate_kv_cache(
                layout,
                torch.device("cpu"),
                self.config.cache_config.get_resolved_kv_cache_layout(),
                [group.kv_cache_spec.block_size for group in layout.kv_cache_groups],
            )
        worker.register_kv_caches(caches)
        return caches

    def _make_scheduler(self, layout: KVCacheConfig) -> Scheduler:
        kind = AsyncScheduler if self.options.asynchronous else Scheduler
        return kind(
            vllm_config=self.config,
            kv_cache_config=layout,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self._block_tokens,
            hash_block_size=self.hash_tokens,
        )

    def _introduce(self) -> None:
        """Hand the worker's greeting to the scheduler side, as vLLM's core does at start."""
        greeting = self.worker.get_handshake_metadata()
        if greeting is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): greeting})

    @contextlib.contextmanager
    def _timed(self, kind: list[float]) -> Iterator[None]:
        """Time one call on the scheduler thread."""
        if self.profiler is not None:
            self.profiler.enable()
        ran, began = time.thread_time(), time.perf_counter()
        yield
        kind.append(time.perf_counter() - began)
        self.taken.timing.on_cpu += time.thread_time() - ran
        if self.profiler is not None:
            self.profiler.disable()

    # -- requests ---------------------------------------------------------------------------

    def request(self, name: str, tokens: Sequence[int], max_tokens: int, **sampled: Any) -> Request:
        """A request with its block hashes, which vLLM computes on another thread."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampled)
        sampling.update_from_generation_config({}, 0)
        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def add(self, request: Request) -> None:
        timing = self.taken.timing
        with self._timed(timing.add):
            self.scheduler.add_request(request)

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache, as if other requests had taken the blocks."""
        assert self.scheduler.reset_prefix_cache(), "requests still hold blocks"

    @property
    def is_busy(self) -> bool:
        """Whether vLLM's loop would go on: requests, or transfers that have not been reported."""
        return bool(self._outputs) or self.scheduler.has_requests()

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn of the engine's loop: schedule ahead, or take the oldest step's output."""
        if self.scheduler.has_requests():
            scheduled = self._schedule()
            executed = scheduled.total_num_scheduled_tokens > 0
            ahead = len(self._outputs) < (2 if self.options.asynchronous else 1)
            if ahead and (executed or self.scheduler.has_requests()):
                return
        self._finish_oldest()

    def _schedule(self) -> SchedulerOutput:
        taken, timing = self.taken, self.taken.timing
        with self._timed(timing.schedule):
            scheduled = self.scheduler.schedule()
        stores, loads = _jobs_of(scheduled.kv_connector_metadata)
        if stores:
            taken.storing_steps[taken.steps] = stores
        taken.load_jobs += loads
        taken.steps += 1
        taken.computed_tokens += scheduled.total_num_scheduled_tokens
        for request in scheduled.scheduled_new_reqs:
            taken.cached_tokens[request.req_id] = request.num_computed_tokens
        began = time.perf_counter()
        output = self._work(scheduled)
        timing.worker.append(time.perf_counter() - began)
        self._outputs.append((scheduled, output))
        return scheduled

    def _finish_oldest(self) -> None:
        scheduled, output = self._outputs.popleft()
        executed = scheduled.total_num_scheduled_tokens > 0
        time.sleep(self.options.model_seconds if executed else IDLE_SECONDS)
        timing = self.taken.timing
        with self._timed(timing.update):
            self.scheduler.update_from_output(scheduled, output)

    def _work(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """What the worker does in a step, without a model."""
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        hooks = KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
        names = list(scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[
                [] if request.is_prefill_chunk else [_sampled(request)] for request in requests
            ],
            kv_connector_output=hooks.kv_connector_output,
        )

    def drain(self, limit_seconds: float = 30.0) -> None:
        """Step until vLLM's loop would rest: every request ended, every transfer reported."""
        deadline = time.monotonic() + limit_seconds
        while self.is_busy:
            self.step()
            assert time.monotonic() < deadline, "the engine does not come to rest"

    def take(self) -> Taken:
        """What was done since the last call."""
        taken, self.taken = self.taken, Taken()
        return taken

    def close(self) -> None:
        self.scheduler.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def _jobs_of(orders: Any) -> tuple[int, int]:
    """Stores and loads that begin with a step: vLLM's own lists, or kvd's plan. Of several
    connectors' the first one's.
    """
    orders = getattr(orders, "metadata", (orders,))[0]
    plan = getattr(orders, "plan", None)
    if plan is None:
        return len(orders.store_jobs), len(orders.load_jobs)
    return len(plan.stores) + len(plan.computed_stores), len(plan.loads)


def _sampled(request: Request) -> int:
    """A token that depends on the request and on how far it is, the same on every run."""
    prompt = request.prompt_token_ids or [0]
    token: int = (sum(prompt[:16]) + 7919 * request.num_output_tokens) % VOCABULARY
    return token


def _vllm_config(model: str, transfer: dict[str, Any], options: StandOptions) -> VllmConfig:
    longest = options.longest
    model_config = ModelConfig(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=longest,
    )
    scheduling = SchedulerConfig(
        max_num_seqs=options.max_requests,
        max_num_batched_tokens=options.step_tokens,
        max_model_len=longest,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        policy=options.policy,
        long_prefill_token_threshold=options.longest_chunk,
    )
    cache = CacheConfig(block_size=options.block_tokens, enable_prefix_caching=True)
    # vLLM resolves the layout with the attention backend, before it makes connectors.
    cache.kv_cache_layout = "LBHNC"
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduling,
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = options.asynchronous
    return config


def _kv_cache_config(options: StandOptions) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=options.block_tokens,
        num_kv_heads=1,
        head_size=HEAD_SIZE,
        dtype=torch.float32,
    )
    size = spec.page_size_bytes * options.num_blocks
    tensor = KVCacheTensor(
        size=size, layers=[LAYER], layer_stride=size, block_stride=spec.page_size_bytes
    )
    return KVCacheConfig(
        num_blocks=options.num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)],
    )
