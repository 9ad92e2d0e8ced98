"""A stand for an offline batch: more short requests at once than one message has room for."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kvd_client.integrations.vllm.stats import FAILED_LOADS
from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

REQUESTS = 1300
BLOCK_TOKENS = 16
LENGTH = BLOCK_TOKENS + 1
OPTIONS = StandOptions(
    block_tokens=BLOCK_TOKENS,
    num_blocks=4 * REQUESTS,
    max_requests=REQUESTS,
    step_tokens=REQUESTS * 2 * BLOCK_TOKENS,
)


def serve(orders: Connection, socket: str) -> None:
    """Run the batch as often as it is asked for."""
    with stand_with_kvd(partial(Stand, options=OPTIONS), socket) as (stand, connection):
        while (name := orders.recv()) is not None:
            orders.send(run(stand, connection, name))


def run(stand: Stand, connection: Any, name: str) -> dict[str, Any]:
    """The whole batch, from arrival to rest."""
    requests = [
        stand.request(f"{name}-{number}", prompt(f"batch {number}", LENGTH), max_tokens=4)
        for number in range(REQUESTS)
    ]
    for request in requests:
        stand.add(request)
    # The one wait of a step is short; all answers shall be there in the same one.
    connection.gather(list(stand.connector.connector_scheduler.manager._queue._unanswered), 30.0)
    loads = []
    while stand.is_busy:
        before = stand.taken.load_jobs
        stand.step()
        loads.append(stand.taken.load_jobs - before)
    taken = stand.take()
    stand.forget_device()
    return {
        "cached": sorted(taken.cached_tokens.values()),
        "loads": [number for number in loads if number],
        "sessions": connection.sessions,
        "refusals": dict(connection.refusals),
        "failed": stand.connector.connector_scheduler.manager.stats.counts[FAILED_LOADS],
    }
