"""The engine's side of kvd: one request at a time, stored when computed, loaded when known."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from examples.gpu.model import Model
from examples.gpu.paged_kv import PagedKv
from examples.gpu.shape import Shape
from kvd_client import (
    EngineIdentity,
    Group,
    NamespaceFields,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerConnection,
    SchedulerOptions,
    StepPlan,
    Worker,
)

CONNECT_S = 120.0  # a mover's first start on a GPU imports its libraries and tries copies out
REFUSALS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
PATIENCE_S = 120.0
POLL_S = 0.0001
STEP_S = 0.005  # how often an engine that only waits takes a step


@dataclass(frozen=True)
class Answer:
    """One request: its first token, when it came, and what was loaded for it."""

    token: int
    first_token_s: float
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    copy_s: float = 0.0  # as the mover measured it


class Engine:
    """A rank and its scheduler in one process."""

    def __init__(self, model: Model, kv: PagedKv, device: torch.device, socket: str) -> None:
        self._model, self._kv, self._device = model, kv, device
        shape = model.shape
        identity = EngineIdentity("demo-gpu", os.urandom(16))
        self._worker = Worker(socket, identity)
        self._worker.register(kv.memories, [kv.group])
        self._connection = SchedulerConnection(socket, identity, namespace_of(shape))
        # A demo waits for what is there, however busy the machine is.
        patient = SchedulerOptions(lookup_give_up_s=5.0, retry_deadline_s=5.0)
        self._scheduler = Scheduler(self._connection, patient)
        self._copied: dict[str, float] = {"bytes": 0, "seconds": 0}
        self._loads: set[int] = set()

    def wait_connected(self) -> None:
        """RuntimeError with the daemon's own words if it does not take this engine."""
        deadline = time.monotonic() + CONNECT_S
        while not self._connection.wait_usable(0.5):
            problem = self._worker.problem or self._connection.problem
            if problem.startswith(REFUSALS) or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon does not serve this engine: {problem}")

    def recompute(self, tokens: torch.Tensor, blocks: Sequence[int]) -> Answer:
        """The first token without kvd, computed in one go."""
        started = time.perf_counter()
        token = int(self._compute(tokens, 0, blocks))
        return Answer(token, time.perf_counter() - started)

    def store(self, name: str, tokens: torch.Tensor, blocks: Sequence[int]) -> Answer:
        """Compute a prompt, its last block on its own, and return once all of it is stored."""
        size = self._model.shape.block_tokens
        hashes = block_hashes(tokens, size)
        self._scheduler.on_new_request(name, len(tokens), [hashes], RequestParams(skip_lookup=True))
        self._scheduler.update_state_after_alloc(name, [blocks], 0)
        started = time.perf_counter()
        prefix = len(tokens) - size
        self._run(name, tokens[:prefix], 0, blocks)
        token = self._run(name, tokens, prefix, blocks)
        answer = Answer(token, time.perf_counter() - started)
        self._finish(name, blocks, len(tokens))
        return answer

    def load(self, name: str, tokens: torch.Tensor, blocks: Sequence[int]) -> Answer:
        """The first token with all of the prompt but its last block from the daemon."""
        hashes = block_hashes(tokens, self._model.shape.block_tokens)
        self._copied.update(bytes=0, seconds=0)
        started = time.perf_counter()
        self._scheduler.on_new_request(name, len(tokens), [hashes])
        while (found := self._scheduler.get_num_new_matched_tokens(name, 0)) is None:
            self._step()
        self._scheduler.update_state_after_alloc(name, [blocks], found)
        if found and not self._wait_loaded(name):
            raise RuntimeError(f"the load of {name} failed; the daemon's log says why")
        token = self._run(name, tokens, found, blocks)
        seconds = time.perf_counter() - started
        self._finish(name, blocks, len(tokens))
        copied = self._copied
        return Answer(token, seconds, found, int(copied["bytes"]), copied["seconds"])

    def close(self) -> None:
        """Returns once no copy can touch the KV any more."""
        self._worker.close()
        self._connection.close()

    # -- steps ------------------------------------------------------------------------------

    def _compute(self, tokens: torch.Tensor, first: int, blocks: Sequence[int]) -> torch.Tensor:
        table = torch.tensor(blocks, device=self._device)
        return self._model.forward(tokens[first:], first, table, self._kv.layers)

    def _run(self, name: str, tokens: torch.Tensor, first: int, blocks: Sequence[int]) -> int:
        """A step that computes the tokens from `first` on; the next token, once it is here."""
        plan = self._step([ScheduledRequest(name, [blocks], len(tokens))])
        token = self._compute(tokens, first, blocks)
        self._worker.finish_step(plan, self._launched())
        return int(token)

    def _step(self, scheduled: Sequence[ScheduledRequest] = ()) -> StepPlan:
        plan = self._scheduler.build_step(scheduled)
        self._loads.update(plan.loads)
        if not plan.is_empty:
            self._worker.start_step(plan, self._launched())
        return plan

    def _launched(self) -> Callable[[], None] | None:
        """What waits for all that was launched so far; on a CPU that has run."""
        if self._device.type == "cpu":
            return None
        from kvd_client.worker.cuda_stream import stream_end

        return stream_end(torch.cuda.current_stream(self._device))

    def _wait_loaded(self, name: str) -> bool:
        """Steps until the request's load has ended; whether it is there."""
        deadline = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < deadline:
            self._finish_computed(self._step())
            until = time.perf_counter() + STEP_S
            while time.perf_counter() < until:
                finished, failed = self._collect()
                if name in finished:
                    return True
                if name in failed:
                    return False
                time.sleep(POLL_S)
        return False

    def _finish(self, name: str, blocks: Sequence[int], computed: int) -> None:
        """End the request; returns once its blocks are stored."""
        self._scheduler.request_finished(name, [blocks], computed)
        deadline = time.perf_counter() + PATIENCE_S
        while self._scheduler.has_pending_work():
            if time.perf_counter() > deadline:
                raise RuntimeError(f"the stores of {name} do not end; the daemon's log says why")
            self._finish_computed(self._step())
            self._collect()
            time.sleep(STEP_S)

    def _finish_computed(self, plan: StepPlan) -> None:
        if plan.stores:
            self._worker.finish_step(plan, self._launched())

    def _collect(self) -> tuple[Sequence[str], Sequence[str]]:
        """Requests whose loads are there, and those whose loads failed."""
        report = self._worker.get_finished()
        for job in report.ended:
            if job.job_id in self._loads:
                self._copied["bytes"] += job.bytes_copied
                self._copied["seconds"] += job.duration_ns / 1e9
        outcome = self._scheduler.update_from_workers([report])
        return outcome.finished_loads, outcome.failed_loads


def block_hashes(tokens: torch.Tensor, block_tokens: int) -> list[bytes]:
    """A chained hash of each whole block, as engines have them."""
    hashes, last = [], b"demo-gpu"
    values = tokens.cpu().numpy().tobytes()
    size = block_tokens * tokens.element_size()
    for start in range(0, len(values) - size + 1, size):
        last = hashlib.sha256(last + values[start : start + size]).digest()
        hashes.append(last)
    return hashes


def namespace_of(shape: Shape) -> NamespaceFields:
    """All that must agree before two engines may share this KV."""
    return NamespaceFields(
        model=shape.name,
        model_config_digest=shape.digest(),
        weights_id="random",
        kv_dtype=shape.dtype_name,
        attention_backend="torch-sdpa",
        kv_layout="layer-side-block-token-head",
        hash_algorithm="sha256-chain",
        hash_bytes=32,
        groups=(Group(tokens_per_block=shape.block_tokens, shard_bytes=(shape.block_bytes,)),),
    )
