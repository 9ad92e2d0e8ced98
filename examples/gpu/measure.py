"""What the demo measures, and what it holds the loaded bytes to."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from examples.gpu.engine import Answer, Engine
from examples.gpu.paged_kv import PagedKv
from examples.gpu.shape import Shape

COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
COPIES = 7


@dataclass(frozen=True)
class Plan:
    """What to run."""

    shape: Shape
    device: torch.device
    prompts: tuple[int, ...]  # tokens, each a multiple of the block's
    repeats: int
    seed: int
    is_scattered: bool  # blocks in random order, as in an engine that has run for a while

    @property
    def num_blocks(self) -> int:
        """Twice the longest prompt's: what is loaded is compared with what was computed."""
        return 2 * max(self.prompts) // self.shape.block_tokens

    @property
    def stored_bytes(self) -> int:
        """Of all prompts, in the daemon's pool."""
        return sum(self.prompts) // self.shape.block_tokens * self.shape.block_bytes


@dataclass(frozen=True)
class PromptResult:
    """One prompt length. Times are medians, in seconds."""

    prompt_tokens: int
    recompute_s: float
    recompute_all_s: list[float]
    load_s: float
    load_all_s: list[float]
    found_s: float  # of the load's time, until it was found
    loaded_s: float  # and until the load was seen to be done
    loaded_tokens: int
    loaded_bytes: int
    copy_s: float  # of the load's copies, by the mover's clock
    ideal_copy_s: float  # the same bytes in one pinned copy
    last_block_s: float  # computing the last block, its prefix on the device
    cuda_graphs: bool  # of the recomputed pass, and of the last block's
    failures: list[str]

    @property
    def ideal_s(self) -> float:
        """Of a load and its first token: one pinned copy, and the last block."""
        return self.ideal_copy_s + self.last_block_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of one large copy from host memory to the KV's: pinned, on a GPU."""
    size, is_cuda = COPY_BYTES[device.type], device.type == "cuda"
    host = torch.ones(size, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(COPIES + 1):
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    del there
    if is_cuda:
        torch.cuda.empty_cache()
    return size / statistics.median(seconds[1:])


class Measurement:
    """Runs a plan's prompts through an engine."""

    def __init__(self, plan: Plan, engine: Engine, kv: PagedKv) -> None:
        self._plan, self._engine, self._kv = plan, engine, kv
        self._random = random.Random(plan.seed)
        self._generator = torch.Generator().manual_seed(plan.seed)

    def warm_up(self) -> None:
        """Have every kernel compiled and every buffer made."""
        tokens = self._prompt(min(self._plan.prompts))
        computed, _ = self._tables(len(tokens))
        self._engine.recompute(tokens, computed)
        self._seconds_of_last_block(tokens, computed)

    def run(self, length: int, bandwidth: float) -> PromptResult:
        """Compute, store, load, compare."""
        plan, engine = self._plan, self._engine
        tokens = self._prompt(length)
        computed, loaded = self._tables(length)
        has_graphs = engine.prepare(length)
        engine.recompute(tokens, computed)
        recomputed = [engine.recompute(tokens, computed) for _ in range(plan.repeats)]
        cold = engine.store(f"store-{length}", tokens, computed)
        prefix = length // plan.shape.block_tokens - 1
        failures, answers = [cold.unstored] if cold.unstored else [], []
        for turn in range(plan.repeats):
            self._kv.wipe(loaded)
            answers.append(engine.load(f"load-{length}-{turn}", tokens, loaded))
            wrong = self._differences(answers[-1], cold, computed, loaded)
            failures += [f"{each} in turn {turn}" for each in wrong]
        return PromptResult(
            prompt_tokens=length,
            recompute_s=statistics.median(answer.first_token_s for answer in recomputed),
            recompute_all_s=[answer.first_token_s for answer in recomputed],
            load_s=statistics.median(answer.first_token_s for answer in answers),
            load_all_s=[answer.first_token_s for answer in answers],
            found_s=statistics.median(answer.found_s for answer in answers),
            loaded_s=statistics.median(answer.loaded_s for answer in answers),
            loaded_tokens=answers[-1].loaded_tokens,
            loaded_bytes=answers[-1].loaded_bytes,
            copy_s=statistics.median(answer.copy_s for answer in answers),
            ideal_copy_s=prefix * plan.shape.block_bytes / bandwidth,
            last_block_s=self._seconds_of_last_block(tokens, computed),
            cuda_graphs=has_graphs,
            failures=failures,
        )

    def _differences(
        self, answer: Answer, cold: Answer, computed: Sequence[int], loaded: Sequence[int]
    ) -> list[str]:
        """What is wrong with a load, against the prompt as it was computed and stored.

        Where too little was loaded only that is compared: the rest was computed in other steps,
        which may round otherwise.
        """
        size = self._plan.shape.block_tokens
        wanted, count = (len(computed) - 1) * size, answer.loaded_tokens // size
        if answer.loaded_tokens != wanted:
            short = [f"only {answer.loaded_tokens} of {wanted} tokens loaded"]
            is_right = self._kv.equal(computed[:count], loaded[:count])
            return short if is_right else [*short, "other KV bytes"]
        wrong = []
        if answer.token != cold.token:
            wrong.append("another first token")
        if not self._kv.equal(computed, loaded):
            wrong.append("other KV bytes")
        return wrong

    def _prompt(self, length: int) -> torch.Tensor:
        tokens = torch.randint(self._plan.shape.vocabulary, (length,), generator=self._generator)
        return tokens.to(self._plan.device)

    def _tables(self, length: int) -> tuple[list[int], list[int]]:
        """Blocks to compute a prompt in, and others to load it into."""
        count = length // self._plan.shape.block_tokens
        blocks = list(range(2 * count))
        if self._plan.is_scattered:
            blocks = self._random.sample(range(self._plan.num_blocks), 2 * count)
        return blocks[:count], blocks[count:]

    def _seconds_of_last_block(self, tokens: torch.Tensor, blocks: Sequence[int]) -> float:
        first = len(tokens) - self._plan.shape.block_tokens

        def compute() -> None:
            self._engine.compute(tokens, first, blocks)

        return statistics.median(seconds_of(compute) for _ in range(1 + self._plan.repeats))


def seconds_of(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
