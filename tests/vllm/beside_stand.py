"""Engines with another connector beside kvd's. Run in a process of their own.

One's other connector loads into blocks that kvd still stores from. Another one's fails to load
within a step.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.vllm.engine import prompt
from tests.vllm.other_loads import FETCHED_TOKENS, PREFIX, FailingLoads, OtherLoads
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

BLOCKS = 8  # of the device, but for the null block: a request has them all
HELD_SECONDS = 0.5
COMPUTED, FORGOTTEN = 7, 1  # what bytes are: of what was computed, of what nobody has
OPTIONS = StandOptions(
    num_blocks=BLOCKS + 1, max_requests=4, step_tokens=256, longest=256, model_seconds=0.0
)
OTHER = {
    "kv_connector": "OtherLoads",
    "kv_connector_module_path": "tests.vllm.other_loads",
    "kv_role": "kv_both",
}


class MultiStand(Stand):
    """kvd's connector and another one under vLLM's MultiConnector."""

    def __init__(
        self, model: str, transfer: dict[str, Any], other: dict[str, Any], options: StandOptions
    ) -> None:
        both = {
            "kv_connector": "MultiConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [{**transfer, "kv_role": "kv_both"}, other]
            },
        }
        super().__init__(model, both, options)

    @property
    def connector(self) -> Any:
        """The one of kvd."""
        return self.scheduler.connector.sub_connectors[0]

    def _work(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        orders = scheduled.kv_connector_metadata.metadata[0]
        assert orders.begins_with_loads == scheduled.has_sync_kv_loads
        return super()._work(scheduled)


class BesideStand(MultiStand):
    """The other one spoils what it loads."""

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        super().__init__(model, transfer, OTHER, OPTIONS)
        (cache,) = self.caches.values()
        storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        self.memory = storage[: storage.numel() // (BLOCKS + 1) * (BLOCKS + 1)]
        self.memory = self.memory.reshape(BLOCKS + 1, -1)
        OtherLoads.memory = self.memory

    def loaded(self, name: str, tokens: list[int]) -> list[int]:
        """The distinct bytes that a request finds where kvd loads for it."""
        self.forget_device()
        self.memory[:] = FORGOTTEN
        self.add(self.request(name, tokens, 2))
        while not self.taken.cached_tokens.get(name):
            self.step()
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        held = self.memory[blocks[: self.taken.cached_tokens[name] // 16]]
        self.drain()
        return sorted(set(held.flatten().tolist()))


def found_after_a_failed_load(stand: MultiStand) -> dict[str, Any]:
    """How many tokens are found of a request of which a load failed, and of one that shared it
    as long as nobody knew; and then of one that came when all was computed."""
    tokens = prompt("fails", 112)
    failing = stand.request(PREFIX, [*tokens, 1, 2, 3], 3)
    beside = stand.request("beside", [*tokens, 4, 5, 6], 3)
    stand.add(failing)
    stand.add(beside)
    stand.drain()
    found = []
    for name in ("doubtful", "computed"):
        stand.forget_device()
        stand.add(stand.request(name, [*tokens, 7], 1))
        stand.drain()
        found.append(stand.taken.cached_tokens[name])
    return {"failed": FailingLoads.has_failed, "found": found}


def found_amid_computing(stand: MultiStand) -> dict[str, Any]:
    """How many tokens another request with the same prompt finds on the device, of one that is
    computed anew, chunk by chunk, as its load failed some steps ago."""
    tokens = prompt("is computed", 112)
    failing = stand.request(PREFIX, [*tokens, 1, 2, 3], 3)
    stand.add(stand.request("decodes", prompt("decodes", 20), 40))  # else there are no chunks
    stand.add(failing)
    while not FailingLoads.has_failed or failing.num_computed_tokens >= FETCHED_TOKENS:
        stand.step()
    while failing.num_computed_tokens < 4 * OPTIONS.block_tokens:
        stand.step()
    computed = failing.num_computed_tokens
    stand.add(stand.request("amid", [*tokens, 4], 1))
    stand.drain()
    return {"computed": computed, "found": stand.taken.cached_tokens["amid"]}


def serve_failing(orders: Connection, socket: str, asynchronous: bool) -> None:
    """Let the other connector fail within a step; "amid" asks for the other case."""
    block = OPTIONS.block_tokens
    options = replace(OPTIONS, num_blocks=64, asynchronous=asynchronous, longest_chunk=block)
    failing = OTHER | {"kv_connector": "FailingLoads"}
    make = partial(MultiStand, other=failing, options=options)
    named = {"weights_id": f"failing {asynchronous}", "offload_prompt_only": False}
    with stand_with_kvd(make, socket, **named) as (stand, _):
        while (case := orders.recv()) is not None:
            find = found_amid_computing if case == "amid" else found_after_a_failed_load
            orders.send(find(stand))


def serve(orders: Connection, socket: str, asynchronous: bool | None = None) -> None:
    """Store a request's blocks while its mover is held, and let the other connector load.

    With `asynchronous`, of vLLM's scheduling, its loads fail instead."""
    if asynchronous is not None:
        serve_failing(orders, socket, asynchronous)
        return
    with stand_with_kvd(BesideStand, socket, offload_prompt_only=False) as (stand, _):
        while (mover := orders.recv()) is not None:
            stand.memory[:] = COMPUTED
            tokens = prompt("stored", (BLOCKS - 1) * 16)
            os.kill(mover, signal.SIGSTOP)
            threading.Timer(HELD_SECONDS, os.kill, (mover, signal.SIGCONT)).start()
            stand.add(stand.request("stored", tokens, 1))
            while "stored" in stand.scheduler.requests:
                stand.step()
            stand.add(stand.request(PREFIX, prompt("other", (BLOCKS - 1) * 16), 1))
            stand.drain()
            orders.send({"bytes": stand.loaded("again", tokens)})
