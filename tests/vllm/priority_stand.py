"""A stand with priorities, where a request is preempted in the step that had begun with it.

Run in a process of its own. As each step begins with what runs longest, an urgent request that came
later finds no block left for its next tokens, and the other one gives up its place in the step.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm.v1.request import Request

from tests.vllm.bytes_stand import BytesStand
from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import StandOptions
from tests.vllm.stand_process import stand_with_kvd

BLOCK_TOKENS = 16
# Four steps leave 2 of the 27 blocks that can be given away: the patient request has 15 of them
# then, the urgent one 9 and needs 3 more.
OPTIONS = StandOptions(
    num_blocks=28,
    max_requests=8,
    step_tokens=256,
    longest=320,
    asynchronous=False,
    model_seconds=0.0,
    policy="priority",
    longest_chunk=3 * BLOCK_TOKENS,
)
URGENT, PATIENT = 0, 5


def serve(orders: Connection, socket: str, options: dict[str, Any]) -> None:
    """Run the case as often as it is asked for."""
    make = partial(BytesStand, groups=[(BLOCK_TOKENS,)], options=OPTIONS)
    with stand_with_kvd(make, socket, weights_id="priorities", **options) as (stand, connection):
        stand.watch(connection)
        while (name := orders.recv()) is not None:
            orders.send(run(stand, connection, name))


def run(stand: BytesStand, connection: Any, name: str) -> dict[str, Any]:
    """The step and what follows; where the patient request had come to before, and began again.

    The stand asserts that whatever a request reads is right.
    """
    _add(stand, f"beside {name}", 5, 20, URGENT)
    patient = _add(stand, f"patient {name}", 15 * BLOCK_TOKENS + 5, 8, PATIENT)
    urgent = None
    computed = began_again = 0
    while stand.is_busy:
        stand.step()
        if urgent is None and patient.num_computed_tokens:
            urgent = _add(stand, f"urgent {name}", 12 * BLOCK_TOKENS - 10, 8, URGENT)
        if not patient.num_preemptions:
            computed = patient.num_computed_tokens
        elif not began_again:
            began_again = patient.num_computed_tokens
    stand.forget_device()
    told = {"computed": computed, "began again": began_again, "left": stand.left()}
    return told | {"audited": stand.audit(connection)}


def _add(stand: BytesStand, name: str, length: int, tokens: int, priority: int) -> Request:
    request = stand.request(name, prompt(name, length), tokens)
    request.priority = priority
    stand.add(request)
    return request
