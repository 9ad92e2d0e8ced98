"""A stand whose requests go on with more input, and what it orders to be stored of them.

Run in a process of its own. vLLM's own account of which block holds what stands beside each order.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

STEPS = 1000
OPTIONS = StandOptions(num_blocks=512, step_tokens=512)


class StreamingStand(Stand):
    """Notes each store that leaves, and what vLLM says of its blocks in the same step."""

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        super().__init__(model, transfer, OPTIONS)
        self.right: list[bool] = []  # by stored block: whether vLLM computes it there

    def watch(self, connection: Any) -> None:
        """Note all that this connection sends from now on."""
        send_step = connection.send_step

        def noted(step: Any) -> bool:
            for store in step.stores:
                self._note(store)
            sent: bool = send_step(step)
            return sent

        connection.send_step = noted

    def _note(self, store: Any) -> None:
        request = self.scheduler.requests.get(store.context.request_id)
        if request is None:
            return  # it has ended, and vLLM has no account of it any more
        (table,) = self.scheduler.kv_cache_manager.get_blocks(request.request_id).get_block_ids()
        places = dict(zip(map(bytes, request.block_hashes), table, strict=False))
        for run in store.runs:
            for block_hash, block in zip(run.block_hashes, run.engine_blocks, strict=True):
                self.right.append(places.get(bytes(block_hash)) == block)

    def add_input(self, name: str, tokens: Sequence[int]) -> None:
        """More input of a request, which waits for further input once that is computed."""
        request = self.request(name, tokens, max_tokens=3)
        request.resumable = True
        self.add(request)
        for _ in range(STEPS):
            if self.scheduler.num_waiting_for_streaming_input:
                return
            self.step()
        raise AssertionError("the input is not computed")

    def end(self, name: str) -> None:
        """There is no further input."""
        self.add(self.request(name, [0], max_tokens=1))
        self.drain()


def serve(orders: Connection, socket: str) -> None:
    """Run a request whose input comes in such lengths; for each block whether it is stored right.

    `alone`: by kvd's own books of one group, else by vLLM's of several.
    """
    with stand_with_kvd(StreamingStand, socket, offload_prompt_only=False) as (stand, connection):
        stand.watch(connection)
        while (order := orders.recv()) is not None:
            name, lengths, alone = order
            stand.connector.connector_scheduler._has_one_group = alone
            for number, length in enumerate(lengths):
                stand.add_input(name, prompt(f"{name} {number}", length))
            stand.end(name)
            right, stand.right = stand.right, []
            orders.send({"right": right})
