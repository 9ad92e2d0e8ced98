"""Requests that decode with what the device has, beside one whose prompt kvd alone has.

Run in a process of its own.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection

from vllm.v1.request import RequestStatus

from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

TAIL = 20  # tokens
STEPS = 8  # until their lookups are answered and they decode
OPTIONS = StandOptions(num_blocks=1024, step_tokens=1024, longest=8192, model_seconds=0.002)
RETRY_SECONDS = 1.0  # a request waits so long for what may not be leased to it


def serve(orders: Connection, socket: str) -> None:
    """Tell how many tokens of that one's prompt are found while the others decode."""
    make = partial(Stand, options=OPTIONS)
    with stand_with_kvd(make, socket, retry_deadline_s=RETRY_SECONDS) as (stand, _):
        decoders, length = orders.recv()
        stand.add(stand.request("stored", prompt("stored", length), 1))
        stand.drain()
        stand.forget_device()
        prompts = {f"decodes {n}": prompt(f"warm {n}", length) for n in range(decoders)}
        for name, tokens in prompts.items():
            stand.add(stand.request(f"warms what {name}", tokens, 1))
        stand.drain()
        more = prompt("more", TAIL)  # so that the page's word is not enough
        for name, tokens in prompts.items():
            stand.add(stand.request(name, tokens + more, 4000))
        for _ in range(STEPS):
            stand.step()
        stand.add(stand.request("again", prompt("stored", length) + more, 1))
        while "again" not in stand.taken.cached_tokens:
            stand.step()
        told = {name: stand.taken.cached_tokens[name] for name in ("again", *prompts)}
        stand.scheduler.finish_requests(list(prompts), RequestStatus.FINISHED_ABORTED)
        stand.drain()
        orders.send(told)
        orders.recv()
