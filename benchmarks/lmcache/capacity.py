"""How much of its pool either can use: a loop over a working set of a given share of the pool.

Each block in turn is asked for, loaded when it is there and stored when it is not, at a pace that
leaves LMCache's eviction (a fifth of the pool, once a second) time to make room.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.lmcache import theirs
from benchmarks.lmcache.rounds import THEM
from benchmarks.rig import BLOCK_BYTES, MIB, BenchEngine, daemon, keys

OURS = "kvd"
SHARES = (0.75, 0.81, 0.88, 0.94)
PASSES = 4
POOLS_A_SECOND = 1 / 8
CHUNK_TOKENS = 256
SHAPE = "(2,16,16,8,128):float16:2"  # a chunk of 256 tokens is as large as kvd's block
POOL_BYTES = 1024 * MIB


def capacity(_rounds: int, share: float) -> list[dict[str, Any]]:
    """A row for each share of the pool: hits of each pass, on both sides."""
    pool_bytes = POOL_BYTES if share == 1.0 else POOL_BYTES // 4
    pace = pool_bytes * POOLS_A_SECOND / BLOCK_BYTES
    rows = []
    for part in SHARES:
        blocks = int(pool_bytes * part) // BLOCK_BYTES
        with daemon(pool_bytes) as running:
            engine = BenchEngine(running.socket, f"loop-{part}", 1)
            ours = _loop(engine, blocks, pace)
            engine.close()
        with theirs.server(CHUNK_TOKENS, pool_bytes) as url, theirs.engine(url, SHAPE) as them:
            answer = them.do("loop", chunks=blocks, passes=PASSES, chunks_a_second=pace)
        rows.append(
            {
                "share_of_pool": part,
                "pool_bytes": pool_bytes,
                OURS: {"hits_by_pass": ours, "later_passes": min(ours[1:])},
                THEM: {"hits_by_pass": answer["hits"], "later_passes": min(answer["hits"][1:])},
            }
        )
    return rows


def _loop(engine: BenchEngine, blocks: int, pace: float) -> list[float]:
    session = engine.connection.session
    assert session is not None
    working_set = keys(1, blocks)
    shares = []
    began = time.perf_counter()
    for number in range(PASSES):
        hits = 0
        for place, key in enumerate(working_set):
            due = (number * blocks + place) / pace
            time.sleep(max(0.0, began + due - time.perf_counter()))
            there = session.shows(0, "", key)
            engine.run("load" if there else "store", [key], [0])
            hits += there
        shares.append(hits / blocks)
    return shares
