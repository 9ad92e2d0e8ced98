"""A stand that only computes and stores: nothing that it asks for is known, so it looks nothing up.

Run in a process of its own, on a device so small that each request soon gets the blocks of another.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from kvd_client.integrations.vllm.metadata import KvdWorkerMetadata
from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

LENGTH = 6 * 16
OPTIONS = StandOptions(num_blocks=24, max_requests=2, step_tokens=64, asynchronous=False)


class StoringStand(Stand):
    """Counts the steps whose rank gave stores up."""

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        super().__init__(model, transfer, OPTIONS)
        self.gave_up = 0
        update = self.connector.update_connector_output

        def counted(output: Any) -> None:
            meta = output.kv_connector_worker_meta
            self.gave_up += isinstance(meta, KvdWorkerMetadata) and meta.gave_up
            update(output)

        self.connector.update_connector_output = counted


def serve(orders: Connection, socket: str) -> None:
    """Run so many requests; which steps gave stores up, or stored, and how long it took."""
    with stand_with_kvd(StoringStand, socket, flush_timeout_s=0.3) as (stand, _):
        number = 0
        while (count := orders.recv()) is not None:
            began = time.monotonic()
            stand.gave_up = 0
            for _ in range(count):
                number += 1
                name = f"{number} is new"
                stand.add(stand.request(name, prompt(name, LENGTH), max_tokens=2))
                while stand.scheduler.requests:
                    stand.step()
            told = {
                "gave_up": stand.gave_up,
                "stored": len(stand.take().storing_steps),
                "seconds": time.monotonic() - began,
            }
            orders.send(told)
