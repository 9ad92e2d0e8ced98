"""Stores and loads of kvd and of both modes of LMCache beside each other, with one engine each.

A prompt of 256 MiB, in blocks of 64 fragments of 32 KiB on both sides, from the call until every
byte is where it belongs. LMCache's default, which pickles blocks into messages, is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from benchmarks import report
from benchmarks.lmcache import theirs
from benchmarks.lmcache.rounds import THEM, Spell, in_turn
from benchmarks.rig import BLOCK_BYTES, MIB, TOKENS_PER_BLOCK, BenchEngine, daemon, keys

OURS = "kvd"
CHUNK_TOKENS = 256  # LMCache's default
BLOCKS = 128
FRAGMENTS = 64
PROMPT_BYTES = BLOCKS * BLOCK_BYTES
CHUNKS = BLOCKS * TOKENS_PER_BLOCK // CHUNK_TOKENS
SHAPE = f"(2,{BLOCKS},{TOKENS_PER_BLOCK},8,128):float16:32"  # layers x K and V are the fragments
POOL_BYTES = 2048 * MIB
TOUCHED_PROMPTS = 6  # stored and dropped first: LMCache's pool is not touched when it starts
# LMCache-driven stores answer before lookups can find the blocks.
VISIBLE_SECONDS = 0.3


def copies(rounds: int, _share: float) -> list[dict[str, Any]]:
    """A row for each direction: GB/s of every side, and how many times LMCache's rate kvd has."""
    with contextlib.ExitStack() as held:
        stores, loads = {}, {}
        running = held.enter_context(daemon(POOL_BYTES))
        engine = BenchEngine(running.socket, "copies", BLOCKS, fragments=FRAGMENTS)
        held.callback(engine.close)
        stores[OURS], loads[OURS] = _ours(engine)
        for mode in (theirs.ENGINE_DRIVEN, theirs.LMCACHE_DRIVEN):
            url = held.enter_context(theirs.server(CHUNK_TOKENS, POOL_BYTES, mode))
            them = held.enter_context(theirs.engine(url, SHAPE, mode))
            _touch(them)
            stores[f"{THEM}, {mode}"], loads[f"{THEM}, {mode}"] = _theirs(them)
        return [
            {"direction": "store"} | _rates(in_turn(stores, rounds)),
            {"direction": "load"} | _rates(in_turn(loads, rounds)),
        ]


def _rates(taken: dict[str, list[list[float]]]) -> dict[str, Any]:
    rates = {side: [rate for spell in spells for rate in spell] for side, spells in taken.items()}
    row: dict[str, Any] = {}
    for side, values in rates.items():
        row[side] = {"gb_s": report.Spread.of(values)}
        if side != OURS:
            row[side]["kvd_times_the_rate"] = report.ratios(rates[OURS], values)
    return row


def _ours(engine: BenchEngine) -> tuple[Spell, Spell]:
    prompts = itertools.count(1)
    stored: list[list[bytes]] = []

    def store() -> list[float]:
        stored[:] = [keys(next(prompts), BLOCKS)]
        return [_rate(engine.run("store", stored[0], list(range(BLOCKS))))]

    def load() -> list[float]:
        return [_rate(engine.run("load", stored[0], list(range(BLOCKS))))]

    return store, load


def _theirs(engine: theirs.Engine) -> tuple[Spell, Spell]:
    prompts = itertools.count(TOUCHED_PROMPTS + 1)
    stored = [0]

    def store() -> list[float]:
        engine.do("clear")  # else it evicts a fifth of its pool once a second, and drops stores
        stored[0] = next(prompts)
        rate = _moved(engine.do, "store", stored[0])
        time.sleep(VISIBLE_SECONDS)
        return [rate]

    def load() -> list[float]:
        return [_moved(engine.do, "retrieve", stored[0])]

    return store, load


def _touch(engine: theirs.Engine) -> None:
    for prompt in range(1, TOUCHED_PROMPTS + 1):
        _moved(engine.do, "store", prompt)
    engine.do("clear")


def _moved(do: Callable[..., dict[str, Any]], direction: str, prompt: int) -> float:
    answer = do(direction, prompt=prompt, chunks=CHUNKS, chunks_a_call=CHUNKS)
    assert answer["done"] == CHUNKS, f"LMCache: {direction} of {answer['done']} of {CHUNKS} chunks"
    return _rate(answer["seconds"])


def _rate(seconds: float) -> float:
    return PROMPT_BYTES / seconds / 1e9
