"""The engine's own process: takes requests, schedules steps, runs them on its ranks.

Run by EngineProcess as `python -m examples.engine.engine FD CONFIG`; FD is a pipe on which
commands come and events go, as JSON objects:

    {"do": "submit", "requests": [{"id", "prompt", "max_tokens", "use_cache"}]}
    {"do": "reset"}     forget the device's prefix cache
    {"do": "settle"}    answered by {"event": "settled", …} once every copy has ended
    {"do": "stop"}

    {"event": "ready"}, {"event": "token", "id", "token"}, {"event": "finished", "id", …}
"""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from examples.engine.blocks import HashChain
from examples.engine.config import EngineConfig
from examples.engine.lifetime import die_with_parent
from examples.engine.messages import Span
from examples.engine.offload import open_offload
from examples.engine.rank_processes import RankProcesses
from examples.engine.requests import Request, RequestOrder
from examples.engine.scheduler import BatchScheduler
from examples.engine.weights import load_checkpoint

SETTLE_SECONDS = 10.0  # of copies still under way when the engine is told to stop
IDLE_STEP_SECONDS = 0.001  # between steps that only wait for copies


class Engine:
    """Owns the ranks and the schedule; `run` returns when told to stop or when left alone."""

    def __init__(self, config: EngineConfig, channel: Connection) -> None:
        self._channel = channel
        self._block_tokens = config.block_tokens
        checkpoint = load_checkpoint(config.model, config.cache_dir, config.seed)
        self._end_tokens = frozenset(checkpoint.model.end_tokens)
        boot_nonce = os.urandom(16)
        self._ranks = RankProcesses(config, boot_nonce)
        chain = HashChain(checkpoint.model.digest(), checkpoint.weights_id, config.block_tokens)
        self._offload = open_offload(config, checkpoint, boot_nonce)
        self._scheduler = BatchScheduler(config, chain, self._offload)
        self._ranks.wait_until_ready()
        connected = self._offload.wait_until_connected(config.connect_s)
        self._settling = False
        self._stopping = False
        pids = [os.getpid(), *self._ranks.pids]
        self._say({"event": "ready", "pids": pids, "connected": connected})

    def run(self) -> None:
        """Step while there is something to do; before the end, let what is computed be stored."""
        while not self._stopping:
            self._take_commands()
            if self._scheduler.has_requests or self._offload.pending:
                self._step()
            elif self._settling:
                self._settling = False
                stored, loaded = self._offload.copied_bytes
                self._say({"event": "settled", "bytes_stored": stored, "bytes_loaded": loaded})
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._offload.pending and time.monotonic() < deadline:
            self._step()

    def close(self) -> None:
        """End the ranks, so that no copy can touch their memory, then the session with kvd."""
        self._ranks.stop()
        self._offload.close()

    def _take_commands(self) -> None:
        busy = self._scheduler.has_requests or self._offload.pending or self._settling
        while self._channel.poll(0 if busy else None):
            self._obey(json.loads(self._channel.recv_bytes()))
            busy = True

    def _obey(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "submit":
                for each in command["requests"]:
                    self._submit(each)
            case "reset":
                self._scheduler.pool.reset()
            case "settle":
                self._settling = True
            case "stop":
                self._stopping = True
            case other:
                raise ValueError(f"unknown command {other!r}")

    def _submit(self, fields: dict[str, Any]) -> None:
        order = RequestOrder(
            fields["id"], tuple(fields["prompt"]), fields["max_tokens"], fields["use_cache"]
        )
        try:
            self._scheduler.add(order)
        except ValueError as error:
            self._say({"event": "refused", "id": order.request_id, "why": str(error)})

    def _step(self) -> None:
        batch = self._scheduler.next_batch()
        plan = self._offload.plan(self._scheduler.progress(batch), batch.preempted)
        spans = []
        for work in batch.work:
            tokens = work.request.tokens[work.first : work.first + work.count]
            spans.append(Span(tuple(tokens), work.first, tuple(work.request.blocks)))
        sampled, reports = self._ranks.run_step(spans, plan)
        for request, token in self._scheduler.computed(batch, sampled):
            self._say({"event": "token", "id": request.request_id, "token": token})
            output = request.output
            if token in self._end_tokens or len(output) == request.order.max_tokens:
                self._finish(request)
        self._scheduler.loads_ended(self._offload.outcome(reports))
        if not spans:
            time.sleep(IDLE_STEP_SECONDS)

    def _finish(self, request: Request) -> None:
        """Tell the result, with the bytes of every full block as they lie in memory now."""
        full = request.computed // self._block_tokens
        digests = self._ranks.digests(request.blocks[:full])
        self._scheduler.finish(request)
        self._say(
            {
                "event": "finished",
                "id": request.request_id,
                "output": request.output,
                "computed": request.tokens_computed,
                "loaded": request.tokens_loaded,
                "reused": request.tokens_reused,
                "failed_loads": request.failed_loads,
                "preemptions": request.preemptions,
                "hashes": [block_hash.hex() for block_hash in request.hashes[:full]],
                "digests": digests,
                "loaded_blocks": sorted(request.loaded_blocks),
            }
        )

    def _say(self, event: dict[str, Any]) -> None:
        self._channel.send_bytes(json.dumps(event).encode())


def main() -> int:
    """Serve the process that started this one; ends with it."""
    die_with_parent()
    channel = Connection(int(sys.argv[1]))
    engine = Engine(EngineConfig.from_json(sys.argv[2]), channel)
    try:
        engine.run()
    except (EOFError, ConnectionError) as error:
        print(f"engine: {error!r}", file=sys.stderr)
        return 1
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
