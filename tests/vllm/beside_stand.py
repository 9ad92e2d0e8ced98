"""An engine whose other connector loads into blocks that kvd still stores from.

Run in a process of its own.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.vllm.engine import prompt
from tests.vllm.other_loads import PREFIX, OtherLoads
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


class BesideStand(Stand):
    """kvd's connector and the other one under vLLM's MultiConnector."""

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        both = {
            "kv_connector": "MultiConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [{**transfer, "kv_role": "kv_both"}, OTHER]
            },
        }
        super().__init__(model, both, OPTIONS)
        (cache,) = self.caches.values()
        storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        self.memory = storage[: storage.numel() // (BLOCKS + 1) * (BLOCKS + 1)]
        self.memory = self.memory.reshape(BLOCKS + 1, -1)
        OtherLoads.memory = self.memory

    @property
    def connector(self) -> Any:
        """The one of kvd."""
        return self.scheduler.connector.sub_connectors[0]

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


def serve(orders: Connection, socket: str) -> None:
    """Store a request's blocks while its mover is held, and let the other connector load."""
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
