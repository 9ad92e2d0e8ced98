"""The engine's side of kvd: one request at a time, stored when computed, loaded when known."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from examples.gpu.graphs import Passes
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
PATIENT_S = 5.0  # with a daemon that does not answer, or says 'ask again'
STEP_TOKENS = {"llama-8b": 4096, "tiny": 128}  # that one step computes at most: chunked prefill
POLL_S = 0.0001
STEP_S = 0.005  # how often an engine that only waits takes a step


@dataclass(frozen=True)
class Answer:
    """One request: its first token, when it came, and what was loaded for it.

    Times are from its arrival, in seconds, but for `copy_s`.
    """

    token: int
    first_token_s: float
    found_s: float = 0.0  # the index page showed it, or the lookup was answered
    loaded_s: float = 0.0  # the load was seen to be done
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    copy_s: float = 0.0  # as the mover measured it
    unstored: str = ""  # how many blocks of it were not stored, and why; empty: all were


class Engine:
    """A rank and its scheduler in one process."""

    def __init__(self, model: Model, kv: PagedKv, device: torch.device, socket: str) -> None:
        self._shape, self._device = model.shape, device
        self._passes = Passes(model, kv, device)
        shape = model.shape
        identity = EngineIdentity("demo-gpu", os.urandom(16))
        self._worker = Worker(socket, identity)
        self._worker.register(kv.memories, [kv.group])
        # A demo waits for what is there, however busy the machine is.
        self._connection = SchedulerConnection(
            socket, identity, namespace_of(shape), silent_after_s=PATIENT_S
        )
        # What the index page shows whole is loaded by its word, as vLLM's connector does it.
        patient = SchedulerOptions(
            lookup_give_up_s=PATIENT_S, retry_deadline_s=PATIENT_S, trusts_page=True
        )
        self._scheduler = Scheduler(self._connection, patient)
        self._copied: dict[str, float] = {"bytes": 0, "seconds": 0}
        self._loads: set[int] = set()
        self._storing: set[int] = set()
        self._stored: set[bytes] = set()
        self._failed_stores = 0

    def wait_connected(self) -> None:
        """RuntimeError with the daemon's own words if it does not take this engine."""
        deadline = time.monotonic() + CONNECT_S
        while not self._connection.wait_usable(0.5):
            problem = self._worker.problem or self._connection.problem
            if problem.startswith(REFUSALS) or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon does not serve this engine: {problem}")

    def prepare(self, length: int) -> bool:
        """Make ready for prompts of this length only; whether CUDA graphs are used for them."""
        self._passes.prepare(length)
        return self._passes.are_captured

    def compute(self, tokens: torch.Tensor, first: int, blocks: Sequence[int]) -> int:
        """The next token, with the tokens from `first` on computed. No step, nothing stored."""
        return int(self._passes.run(tokens, first, blocks))

    def recompute(self, tokens: torch.Tensor, blocks: Sequence[int]) -> Answer:
        """The first token without kvd, computed in one go."""
        started = time.perf_counter()
        token = self.compute(tokens, 0, blocks)
        return Answer(token, time.perf_counter() - started)

    def store(self, name: str, tokens: torch.Tensor, blocks: Sequence[int]) -> Answer:
        """Compute a prompt in steps, its last block on its own, and return once it is stored.

        What an earlier step but the last one computed is stored before the next step begins: so
        copies that are slower than the model hold it up, and at most two steps' are in flight.
        """
        hashes = block_hashes(tokens, self._shape.block_tokens)
        self._scheduler.on_new_request(name, len(tokens), [hashes], RequestParams(skip_lookup=True))
        self._scheduler.update_state_after_alloc(name, [blocks], 0)
        self._stored.clear()
        self._failed_stores = 0
        self._scheduler.take_stats()
        token, earlier = 0, set[int]()
        started = time.perf_counter()
        for first, end in steps_of(len(tokens), self._shape):
            self._wait_stored(name, earlier)
            earlier = set(self._storing)
            token = self._run(name, tokens[:end], first, blocks)
        seconds = time.perf_counter() - started
        self._finish(name, blocks, len(tokens))
        return Answer(token, seconds, unstored=self._unstored(hashes))

    def load(self, name: str, tokens: torch.Tensor, blocks: Sequence[int]) -> Answer:
        """The first token with all of the prompt but its last block from the daemon.

        What was not found of it is computed, in one go with the last block.
        """
        hashes = block_hashes(tokens, self._shape.block_tokens)
        self._copied.update(bytes=0, seconds=0)
        started = time.perf_counter()
        self._scheduler.on_new_request(name, len(tokens), [hashes])
        while (found := self._scheduler.get_num_new_matched_tokens(name, 0)) is None:
            self._step()
            time.sleep(POLL_S)  # lest the threads that hear the daemon wait for this one
        found_s = time.perf_counter() - started
        self._scheduler.update_state_after_alloc(name, [blocks], found)
        if found and not self._wait_loaded(name):
            raise RuntimeError(f"the load of {name} failed; the daemon's log says why")
        loaded_s = time.perf_counter() - started
        token = self._run(name, tokens, found, blocks)
        seconds = time.perf_counter() - started
        self._finish(name, blocks, len(tokens))
        return Answer(
            token,
            seconds,
            found_s=found_s,
            loaded_s=loaded_s,
            loaded_tokens=found,
            loaded_bytes=int(self._copied["bytes"]),
            copy_s=self._copied["seconds"],
        )

    def close(self) -> None:
        """Returns once no copy can touch the KV any more."""
        self._worker.close()
        self._connection.close()
        self._passes.forget()

    # -- steps ------------------------------------------------------------------------------

    def _run(self, name: str, tokens: torch.Tensor, first: int, blocks: Sequence[int]) -> int:
        """A step that computes the tokens from `first` on; the next token, once it is here."""
        plan = self._step([ScheduledRequest(name, [blocks], len(tokens))])
        token = self._passes.run(tokens, first, blocks)
        self._worker.finish_step(plan, self._launched())
        return int(token)

    def _step(self, scheduled: Sequence[ScheduledRequest] = ()) -> StepPlan:
        plan = self._scheduler.build_step(scheduled)
        self._loads.update(plan.loads)
        self._storing.update(plan.stores, plan.computed_stores)
        self._failed_stores += len(self._storing.intersection(plan.forget))
        self._storing.difference_update(plan.forget)
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
            self._idle()
        self._collect()

    def _wait_stored(self, name: str, jobs: set[int]) -> None:
        """Steps until these stores have ended, well or not."""
        deadline = time.perf_counter() + PATIENCE_S
        while jobs & self._storing:
            if time.perf_counter() > deadline:
                raise RuntimeError(f"the stores of {name} do not end; the daemon's log says why")
            self._idle()

    def _idle(self) -> None:
        self._finish_computed(self._step())
        self._collect()
        time.sleep(STEP_S)

    def _unstored(self, hashes: Sequence[bytes]) -> str:
        """How many of a request's blocks were not stored, and what is known of why."""
        missing = len(hashes) - len(self._stored.intersection(hashes))
        if not missing:
            return ""
        without_room = self._scheduler.take_stats().blocks_without_room
        reasons = [
            f"{self._failed_stores} stores were refused or failed" if self._failed_stores else "",
            "the pool had no room at times" if without_room else "",
            self._connection.problem,
        ]
        why = "; ".join(filter(None, reasons)) or "the daemon's log may say why"
        return f"{missing} of {len(hashes)} blocks were not stored: {why}"

    def _finish_computed(self, plan: StepPlan) -> None:
        if plan.stores:
            self._worker.finish_step(plan, self._launched())

    def _collect(self) -> tuple[Sequence[str], Sequence[str]]:
        """Requests whose loads are there, and those whose loads failed."""
        report = self._worker.get_finished()
        for job in report.ended:
            if job.job_id in self._storing:
                self._failed_stores += not job.done
            self._storing.discard(job.job_id)
            if job.job_id in self._loads:
                self._copied["bytes"] += job.bytes_copied
                self._copied["seconds"] += job.duration_ns / 1e9
        outcome = self._scheduler.update_from_workers([report])
        for stored in outcome.stored:
            self._stored.update(stored.block_hashes)
        return outcome.finished_loads, outcome.failed_loads


def steps_of(length: int, shape: Shape) -> Iterator[tuple[int, int]]:
    """First token and end of each step that computes a prompt; the last one has its last block."""
    prefix = length - shape.block_tokens
    return pairwise([*range(0, prefix, STEP_TOKENS[shape.name]), prefix, length])


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
