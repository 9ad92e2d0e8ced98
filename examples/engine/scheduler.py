"""Continuous batching: which tokens of which requests the next forward computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from examples.engine.blocks import BlockPool, HashChain
from examples.engine.config import EngineConfig
from examples.engine.offload import Offload, OffloadOutcome, Progress
from examples.engine.requests import Request, RequestOrder, RequestState


@dataclass(frozen=True)
class Work:
    """Tokens [first, first + count) of one request, its blocks, and whether a token follows."""

    request: Request
    first: int
    count: int

    @property
    def ends_sequence(self) -> bool:
        return self.first + self.count == len(self.request.tokens)


@dataclass
class Batch:
    """One step: the work, and the requests whose blocks were taken away for it."""

    work: list[Work] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    tokens_left: int = 0


class BatchScheduler:
    """Requests in arrival order; running ones first, the youngest gives way when blocks end."""

    def __init__(self, config: EngineConfig, chain: HashChain, offload: Offload) -> None:
        self._config = config
        self._chain = chain
        self._offload = offload
        self.pool = BlockPool(config.num_blocks)
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    def add(self, order: RequestOrder) -> Request:
        """Queue a request. ValueError when it could never fit."""
        most = len(order.prompt) + order.max_tokens
        if self._blocks_for(most) > self._config.num_blocks:
            raise ValueError(
                f"{most} tokens need {self._blocks_for(most)} blocks of {self._config.num_blocks}"
            )
        if not order.prompt or order.max_tokens < 1:
            raise ValueError("a request needs a prompt and at least one token to make")
        request = Request(order, list(order.prompt), [])
        self._chain.extend(request.hashes, request.tokens)
        self._offload.arrived(request)
        self.waiting.append(request)
        return request

    def next_batch(self) -> Batch:
        """Choose the next step's work; takes blocks, and takes them away where they run out."""
        batch = Batch(tokens_left=self._config.step_tokens)
        for request in list(self.running):
            if request.state is RequestState.RUNNING and batch.tokens_left > 0:
                self._continue(request, batch)
        # A request that has just lost its blocks would only take them back from another.
        if not batch.preempted:
            self._admit(batch)
        return batch

    def _continue(self, request: Request, batch: Batch) -> None:
        count = min(len(request.tokens) - request.computed, batch.tokens_left)
        while not self._grow(request, request.computed + count):
            youngest = self.running[-1]
            self._preempt(youngest, batch)
            if youngest is request:
                return
        self._schedule(request, count, batch)

    def _schedule(self, request: Request, count: int, batch: Batch) -> None:
        batch.work.append(Work(request, request.computed, count))
        batch.tokens_left -= count

    def _grow(self, request: Request, tokens: int) -> bool:
        """Have blocks for the first `tokens` tokens; False changes nothing."""
        missing = self._blocks_for(tokens) - len(request.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.acquire((), missing)
        if fresh is None:
            return False
        request.blocks += fresh
        return True

    def _preempt(self, victim: Request, batch: Batch) -> None:
        """Take a running request's blocks; it starts again later from what is cached."""
        self.running.remove(victim)
        batch.work = [work for work in batch.work if work.request is not victim]
        batch.preempted.append(victim)
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        victim.preemptions += 1
        victim.state = RequestState.WAITING
        self.waiting.appendleft(victim)

    def _admit(self, batch: Batch) -> None:
        """Start waiting requests in order, until tokens, places or blocks run out.

        A request whose lookup has no answer yet lets those behind it pass.
        """
        undecided = []
        while self.waiting and batch.tokens_left > 0:
            if len(self.running) + len(self.loading) >= self._config.max_running:
                break
            request = self.waiting.popleft()
            cached = self._cached_prefix(request)
            external = self._offload.matched(request, self._tokens_in(cached))
            if external is None:
                undecided.append(request)
            elif not self._start(request, cached, external, batch):
                self.waiting.appendleft(request)
                break
        self.waiting.extendleft(reversed(undecided))

    def _cached_prefix(self, request: Request) -> list[int]:
        if not request.order.use_cache:
            return []
        # At least one token must be computed: its logits are the answer.
        usable = (len(request.tokens) - 1) // self._config.block_tokens
        return self.pool.match(request.hashes[:usable])

    def _start(self, request: Request, cached: list[int], external: int, batch: Batch) -> bool:
        """Give the request its blocks and load or compute; False when they are too few."""
        local = self._tokens_in(cached)
        ready = local + external
        count = min(len(request.tokens) - ready, batch.tokens_left)
        wanted = ready if external else ready + count
        blocks = self.pool.acquire(cached, self._blocks_for(wanted) - len(cached))
        if blocks is None:
            return False
        request.blocks = blocks
        request.computed = local
        request.tokens_reused += local
        self._offload.allocated(request, external)
        if external:
            request.state = RequestState.LOADING
            request.loading_tokens = external
            self.loading[request.request_id] = request
        else:
            request.state = RequestState.RUNNING
            self.running.append(request)
            self._schedule(request, count, batch)
        return True

    def progress(self, batch: Batch) -> Iterator[Progress]:
        """What the offload must know of the batch: blocks and tokens computed after it."""
        for work in batch.work:
            yield Progress(work.request, work.first + work.count)

    def computed(self, batch: Batch, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Take the forward's results; returns (request, new token) pairs.

        `sampled` holds one token per unit of work; it counts where the work ended a sequence.
        """
        made = []
        for work, token in zip(batch.work, sampled, strict=True):
            request = work.request
            ended = work.ends_sequence
            self._advance(request, work.count)
            request.tokens_computed += work.count
            if ended:
                request.tokens.append(token)
                self._chain.extend(request.hashes, request.tokens)
                made.append((request, token))
        return made

    def _advance(self, request: Request, count: int) -> None:
        before = request.computed // self._config.block_tokens
        request.computed += count
        for index in range(before, request.computed // self._config.block_tokens):
            self.pool.publish(request.blocks[index], request.hashes[index])

    def loads_ended(self, outcome: OffloadOutcome) -> None:
        """Let requests go on whose load ended; a failed one computes those tokens itself."""
        for request_id in outcome.finished_loads:
            request = self._loaded(request_id)
            first = request.computed // self._config.block_tokens
            self._advance(request, request.loading_tokens)
            request.tokens_loaded += request.loading_tokens
            request.loaded_blocks.update(
                range(first, request.computed // self._config.block_tokens)
            )
        for request_id in outcome.failed_loads:
            self._loaded(request_id).failed_loads += 1

    def _loaded(self, request_id: str) -> Request:
        request = self.loading.pop(request_id)
        request.state = RequestState.RUNNING
        self.running.append(request)
        return request

    def finish(self, request: Request) -> None:
        """End a running request and give its blocks back."""
        self.running.remove(request)
        request.state = RequestState.FINISHED
        self._offload.finished(request)
        self.pool.release(request.blocks)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_tokens)

    def _tokens_in(self, blocks: Sequence[int]) -> int:
        return len(blocks) * self._config.block_tokens
