"""One engine of LMCache, by LMCache's own classes: told what to do by JSON lines.

Runs in the environment that has LMCache, as a script; `theirs.py` is the other end. Data goes
through the client of LMCache's own `lmcache bench server`, lookups through its request client: it
is acknowledged, and its status then polled without pause until the answer is there. (Its vLLM
connector polls once a scheduler step, which takes longer.)
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

import numpy as np
import zmq
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

BLOCK_TOKENS = 16
MODEL = "test-model"  # what the benchmark client of theirs registers
REPLY_SECONDS = 30.0
VOCABULARY = 32000


class Engine:
    """Registered with the server at `url`, with `blocks` blocks of 16 tokens."""

    def __init__(self, url: str, transfer_mode: str, shape: str) -> None:
        self._requests = RequestClientFactory.create(url, context=zmq.Context())
        self._chunk_tokens = int(self._requests.get_chunk_size().result(timeout=REPLY_SECONDS))
        config = BenchConfig(
            rpc_url=url,
            http_url="",
            mode="cpu",
            transfer_mode=transfer_mode,
            tp_size=1,
            use_mla=False,
            num_tokens=self._chunk_tokens,
            kvcache_shape_spec=shape,
            num_blocks=0,
            block_size=BLOCK_TOKENS,
        )
        self._blocks = int(shape.split(",")[1])
        self._client = ServerBenchClient(config, lambda _line: None)
        self._client.start()
        self._numbers = itertools.count(1)
        self._tokens: dict[tuple[int, int], tuple[int, ...]] = {}

    # -- what it can be told ----------------------------------------------------------------

    def noop(self, calls: int) -> dict[str, Any]:
        """Milliseconds of each smallest call."""
        taken = []
        for _ in range(calls):
            began = time.perf_counter()
            self._requests.noop().result(timeout=REPLY_SECONDS)
            taken.append((time.perf_counter() - began) * 1e3)
        return {"ms": taken}

    def lookup(self, prompt: int, chunks: int, calls: int, pause_s: float) -> dict[str, Any]:
        """Milliseconds of each lookup, from the call to the number of chunks found and locked."""
        tokens = self._tokens_of(prompt, chunks)
        taken, found = [], 0
        for _ in range(calls):
            key = self._key(tokens)
            began = time.perf_counter()
            found = self._look_up(key)
            taken.append((time.perf_counter() - began) * 1e3)
            self._let_go(key, found)
            time.sleep(pause_s)
        return {"ms": taken, "found": found}

    def store(self, prompt: int, chunks: int, chunks_a_call: int) -> dict[str, Any]:
        """Store a prompt from the engine's first blocks on; seconds, and chunks that were taken."""
        return self._transfer("store", prompt, chunks, chunks_a_call)

    def retrieve(self, prompt: int, chunks: int, chunks_a_call: int) -> dict[str, Any]:
        """Look a prompt up and load it; seconds of the loads alone."""
        return self._transfer("retrieve", prompt, chunks, chunks_a_call)

    def loop(self, chunks: int, passes: int, chunks_a_second: float) -> dict[str, Any]:
        """Ask for each of so many one-chunk prompts in turn, load what is there, store the rest."""
        shares = []
        began = time.perf_counter()
        for number in range(passes):
            hits = 0
            for place in range(chunks):
                due = (number * chunks + place) / chunks_a_second
                time.sleep(max(0.0, began + due - time.perf_counter()))
                hits += self._use(place)
            shares.append(hits / chunks)
        return {"hits": shares}

    def clear(self) -> dict[str, Any]:
        """Empty the server."""
        self._requests.clear(True).result(timeout=REPLY_SECONDS)
        return {}

    def close(self) -> dict[str, Any]:
        self._client.close()
        self._requests.close()
        return {}

    # -- how --------------------------------------------------------------------------------

    def _use(self, prompt: int) -> int:
        tokens = self._tokens_of(prompt, 1)
        key = self._key(tokens)
        found = self._look_up(key)
        request = self._request(tokens, key.request_id)
        if found:
            self._client.retrieve(request, 0, len(tokens))
        else:
            self._client.store(request, 0, len(tokens))
        self._requests.end_session(key.request_id).result(timeout=REPLY_SECONDS)
        return found

    def _transfer(
        self, direction: str, prompt: int, chunks: int, chunks_a_call: int
    ) -> dict[str, Any]:
        tokens = self._tokens_of(prompt, chunks)
        key = self._key(tokens)
        found = self._look_up(key) if direction == "retrieve" else 0
        request = self._request(tokens, key.request_id)
        move = self._client.retrieve if direction == "retrieve" else self._client.store
        done, seconds = 0, 0.0
        for first in range(0, chunks, chunks_a_call):
            count = min(chunks_a_call, chunks - first)
            began = time.perf_counter()
            result = move(request, first * self._chunk_tokens, count * self._chunk_tokens)
            seconds += time.perf_counter() - began
            done += count if result is not None and result.succeeded else 0
        self._requests.end_session(key.request_id).result(timeout=REPLY_SECONDS)
        return {"seconds": seconds, "done": done, "found": found}

    def _look_up(self, key: Any) -> int:
        self._requests.lookup(key, 1).result(timeout=REPLY_SECONDS)
        while True:
            status = self._requests.query_prefetch_status(key.request_id)
            found = status.result(timeout=REPLY_SECONDS)
            if found is not None:
                return int(found)

    def _let_go(self, key: Any, found: int) -> None:
        if found:
            self._requests.free_lookup_locks(key, 1).result(timeout=REPLY_SECONDS)
        self._requests.end_session(key.request_id).result(timeout=REPLY_SECONDS)

    def _key(self, tokens: tuple[int, ...]) -> Any:
        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            num_kv_readers=1,
            worker_id=None,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=f"request-{next(self._numbers)}",
        )

    def _request(self, tokens: tuple[int, ...], name: str) -> Any:
        # Blocks of the engine are used again and again: what lies in them is all the same here.
        return RequestContext(
            sequence_id=0,
            request_id=name,
            request_kind="",
            token_ids=tokens,
            num_full_tokens=len(tokens),
            total_chunks=len(tokens) // self._chunk_tokens,
            chunk_size=self._chunk_tokens,
            block_offset=0,
            num_blocks=len(tokens) // BLOCK_TOKENS,
        )

    def _tokens_of(self, prompt: int, chunks: int) -> tuple[int, ...]:
        known = self._tokens.get((prompt, chunks))
        if known is None:
            draw = np.random.default_rng([prompt, 11])
            drawn = draw.integers(1, VOCABULARY, chunks * self._chunk_tokens)
            known = self._tokens[prompt, chunks] = tuple(drawn.tolist())
        return known


def main() -> None:
    """Do what stdin says, one JSON object a line, and answer each on what was stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # LMCache writes its log to stdout
    engine = Engine(*sys.argv[1:4])
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(engine, order.pop("do"))(**order)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
