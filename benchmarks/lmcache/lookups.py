"""Lookups of kvd and of LMCache beside each other, from the call to the answer.

A hit is locked on both sides (kvd's lease, LMCache's read locks) and given back outside the time
taken. kvd gets block hashes, which vLLM has computed already for its own prefix cache; LMCache
gets the prompt's tokens and hashes them in its server. kvd is timed twice: through its scheduler
side, where a miss ends with a probe of the index page, and by its bare call. Hits come every 2 ms,
as in an engine's steps, so that none waits for what the one before gave back; misses leave nothing
to give back and come one after the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from benchmarks.lmcache import theirs
from benchmarks.lmcache.rounds import THEM, Spell, in_turn, latencies
from benchmarks.neighbour import ask
from benchmarks.rig import MIB, TOKENS_PER_BLOCK, BenchEngine, daemon, keys
from kvd_client import Scheduler

KEYS = (16, 256, 2048)
CALLS = {1: 200, 16: 100, 256: 40, 2048: 10}  # of one side in one round
CHUNKS = (256, 16)  # tokens: LMCache's default, and what kvd's blocks have here
ENGINE, CALL = "kvd, scheduler side", "kvd, call"
THERE, ABSENT = 1, 2  # prompts
STORED = max(KEYS)
STORED_AT_ONCE = 256
PAUSE_SECONDS = 0.002  # a step of an engine that decodes
BLOCK_BYTES = 4096
OUR_POOL, THEIR_POOL = 64 * MIB, 1024 * MIB


@dataclass(frozen=True)
class Asked:
    """So many lookups of the first `count` keys of a prompt."""

    prompt: int
    count: int
    calls: int

    @cached_property
    def hashes(self) -> list[bytes]:
        return keys(self.prompt, self.count)

    @property
    def found(self) -> int:
        return self.count if self.prompt == THERE else 0

    @property
    def pause_s(self) -> float:
        return PAUSE_SECONDS if self.found else 0.0


def lookups(rounds: int, share: float) -> list[dict[str, Any]]:
    """A row for each chunk size, number of keys and outcome; `share` of the usual calls."""
    with _ours() as ours:
        return [
            row for chunk_tokens in CHUNKS for row in _beside(ours, chunk_tokens, rounds, share)
        ]


def _beside(
    ours: BenchEngine, chunk_tokens: int, rounds: int, share: float
) -> Iterator[dict[str, Any]]:
    calls = {count: max(3, int(usual * share)) for count, usual in CALLS.items()}
    # Blocks of 512 bytes: nothing is copied while lookups are timed.
    blocks = STORED * chunk_tokens // TOKENS_PER_BLOCK
    shape = f"(2,{blocks},{TOKENS_PER_BLOCK},1,8):float16:1"
    scheduler = Scheduler(ours.connection)
    with (
        theirs.server(chunk_tokens, THEIR_POOL) as url,
        theirs.engine(url, shape) as them,
    ):
        stored = them.do("store", prompt=THERE, chunks=STORED, chunks_a_call=STORED_AT_ONCE)
        assert stored["done"] == STORED, f"LMCache took {stored['done']} of {STORED} chunks"
        smallest: dict[str, Spell] = {
            CALL: partial(_call, ours, Asked(ABSENT, 1, calls[1])),
            THEM: partial(_noop, them, calls[1]),
        }
        about = {"chunk_tokens": chunk_tokens, "keys": 1, "outcome": "smallest call"}
        yield about | latencies(in_turn(smallest, rounds))
        for count in KEYS:
            for prompt, outcome in ((THERE, "hit"), (ABSENT, "miss")):
                asked = Asked(prompt, count, calls[count])
                spells: dict[str, Spell] = {
                    ENGINE: partial(_through, scheduler, asked),
                    CALL: partial(_call, ours, asked),
                    THEM: partial(_theirs, them, asked),
                }
                about = {"chunk_tokens": chunk_tokens, "keys": count, "outcome": outcome}
                yield about | latencies(in_turn(spells, rounds))


@contextlib.contextmanager
def _ours() -> Iterator[BenchEngine]:
    with daemon(OUR_POOL, extent_bytes=4 * MIB, **{"lease-share": 0.9}) as running:
        engine = BenchEngine(running.socket, "lookups", STORED_AT_ONCE, BLOCK_BYTES)
        hashes = keys(THERE, STORED)
        for at in range(0, STORED, STORED_AT_ONCE):
            engine.run("store", hashes[at : at + STORED_AT_ONCE], list(range(STORED_AT_ONCE)))
        yield engine
        engine.close()


def _call(engine: BenchEngine, asked: Asked) -> list[float]:
    taken = []
    for _ in range(asked.calls):
        taken.append(ask(engine, asked.hashes))
        time.sleep(asked.pause_s)
    return taken


def _through(scheduler: Scheduler, asked: Asked) -> list[float]:
    """From a request's arrival to the tokens that can be loaded."""
    taken = []
    for _ in range(asked.calls):
        began = time.perf_counter()
        scheduler.on_new_request("lookup", TOKENS_PER_BLOCK * asked.count + 1, [asked.hashes])
        tokens = scheduler.get_num_new_matched_tokens("lookup", 0)
        while tokens is None:  # too late for this step: an engine would ask in the next
            scheduler.build_step([])
            tokens = scheduler.get_num_new_matched_tokens("lookup", 0)
        taken.append((time.perf_counter() - began) * 1e3)
        assert tokens == asked.found * TOKENS_PER_BLOCK, f"kvd found {tokens} tokens"
        scheduler.request_finished("lookup", [()])
        if tokens:
            scheduler.build_step([])  # gives the leases back
        time.sleep(asked.pause_s)
    return taken


def _theirs(engine: theirs.Engine, asked: Asked) -> list[float]:
    answer = engine.do(
        "lookup",
        prompt=asked.prompt,
        chunks=asked.count,
        calls=asked.calls,
        pause_s=asked.pause_s,
    )
    assert answer["found"] == asked.found, f"LMCache found {answer['found']} of {asked.count}"
    taken: list[float] = answer["ms"]
    return taken


def _noop(engine: theirs.Engine, calls: int) -> list[float]:
    taken: list[float] = engine.do("noop", calls=calls)["ms"]
    return taken
