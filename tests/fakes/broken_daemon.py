"""`python -m tests.fakes.broken_daemon serve …`: the daemon, with a fault planted in its state.

KVD_TEST_FAULT says where it shows: `event` (a decision of the machine), `effect` (an order that
is carried out), `refusal` (likewise, by an error that refuses calls elsewhere), `call` (a
servicer) or `callback` (one of the loop).
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from kvd.__main__ import main
from kvd.control.services.operator import OperatorServicer
from kvd.core.blocks import slot_lifecycle
from kvd.core.errors import LimitExceeded
from kvd.core.model.slots import SlotState
from kvd.pool.pool import Pool

PLANTED = "planted by a test"


def _free_slots_too_early() -> None:
    sound = slot_lifecycle.make_ready

    def make_ready(turn: Any, owner: Any, slots: Any) -> None:
        turn.state.slots.state[slots] = SlotState.FREE  # while they are being stored
        sound(turn, owner, slots)

    slot_lifecycle.make_ready = make_ready


def _fail(*_args: Any, **_named: Any) -> None:
    raise AssertionError(PLANTED)


def _refuse(*_args: Any, **_named: Any) -> None:
    raise LimitExceeded(PLANTED)


def _fail_in_a_callback(*_args: Any, **_named: Any) -> None:
    asyncio.get_running_loop().call_soon(_fail)


def plant(fault: str) -> None:
    match fault:
        case "event":
            _free_slots_too_early()
        case "effect":
            Pool.write_ready = _fail  # type: ignore[method-assign]
        case "refusal":
            Pool.write_ready = _refuse  # type: ignore[method-assign]
        case "call":
            OperatorServicer.Clear = _fail  # type: ignore[assignment,method-assign]
        case "callback":
            clear: Any = _fail_in_a_callback
            OperatorServicer.Clear = clear  # type: ignore[method-assign]
        case _:
            raise ValueError(f"no such fault: {fault!r}")


if __name__ == "__main__":
    plant(os.environ["KVD_TEST_FAULT"])
    sys.exit(main())
