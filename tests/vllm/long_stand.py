"""A stand for prompts of more blocks than one job may have, whose KV can be told apart."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvd_client.integrations.vllm.stats import FAILED_LOADS
from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

BLOCK_TOKENS = 4
MOST_BLOCKS = 16_500
PATIENCE_SECONDS = 60.0  # all of a prompt's blocks shall be found
OPTIONS = StandOptions(
    block_tokens=BLOCK_TOKENS,
    num_blocks=MOST_BLOCKS + 100,
    max_requests=4,
    step_tokens=MOST_BLOCKS * BLOCK_TOKENS,
    longest=MOST_BLOCKS * BLOCK_TOKENS,
)


def serve(orders: Connection, socket: str) -> None:
    """Run a prompt of so many blocks as often as it is asked for."""
    make = partial(Stand, options=OPTIONS)
    contents: dict[int, torch.Tensor] = {}
    with stand_with_kvd(make, socket, patience_s=PATIENCE_SECONDS) as (stand, connection):
        while (order := orders.recv()) is not None:
            orders.send(run(stand, connection, contents, *order))


def run(
    stand: Stand, connection: Any, contents: dict[int, torch.Tensor], name: str, blocks: int
) -> dict[str, Any]:
    """One prompt, from arrival to rest, and whether its blocks hold what they once held.

    Whoever computes it first finds random bytes in memory, which are its KV; whoever comes
    later finds zeros there.
    """
    [kv] = stand.caches.values()
    rows = kv.movedim(list(kv.shape).index(OPTIONS.num_blocks), 0)
    if blocks in contents:
        rows.zero_()
    else:
        rows.copy_(torch.rand(rows.shape))
    request = stand.request(name, prompt(f"long {blocks}", blocks * BLOCK_TOKENS + 1), max_tokens=2)
    stand.add(request)
    table: list[int] = []
    stores = []
    while stand.is_busy:
        before = sum(stand.taken.storing_steps.values())
        stand.step()
        stores.append(sum(stand.taken.storing_steps.values()) - before)
        if not table and request.request_id in stand.scheduler.requests:
            [ids] = stand.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            table = list(ids)[:blocks]
    held = rows[table].clone()
    taken = stand.take()
    stand.forget_device()
    return {
        "cached": taken.cached_tokens[name],
        "loads": taken.load_jobs,
        "stores": [number for number in stores if number],
        "as_stored": torch.equal(held, contents.setdefault(blocks, held)),
        "blocks": len(table),
        "sessions": connection.sessions,
        "refusals": dict(connection.refusals),
        "failed": stand.connector.connector_scheduler.manager.stats.counts[FAILED_LOADS],
    }
