"""A rank's process: its part of the model, its KV memory, its half of every copy.

Run by the engine as `python -m examples.engine.worker FD`.
"""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection

import torch

from examples.engine.config import Shard
from examples.engine.kv_memory import KvMemory
from examples.engine.lifetime import die_with_parent
from examples.engine.messages import RankStart, RunStep, StepDone, Stop, TakeDigests
from examples.engine.model import Decoder, SumOverRanks
from examples.engine.pair_sum import PairSum, alone
from examples.engine.rank_offload import open_rank_offload
from examples.engine.weights import load_checkpoint


class RankWorker:
    """Answers the engine's messages until told to stop."""

    def __init__(self, start: RankStart) -> None:
        config = start.config
        checkpoint = load_checkpoint(config.model, config.cache_dir, config.seed)
        shard = Shard.of(checkpoint.model, start.rank, config.ranks)
        self._is_first = start.rank == 0
        self._decoder = Decoder(checkpoint, shard, _sum_over_ranks(start))
        self._kv = KvMemory(checkpoint.model, shard, config.num_blocks, config.block_tokens)
        self._offload = open_rank_offload(start, self._kv)

    def run_step(self, step: RunStep) -> StepDone:
        """Start the plan's loads, compute, hand computed blocks over, report what has ended."""
        self._offload.start_step(step.plan)
        sampled: tuple[int, ...] = ()
        if step.spans:
            last = self._decoder.forward(step.spans, self._kv.layers)
            if self._is_first:
                sampled = tuple(self._decoder.logits(last).argmax(-1).tolist())
        self._offload.finish_step(step.plan)
        return StepDone(sampled, self._offload.report())

    def digests(self, request: TakeDigests) -> list[str]:
        return self._kv.digests(request.blocks)

    def close(self) -> None:
        """Give the memory back once kvd can't touch it any more."""
        self._offload.close()
        self._kv.close()


def _sum_over_ranks(start: RankStart) -> SumOverRanks:
    if start.config.ranks == 1:
        return alone
    return PairSum(start.rank, start.exchange_fd, socket.socket(fileno=start.peer_fd))


def serve(connection: Connection, worker: RankWorker) -> None:
    """Answer messages in order; returns at Stop."""
    while True:
        match connection.recv():
            case RunStep() as step:
                connection.send(worker.run_step(step))
            case TakeDigests() as request:
                connection.send(worker.digests(request))
            case Stop():
                return
            case other:
                raise TypeError(f"unknown message {other!r}")


def main() -> int:
    """Serve the engine that started this process; ends with it."""
    die_with_parent()
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    try:
        worker = RankWorker(connection.recv())
        try:
            connection.send("ready")
            serve(connection, worker)
        finally:
            worker.close()
    except (EOFError, ConnectionError):
        return 1  # the engine or the other rank is gone
    return 0


if __name__ == "__main__":
    status = main()
    # Torch takes a second to leave a process in order, and nothing of it needs to be.
    sys.stderr.flush()
    os._exit(status)
