"""The probe's end of its processes: an order goes out as a line, its answer comes back as one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HANDS = "benchmarks.gpu.probing.probe_process"
ORDER_SECONDS = 60.0  # the first import of torch on a fresh machine is the slowest order
# A shell in front takes PID 1 of a namespace, so that ours gets another number.
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
BEHIND_A_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")


class Refused(Exception):
    """The process answered with an error, which is often what was asked for."""


class Remote:
    """One process; `call` raises Refused with its words, TimeoutError when it hangs."""

    def __init__(
        self,
        prefix: Sequence[str] = (),
        module: str = HANDS,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.go, self.done = os.eventfd(0), os.eventfd(0)
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module],
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            pass_fds=(self.go, self.done),
            start_new_session=True,
        )
        self._rest = b""
        self._is_ended = False

    def call(self, order: str, **arguments: Any) -> Any:
        self.send(order, **arguments)
        return self.answer()

    def send(self, order: str, **arguments: Any) -> None:
        """Give an order without waiting; `answer` takes its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(
                json.dumps({"order": order, "arguments": arguments}).encode() + b"\n"
            )
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Refused(f"the process is gone: {self._process.poll()}") from error

    def answer(self, seconds: float = ORDER_SECONDS) -> Any:
        told = json.loads(self._line(time.monotonic() + seconds))
        if "failed" in told:
            raise Refused(told["failed"])
        return told["answer"]

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()  # a late answer must not be taken for the next order's
                raise TimeoutError("the process does not answer")
            received = os.read(fd, 1 << 16)
            if not received:
                raise Refused(f"the process ended: {self._process.wait()}")
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def kill(self) -> None:
        """Kill -9 with all that it started. It ends in its own time, as its driver lets it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill it and let go of its pipes; once."""
        if self._is_ended:
            return
        self._is_ended = True
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        os.close(self.go)
        os.close(self.done)


@contextlib.contextmanager
def remotes(count: int, prefix: Sequence[str] = ()) -> Iterator[list[Remote]]:
    """Started processes with a context each; ended at the end."""
    made = [Remote(prefix) for _ in range(count)]
    try:
        for remote in made:
            remote.send("start")
        for remote in made:
            remote.answer()
        yield made
    finally:
        for remote in made:
            remote.end()


def tried(act: Callable[[], Any]) -> dict[str, Any]:
    """What came of it: {"ok": answer} or {"failed": the error's words}."""
    try:
        return {"ok": act()}
    except (Refused, TimeoutError) as error:
        return {"failed": str(error)}


def wait_until(is_so: Callable[[], bool], seconds: float) -> float | None:
    """Seconds from now until it is so, looked at every millisecond; None if it never was."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if is_so():
            return time.monotonic() - began
        time.sleep(0.001)
    return None
