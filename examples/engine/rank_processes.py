"""The engine's hold on its worker processes, one per tensor-parallel rank."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from examples.engine.config import EXCHANGE_BYTES, EngineConfig
from examples.engine.messages import (
    RankStart,
    RunStep,
    Span,
    StepDone,
    Stop,
    TakeDigests,
    start_process,
)

STOP_SECONDS = 15.0


class RankProcesses:
    """Starts the ranks together and runs each step on all of them."""

    def __init__(self, config: EngineConfig, boot_nonce: bytes) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        with ExitStack() as stack:
            exchange, peers = -1, [-1] * config.ranks
            if config.ranks > 1:
                exchange = os.memfd_create("engine-exchange", os.MFD_CLOEXEC)
                stack.callback(os.close, exchange)
                os.ftruncate(exchange, 4 * EXCHANGE_BYTES)  # two areas for each rank
                pair = socket.socketpair()
                peers = [stack.enter_context(end).fileno() for end in pair]
            for rank in range(config.ranks):
                inherited = [fd for fd in (exchange, peers[rank]) if fd >= 0]
                process, connection = start_process("examples.engine.worker", (), inherited)
                self._processes.append(process)
                self._connections.append(connection)
                connection.send(RankStart(config, rank, boot_nonce, exchange, peers[rank]))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_until_ready(self) -> None:
        """Returns when every rank has its weights and memory; EOFError when one has died."""
        for connection in self._connections:
            connection.recv()

    def run_step(self, spans: Sequence[Span], plan: Any) -> tuple[tuple[int, ...], list[Any]]:
        """One token per span, and every rank's offload report."""
        for connection in self._connections:
            connection.send(RunStep(tuple(spans), plan))
        done: list[StepDone] = [connection.recv() for connection in self._connections]
        return done[0].sampled, [each.report for each in done]

    def digests(self, blocks: Sequence[int]) -> list[str]:
        """Per block the digests of its bytes on every rank, joined."""
        for connection in self._connections:
            connection.send(TakeDigests(tuple(blocks)))
        per_rank = [connection.recv() for connection in self._connections]
        return ["".join(parts) for parts in zip(*per_rank, strict=True)]

    def stop(self) -> None:
        """End the ranks in order; kill those that don't end in time."""
        for connection in self._connections:
            try:
                connection.send(Stop())
            except OSError:
                pass  # it has ended already
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
