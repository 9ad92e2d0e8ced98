"""The tests' side of a probe engine: starts the process, gives orders, kills it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 120.0  # for many rounds on a busy machine
ROOT = Path(__file__).parents[2]
CLIENT = "unpacked-client"  # of another release's tree: its wheel, unpacked


def environment_of(root: Path) -> dict[str, str]:
    """Nothing for this tree; for another one its own modules, and the client beside it."""
    return {} if root == ROOT else {"PYTHONPATH": f"{root}:{root / CLIENT}"}


class ProbeFailed(AssertionError):
    """An order failed in the probe's process, or the process is gone."""


class Probe:
    """A probe engine's process. `ask` gives an order and waits; `order` and `answer` do halves.

    `changes` are of the small engine's settings. `root` is the tree that it runs from.
    """

    def __init__(
        self, socket: str, engine_id: str, log: Path, root: Path = ROOT, **changes: Any
    ) -> None:
        settings = {"socket": socket, "engine_id": engine_id, **changes}
        self.engine_id = engine_id
        self._log = log
        self._unread = b""
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.probe_engine", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=root,
                env=os.environ | environment_of(root),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, op: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self._process.stdin.flush()

    def has_answered(self, seconds: float) -> bool:
        """Whether there is something to be read of an answer, or of its end, within a time."""
        assert self._process.stdout is not None
        return bool(self._unread or select.select([self._process.stdout], [], [], seconds)[0])

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """The next answer; ProbeFailed where the order failed or none comes in time."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(fd, 1 << 20) if readable else b""
            if not received:
                raise ProbeFailed(f"{self.engine_id} does not answer:\n{self._log.read_text()}")
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        said = json.loads(line)
        if "error" in said:
            raise ProbeFailed(f"{self.engine_id}: {said['error']}\n{self._log.read_text()}")
        return said["answer"]

    def ask(self, op: str, **fields: Any) -> Any:
        self.order(op, **fields)
        return self.answer()

    def wait_usable(self, after: int = 0) -> int:
        """The generation of the session that is usable."""
        return int(self.ask("wait_usable", after=after)["generation"])

    def load(self, prefix: str, count: int, first_block: int = 0) -> int:
        """Blocks loaded, every byte of them right."""
        answer = self.ask("load", prefix=prefix, count=count, first_block=first_block)
        assert answer["wrong"] == [], f"{self.engine_id} got wrong bytes of {prefix}: {answer}"
        return int(answer["loaded"])

    def store(self, prefix: str, count: int, first_block: int = 0) -> int:
        """Blocks stored."""
        answer = self.ask("store", prefix=prefix, count=count, first_block=first_block)
        return int(answer["stored"])

    def hits(self, prefix: str, count: int) -> tuple[int, int]:
        """Leading blocks by page and by call; ProbeFailed where the daemon answers neither."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while "unanswered" in (answer := self.ask("probe", prefix=prefix, count=count)):
            if time.monotonic() > deadline:
                raise ProbeFailed(f"{self.engine_id} hears nothing: {answer['unanswered']}")
            self.wait_usable()
        return answer["page"], answer["call"]

    def kill(self) -> float:
        """Kill -9; the time at which the process had ended."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()
        ended = time.monotonic()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        return ended

    def close(self) -> None:
        """End it in order; by force where it does not."""
        try:
            if self._process.poll() is None:
                self.ask("close")
                self._process.wait(25)
        finally:
            self.kill()
