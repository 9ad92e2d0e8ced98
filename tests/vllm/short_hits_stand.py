"""Requests of which kvd has more or fewer tokens than are worth a load.

Run in a process of its own.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection

from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

OPTIONS = StandOptions(num_blocks=1024, step_tokens=1024, longest=8192)


def serve(orders: Connection, socket: str) -> None:
    """Asked with (stored tokens, tokens on the device, tokens asked for): how many of those were
    not computed, and how many lookups left."""
    make = partial(Stand, options=OPTIONS)
    least = orders.recv()
    with stand_with_kvd(make, socket, min_load_tokens=least) as (stand, connection):
        lookups = [0]
        begin = connection.start_lookup

        def start_lookup(queries: object) -> int:
            lookups[0] += 1
            return int(begin(queries))

        connection.start_lookup = start_lookup
        orders.send({"least": least})
        while (case := orders.recv()) is not None:
            stored, warm, asked = case
            tokens = prompt(str(case), max(case))
            for name, length in (("stored", stored), ("warm", warm), ("asked", asked)):
                lookups[0] = 0
                if name == "warm":
                    stand.forget_device()
                if length:
                    stand.add(stand.request(f"{name} {case}", tokens[:length], 1))
                    stand.drain()
            cached = stand.taken.cached_tokens[f"asked {case}"]
            orders.send({"cached": cached, "lookups": lookups[0]})
