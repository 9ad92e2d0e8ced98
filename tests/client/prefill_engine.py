"""A prefill engine in a process of its own: stores a prompt's KV, hands it off, and waits.

    python -m tests.client.prefill_engine SOCKET PROMPT BLOCKS HAND_OFF_MS

Writes a line with the number of blocks that it loaded once the daemon has its hand-off.
"""

from __future__ import annotations

import sys
import time

from kvd_client import ScheduledRequest
from tests.client.small_engine import TOKENS, SmallEngine


def prefill(engine: SmallEngine, prompt: str, count: int, hand_off_ms: int) -> int:
    """Serve a request whose decoding is another's; blocks that were there already."""
    remote = {"do_remote_decode": True, "hand_off_ms": hand_off_ms}
    hashes = engine.arrive("p", prompt, count, kv_transfer_params=remote)
    found = engine.match("p")
    table = list(range(count))
    engine.scheduler.update_state_after_alloc("p", [table], found)
    if found:
        engine.step_until_loaded("p")
    loaded = found // TOKENS
    engine.compute(table[loaded:], engine.contents(hashes[loaded:]))
    engine.step(ScheduledRequest("p", [table], count * TOKENS))
    engine.scheduler.request_finished("p", [table])
    engine.step_until_idle()
    # The answer to a lookup comes behind the step that it followed.
    engine.arrive("after", prompt, count)
    engine.match("after")
    return loaded


def main() -> None:
    socket, prompt, count, hand_off_ms = sys.argv[1:]
    engine = SmallEngine(socket, "prefill")
    engine.wait_usable()
    loaded = prefill(engine, prompt, int(count), int(hand_off_ms))
    sys.stdout.write(f"{loaded}\n")
    sys.stdout.flush()
    time.sleep(60)  # until killed


if __name__ == "__main__":
    main()
