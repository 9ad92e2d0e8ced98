"""An engine in twenty lines: what it takes to keep an engine's KV in kvd.

    kvd serve --socket /tmp/kvd.sock --pool-bytes 64MiB --pool-directory /dev/shm/kvd-example
    python examples/embed_engine.py /tmp/kvd.sock      # the second run loads what the first stored

A real engine has a model where this one writes numbers, and its scheduler and each rank's
worker live in processes of their own; the plan and the report then travel between them.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import socket
import sys

from kvd_client import (
    EngineIdentity,
    Fragment,
    Group,
    GroupLayout,
    NamespaceFields,
    ScheduledRequest,
    Scheduler,
    SchedulerConnection,
    SharedMemory,
    Worker,
)

TOKENS, BLOCK_BYTES, NUM_BLOCKS = 16, 4096, 64


def answers(path: str) -> bool:
    """Whether a daemon has this socket; the file of one that was killed may still lie there."""
    with socket.socket(socket.AF_UNIX) as companion, contextlib.suppress(OSError):
        companion.connect(f"{path}.companion")
        return True
    return False


def main(path: str) -> None:
    kv_fd = os.memfd_create("kv")  # the engine's KV memory: NUM_BLOCKS blocks, one after the other
    os.ftruncate(kv_fd, NUM_BLOCKS * BLOCK_BYTES)
    kv = mmap.mmap(kv_fd, 0)
    prompt = b"the same five blocks of prompt every time"
    hashes = [hashlib.sha256(prompt + bytes([i])).digest() for i in range(5)]
    table = [list(range(10, 15))]  # the request's block table, by group

    # ---- the twenty lines -----------------------------------------------------------------
    identity = EngineIdentity(engine_id="example", boot_nonce=os.urandom(16))
    namespace = NamespaceFields(
        model="example",
        kv_dtype="uint8",
        hash_algorithm="sha256",
        hash_bytes=32,
        groups=(Group(tokens_per_block=TOKENS, shard_bytes=(BLOCK_BYTES,)),),
    )
    worker = Worker(path, identity)
    fragment = Fragment(memory=0, base=0, stride=BLOCK_BYTES, bytes=BLOCK_BYTES)
    memory = SharedMemory(kv_fd, 0, NUM_BLOCKS * BLOCK_BYTES)
    worker.register([memory], [GroupLayout(NUM_BLOCKS, [fragment])])
    connection = SchedulerConnection(path, identity, namespace)
    scheduler = Scheduler(connection)
    # Only so that this short life meets the daemon: a rank's mover starts in its own time.
    connection.wait_usable(60.0 if answers(path) else 0.0)
    scheduler.on_new_request("request", 5 * TOKENS + 1, [hashes])
    while (found := scheduler.get_num_new_matched_tokens("request", 0)) is None:
        scheduler.build_step([])
    scheduler.update_state_after_alloc("request", table, found)
    computed, waiting = found, found > 0
    while waiting or computed < 5 * TOKENS or scheduler.has_pending_work():
        step = []
        if not waiting and computed < 5 * TOKENS:  # "the model" computes one block in a step
            block = computed // TOKENS
            kv[(10 + block) * BLOCK_BYTES : (11 + block) * BLOCK_BYTES] = (
                bytes([block]) * BLOCK_BYTES
            )
            computed += TOKENS
            step = [ScheduledRequest("request", table, computed)]
        plan = scheduler.build_step(step)
        worker.start_step(plan)
        worker.finish_step(plan)
        worker.rest(has_run=bool(step))
        outcome = scheduler.update_from_workers([worker.get_finished()])
        if "request" in outcome.failed_loads:
            computed = 0
        waiting = waiting and "request" not in outcome.finished_loads + outcome.failed_loads
    scheduler.request_finished("request", table, computed)
    # ---------------------------------------------------------------------------------------

    whole = all(kv[(10 + i) * BLOCK_BYTES] == i for i in range(5))
    print(f"loaded {found} of {5 * TOKENS} tokens, KV {'as computed' if whole else 'WRONG'}")
    worker.close()
    connection.close()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit("usage: python examples/embed_engine.py SOCKET (the one that `kvd serve` has)")
    main(sys.argv[1])
