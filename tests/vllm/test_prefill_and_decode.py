"""One engine computes a prompt, another goes on with it, and the first may be dead by then."""

from __future__ import annotations

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_BYTES, BLOCK_TOKENS, HITS, LENGTH, WHOLE, Engine, prompt
from tests.vllm.node_daemon import NodeDaemon
from tests.waiting import wait_until

FLOOD_TOKENS = 60 * BLOCK_TOKENS
FLOODS = 6  # together more than the pool


def flood(engine: Engine, kvd: NodeDaemon) -> None:
    """Store more than the pool holds: whatever nothing holds is evicted."""
    slots = kvd.status().pool.bytes // BLOCK_BYTES
    assert slots < FLOODS * FLOOD_TOKENS // BLOCK_TOKENS
    for number in range(FLOODS):
        engine.generate(prompt(f"flood {number}", FLOOD_TOKENS), max_tokens=1)
        engine.settle()


def wait_until_held(kvd: NodeDaemon, blocks: int) -> None:
    """The hand-off leaves with the engine's last step: nobody waits for it but us."""
    due = blocks * BLOCK_BYTES
    wait_until(lambda: sum(tenant.bytes_leased for tenant in kvd.status().tenants) >= due)


def test_the_decode_engine_loads_all_that_the_dead_prefill_engine_handed_off(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    prefill, decode = start_with_kvd(), start_with_kvd()
    handed, ordinary = prompt("handed off", LENGTH), prompt("ordinary", LENGTH)
    shared = handed[: 2 * BLOCK_TOKENS]  # stored before by another request, then loaded
    prefill.store(shared)
    first = [
        prefill.submit(handed, max_tokens=1, transfer={"do_remote_decode": True}),
        prefill.submit(ordinary, max_tokens=1),
    ]
    prefill.finish(*first)
    prefill.settle()
    wait_until_held(kvd, WHOLE // BLOCK_TOKENS)
    prefill.kill()
    flood(decode, kvd)
    hit = decode.count(HITS)
    request = decode.submit(handed, transfer={"do_remote_prefill": True})
    (answer,) = decode.finish(request)
    assert (answer.tokens,) == tuple(plain.tokens(handed))
    assert decode.count(HITS) - hit == WHOLE
    hit = decode.count(HITS)
    assert [a.tokens for a in decode.generate(ordinary)] == plain.tokens(ordinary)
    assert decode.count(HITS) == hit, "nothing held this one: the flood was large enough"
    decode.end()
