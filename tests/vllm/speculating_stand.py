"""A stand whose model speculates, all of whose drafts are right, and whose requests get more input.

Run in a process of its own. VLLM itself reads wrong bytes here: what is looked at is what the
daemon gets of them.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds

from tests.vllm.bytes_stand import BytesStand
from tests.vllm.engine import prompt
from tests.vllm.modelled_bytes import run_on
from tests.vllm.scheduler_stand import StandOptions
from tests.vllm.stand_process import stand_with_kvd

STEPS = 100
DRAFTS = 3
OPTIONS = StandOptions(
    num_blocks=80,
    max_requests=8,
    step_tokens=128,
    longest=640,
    model_seconds=0.0,
    asynchronous=False,
)


class SpeculatingStand(BytesStand):
    """Each step's output has as many tokens as were drafted, and one more."""

    def make_layout(self) -> KVCacheConfig:
        self.config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=2
        )
        return super().make_layout()

    def _forward(self, name: str, tables: list[list[int]], scheduled: int) -> list[int]:
        """Write what is computed, drafts too; the sampled tokens."""
        request, known = self.scheduler.requests[name], self._computed[name]
        first, end = known.tokens, known.tokens + scheduled
        tokens, numbers = run_on(request.all_token_ids, end + 1, self.weights)
        for memory, table in zip(self.memory, tables, strict=True):
            memory.write(table, numbers, range(first, end))
        known.tokens = end
        return [] if request.is_prefill_chunk else tokens[request.num_tokens : end + 1]

    def _finish_oldest(self) -> None:
        super()._finish_oldest()
        drafts = {}
        for name, request in self.scheduler.requests.items():
            known = list(request.all_token_ids)
            tokens, _ = run_on(known, len(known) + DRAFTS, self.weights)
            drafts[name] = tokens[len(known) :]
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def add_turn(self, name: str, tokens: list[int], max_tokens: int) -> None:
        """More input, and what is answered to it."""
        request = self.request(name, tokens, max_tokens)
        request.resumable = True
        if name in self.scheduler.requests:
            self.add_input(request)
        else:
            self.add(request)
        for _ in range(STEPS):
            if self.scheduler.num_waiting_for_streaming_input:
                return
            self.step()
        raise AssertionError("the turn does not end")


def serve(orders: Connection, socket: str, options: dict[str, Any]) -> None:
    """Run a request of two turns, the first of which is answered with so many tokens.

    `thrown_away`: tokens that vLLM counts as computed then and the request has not. `stored`: the
    blocks that were stored, all of which are right.
    """
    make = partial(SpeculatingStand, groups=[(16,)], options=OPTIONS)
    settings = {"weights_id": "speculating", "offload_prompt_only": False} | options
    with stand_with_kvd(make, socket, **settings) as (stand, connection):
        stand.watch(connection)
        while (order := orders.recv()) is not None:
            stand.stored = {}
            name = f"{order} answered"
            stand.add_turn(name, prompt(f"{name} first", 24), order)
            session = stand.scheduler.requests[name]
            thrown_away = max(0, session.num_computed_tokens - session.num_tokens)
            stand.add_turn(name, prompt(f"{name} second", 100), 4)
            stand.add_input(stand.request(name, [0], 1))
            stand.drain()
            assert stand.audit(connection) == len(stand.stored)
            orders.send({"thrown_away": thrown_away, "stored": len(stand.stored)})
            stand.forget_device()
