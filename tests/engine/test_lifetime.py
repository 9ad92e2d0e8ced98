"""No child of an example outlives its starter, whenever that ends or is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from examples.engine.lifetime import STARTER, child_environment, interrupts_held

BOUND = [sys.executable, "-m", "examples.engine.lifetime", "-c", "print('runs')"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_a_start_is_heard_after_it(number: int) -> None:
    heard: list[str] = []
    before = signal.signal(number, lambda *_: heard.append("signal"))
    try:
        with interrupts_held():
            signal.raise_signal(number)
            heard.append("start")
        assert heard == ["start", "signal"]
        signal.raise_signal(number)
        assert heard == ["start", "signal", "signal"]  # as it was handled before
    finally:
        signal.signal(number, before)


def test_ctrl_c_in_a_start_still_interrupts() -> None:
    known: list[str] = []

    def start() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            known.append("child")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known == ["child"]


def test_a_start_that_fails_leaves_the_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(FileNotFoundError), interrupts_held():
        raise FileNotFoundError
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_can_start_too() -> None:
    entered: list[bool] = []

    def start() -> None:
        with interrupts_held():
            entered.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert entered == [True]


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(BOUND, env=environment, capture_output=True, text=True, check=False)


def test_a_child_whose_starter_has_ended_already_ends_too() -> None:
    told = run(child_environment())
    assert (told.returncode, told.stdout) == (0, "runs\n")
    orphan = child_environment() | {STARTER: str(os.getppid())}  # as if it had been adopted
    told = run(orphan)
    assert (told.returncode, told.stdout) == (1, "")
    assert "has ended" in told.stderr
