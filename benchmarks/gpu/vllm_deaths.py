"""What vLLM's engine answers while a mover or the daemon is killed (-9) under it.

A part of vllm_first_token.py. The engine must go on, with right bytes; and once the daemon has the
rank again it must load what was stored before, without being told anything.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.vllm.processes import OrderedProcess
from tests.daemon_process import DaemonProcess

BACK_SECONDS = 90.0  # a mover's start on a GPU imports its libraries and makes a context
LOOK_SECONDS = 0.1
Answer = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One prompt that is asked again and again, and what its cold answer was."""

    engine: OrderedProcess
    number: int
    length: int  # tokens
    whole: int  # of them in whole blocks
    max_tokens: int

    def forget(self) -> None:
        """Leave nothing in vLLM's own cache."""
        assert self.engine.do("forget_device")["done"], "requests still hold blocks"

    def ask(self) -> Answer:
        """Its answer."""
        order = {"numbers": [self.number], "length": self.length, "max_tokens": self.max_tokens}
        (answer,) = self.engine.do("ask_drawn", **order)["answers"]
        return dict(answer)

    def until_loaded(self, cold: Answer) -> float:
        """Ask until all is loaded, and right; seconds that took."""
        began = time.monotonic()
        while True:
            self.forget()
            answer = self.ask()
            if answer["cached"] == self.whole:
                break
            assert time.monotonic() - began < BACK_SECONDS, "the daemon does not serve the rank"
            time.sleep(LOOK_SECONDS)
        assert answer["digest"] == cold["digest"], "other bytes were loaded than were computed"
        return time.monotonic() - began


def survived(asked: Asked, running: DaemonProcess, delays: list[float]) -> list[Answer]:
    """Of each kill: whom, when, and the answer that it fell into.

    delays: seconds from the request's arrival to the kill, once a mover's and once the daemon's.
    """
    asked.forget()
    cold = asked.ask()
    asked.until_loaded(cold)
    found = []
    for whom, kill in (("mover", _kill_movers), ("daemon", DaemonProcess.kill)):
        for delay in delays:
            answer = _ask_and_kill(asked, running, delay, kill)
            if answer["cached"] in (0, asked.whole):  # else the passes were other ones
                assert answer["digest"] == cold["digest"], f"{whom} killed: wrong bytes"
            if not running.is_started:
                running.start()
            row = {"killed": whom, "after_s": delay, "back_s": asked.until_loaded(cold)}
            row |= {name: answer[name] for name in ("seconds", "cached")}
            found.append(row | {"same_tokens": answer["tokens"] == cold["tokens"]})
    return found


def _ask_and_kill(
    asked: Asked, running: DaemonProcess, delay: float, kill: Callable[[DaemonProcess], None]
) -> Answer:
    asked.forget()
    timer = threading.Timer(delay, kill, (running,))
    timer.start()
    try:
        return asked.ask()
    finally:
        timer.join()


def _kill_movers(running: DaemonProcess) -> None:
    for pid in running.movers():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
