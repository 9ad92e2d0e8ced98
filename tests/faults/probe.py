"""The tests' side of a probe engine: starts the process, gives orders, kills it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import forked
from tests.forked import ForkedProcess

MODULE = "tests.faults.probe_engine"
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
        reads_orders, writes_orders = os.pipe()
        reads_answers, writes_answers = os.pipe()
        self._orders = os.fdopen(writes_orders, "wb")
        self._answers = os.fdopen(reads_answers, "rb", buffering=0)
        with (
            log.open("ab") as errors,
            os.fdopen(reads_orders, "rb") as given,
            os.fdopen(writes_answers, "wb") as output,
        ):
            self._process: subprocess.Popen[bytes] | ForkedProcess
            if root == ROOT:
                self._process = forked.start(
                    [json.dumps(settings)],
                    given=given,
                    output=output,
                    errors=errors,
                    environment=dict(os.environ),
                    module=MODULE,
                )
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, json.dumps(settings)],
                stdin=given,
                stdout=output,
                stderr=errors,
                cwd=root,
                env=os.environ | environment_of(root),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, op: str, **fields: Any) -> None:
        self._orders.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self._orders.flush()

    def has_answered(self, seconds: float) -> bool:
        """Whether there is something to be read of an answer, or of its end, within a time."""
        return bool(self._unread or select.select([self._answers], [], [], seconds)[0])

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """The next answer; ProbeFailed where the order failed or none comes in time."""
        fd = self._answers.fileno()
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
        with contextlib.suppress(BrokenPipeError):  # an order that it did not read
            self._orders.close()
        self._answers.close()
        return ended

    def close(self) -> None:
        """End it in order; by force where it does not."""
        try:
            if self._process.poll() is None:
                self.ask("close")
                self._process.wait(25)
        finally:
            self.kill()
